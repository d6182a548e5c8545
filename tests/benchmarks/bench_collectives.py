"""What an instrumented call of ``torch.distributed`` costs over the bare one, in one process.

    python tests/benchmarks/bench_collectives.py [--rounds 100] [--calls 300]

A world of one rank, so that a call does all of its work in Python and C++ and none of its waiting: what is left of the
difference would drown in the network's noise otherwise. In each round every case is timed bare (``torch.distributed``
as it was imported) and instrumented, with a probe on a real board, in an order that turns about; the difference of the
two is taken within a round, then the median over the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import torch
import torch.distributed as dist
from machine import load, machine_facts

from nbstate.telemetry import collectives, probe
from nbstate.telemetry.board import Board, Phase

LIMIT: Final = 2.0  # microseconds a call

Case = Callable[[], None]


@dataclass
class Measured:
    """One case: seconds a round, bare and instrumented, and how many calls of torch's that is."""

    calls: int
    bare: list[float] = field(default_factory=list)
    instrumented: list[float] = field(default_factory=list)

    def median(self, side: list[float]) -> float:
        """Microseconds a call."""
        return statistics.median(side) / self.calls * 1e6

    @property
    def over(self) -> float:
        """Microseconds a call over the bare one: median of the rounds' own differences."""
        pairs = zip(self.instrumented, self.bare, strict=True)
        return statistics.median(mine - theirs for mine, theirs in pairs) / self.calls * 1e6


def cases(group: dist.ProcessGroup, repeats: int) -> dict[str, tuple[Case, int]]:
    """Each case as a function that makes ``repeats`` rounds of calls, and how many calls that is."""
    x = torch.ones(4, 8)
    out = torch.zeros(4, 8)

    def world() -> None:
        for _ in range(repeats):
            dist.all_reduce(x)

    def in_group() -> None:
        for _ in range(repeats):
            dist.all_reduce(x, group=group)

    def in_turn() -> None:
        for _ in range(repeats):
            dist.all_reduce(x)
            dist.broadcast(x, 0, group=group)

    def handle() -> None:
        for _ in range(repeats):
            dist.all_reduce(x, async_op=True).wait()

    def many_handles() -> None:
        for _ in range(repeats // 10):
            for work in [dist.all_reduce(x, async_op=True) for _ in range(10)]:
                work.wait()

    def gathered() -> None:
        for _ in range(repeats):
            dist.all_gather([out], x)

    def barrier() -> None:
        for _ in range(repeats):
            dist.barrier()

    return {
        "all_reduce, whole world": (world, repeats),
        "all_reduce, in a group": (in_group, repeats),
        "all_reduce and broadcast in a group, in turn": (in_turn, 2 * repeats),
        "all_gather, whole world": (gathered, repeats),
        "all_reduce with async_op, and its wait": (handle, 2 * repeats),
        "ten handles, then ten waits": (many_handles, 20 * (repeats // 10)),
        "barrier, whole world": (barrier, repeats),
    }


def timed(case: Case, instrumented: bool) -> float:
    """Seconds that one round of a case takes."""
    (collectives.install if instrumented else collectives.uninstall)()
    case()  # what a first call has to learn is no cost of a call
    started = time.perf_counter()
    case()
    return time.perf_counter() - started


def measure(group: dist.ProcessGroup, rounds: int, repeats: int) -> dict[str, Measured]:
    """All cases, ``rounds`` times."""
    found: dict[str, Measured] = {}
    for number in range(rounds):
        for name, (case, calls) in cases(group, repeats).items():
            measured = found.setdefault(name, Measured(calls))
            for instrumented in (False, True) if number % 2 else (True, False):
                (measured.instrumented if instrumented else measured.bare).append(timed(case, instrumented))
    return found


def table(found: dict[str, Measured]) -> str:
    """The medians, as markdown."""
    lines = [
        "| case | bare | instrumented | over the bare one | at most 2 us |",
        "|---|---:|---:|---:|---|",
    ]
    for name, measured in found.items():
        sides = [f"{measured.median(side):.2f} us" for side in (measured.bare, measured.instrumented)]
        verdict = "holds" if measured.over <= LIMIT else "DOES NOT HOLD"
        lines.append(f"| {name} | {' | '.join(sides)} | {measured.over:.2f} us | {verdict} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100, help="rounds (default: 100)")
    parser.add_argument("--calls", type=int, default=300, help="calls of each case a round (default: 300)")
    options = parser.parse_args()
    before = load()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    board = Board.create(1)
    probe.attach(board.slot(0))
    probe.phase(Phase.RUNNING)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = measure(dist.new_group([0]), options.rounds, options.calls)
    dist.destroy_process_group()
    probe.detach()
    print(f"{machine_facts(['torch'])}; {options.rounds} rounds; load before {before}, after {load()}\n")
    print(table(found), end="\n\n")
    print("Times are medians per call of torch's, a wait counting as one; each difference is within one round.")


if __name__ == "__main__":
    main()

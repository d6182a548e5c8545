"""How long a launch takes: the bare limit, accelerate's notebook_launcher and ours, side by side in one run.

    python tests/benchmarks/bench_launch.py [--repeats 10] [--ranks 2 8]

The sides take turns, one launch each a round, so that what else the machine does falls on all of them alike; and every
ratio is taken within a round, then the median over the rounds. Each side has a process of its own (``launch_sides``)
whose first launch does not count: after it the fork server is warm, and every import is done.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TextIO

from machine import load, machine_facts

HERE: Final = Path(__file__).parent
LABELS: Final = {
    "bare": "bare limit",
    "accelerate": "accelerate",
    "forkserver": "nbstate, forkserver",
    "fork": "nbstate, fork",
}
OURS: Final = ("forkserver", "fork")
PATIENCE: Final = 60.0  # seconds for one launch; far more than any takes that does not hang
OF_ACCELERATE: Final = 0.5
OF_BARE: Final = 1.5


@dataclass(frozen=True)
class Sample:
    """One launch, in seconds."""

    wall: float
    barrier: float


class LaunchFailedError(Exception):
    """A launch hung or raised; there is no sample."""


class Side:
    """One side's process, started anew after a launch that hung.

    Parameters
    ----------
    name : str
        Which side of ``launch_sides``.
    log : file
        Takes what it and its ranks print.
    """

    def __init__(self, name: str, log: TextIO) -> None:
        self.name = name
        self._log = log
        self._start()

    def _start(self) -> None:
        self._is_warm = False
        self._answers, theirs = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "launch_sides.py"), self.name, str(theirs)],
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs],
            start_new_session=True,
            text=True,
        )
        os.close(theirs)

    def launch(self, ranks: int) -> Sample:
        """Launch once, from a process that has launched before.

        Raises
        ------
        LaunchFailedError
            It hung, or raised.
        """
        if not self._is_warm:
            self._launch(ranks)
            self._is_warm = True
        return self._launch(ranks)

    def _launch(self, ranks: int) -> Sample:
        assert self._process.stdin is not None
        with tempfile.TemporaryDirectory() as folder:
            self._process.stdin.write(json.dumps([ranks, folder]) + "\n")
            self._process.stdin.flush()
            try:
                answer = json.loads(self._answer())
            except LaunchFailedError:
                # while the folder still stands: ranks that are left may write into it
                self.close()
                self._start()
                raise
        if "error" in answer:
            raise LaunchFailedError(answer["error"])
        return Sample(**answer)

    def _answer(self) -> str:
        until, answer = time.monotonic() + PATIENCE, b""
        while not answer.endswith(b"\n"):
            ready, _, _ = select.select([self._answers], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise LaunchFailedError(f"hung for {PATIENCE:.0f} s")
            piece = os.read(self._answers, 65536)
            if not piece:
                raise LaunchFailedError(f"its process ended with {self._process.wait()}: {self._last_words()}")
            answer += piece
        return answer.decode()

    def _last_words(self) -> str:
        self._log.seek(0)
        return self._log.read()[-2000:].strip()

    def close(self) -> None:
        """End the process and everything that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        os.close(self._answers)


def _environment() -> dict[str, str]:
    root = str(HERE.parents[1])
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")])),
        "CUDA_VISIBLE_DEVICES": "",
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }


@dataclass
class Measured:
    """What one side did at one size. ``samples`` has an entry for each round, None where the launch failed."""

    samples: list[Sample | None] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def median(self, what: str) -> float:
        """Seconds; nan if no launch succeeded."""
        return _median([getattr(sample, what) for sample in self.samples if sample])

    def ratio_to(self, other: Measured, what: str) -> float:
        """Median of the rounds' ratios; nan if there is no round in which both succeeded."""
        both = zip(self.samples, other.samples, strict=True)
        return _median([getattr(mine, what) / getattr(theirs, what) for mine, theirs in both if mine and theirs])


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else float("nan")


Results = Mapping[int, Mapping[str, Measured]]


@contextmanager
def all_sides() -> Iterator[list[Side]]:
    """One process per side; all are gone afterwards."""
    with ExitStack() as stack:
        sides = []
        for name in LABELS:
            sides.append(Side(name, stack.enter_context(tempfile.TemporaryFile("w+"))))
            stack.callback(sides[-1].close)
        yield sides


def run(sides: Sequence[Side], sizes: Sequence[int], repeats: int) -> Results:
    """``repeats`` rounds; in each, every side launches once with every number of ranks, in an order that rotates."""
    results = {ranks: {name: Measured() for name in LABELS} for ranks in sizes}
    for number in range(repeats):
        first = number % len(sides)
        for ranks in sizes:
            for side in (*sides[first:], *sides[:first]):
                _try(side, ranks, results[ranks][side.name])
        print(f"round {number + 1} of {repeats} done", file=sys.stderr, flush=True)
    return results


def _try(side: Side, ranks: int, measured: Measured) -> None:
    try:
        measured.samples.append(side.launch(ranks))
    except LaunchFailedError as error:
        measured.samples.append(None)
        measured.failures.append(str(error))
        print(f"{LABELS[side.name]}, {ranks} ranks: {error}", file=sys.stderr, flush=True)


def table(results: Results) -> str:
    """The medians and ratios, as markdown."""
    lines = [
        "| ranks | side | launches | wall | x bare | x accelerate | first barrier | x bare | x accelerate |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for ranks, by_side in results.items():
        for name, measured in by_side.items():
            cells = [str(ranks), LABELS[name], _launches(measured)]
            for what in ("wall", "barrier"):
                cells.append(f"{measured.median(what) * 1e3:.0f} ms")
                cells += [f"{measured.ratio_to(by_side[peer], what):.2f}" for peer in ("bare", "accelerate")]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _launches(measured: Measured) -> str:
    failed = len(measured.failures)
    return f"{len(measured.samples)}" + (f", {failed} failed" if failed else "")


def failures(results: Results) -> list[str]:
    """One line for each launch that gave no sample."""
    return [
        f"failed: {LABELS[name]}, {ranks} ranks: {why}"
        for ranks, by_side in results.items()
        for name, measured in by_side.items()
        for why in measured.failures
    ]


def goals(results: Results) -> list[str]:
    """For each goal, size and start method of ours: one line on whether it holds."""
    return [
        line
        for ranks, by_side in results.items()
        for name in OURS
        for line in (
            _goal(ranks, name, "wall", by_side[name].ratio_to(by_side["accelerate"], "wall"), OF_ACCELERATE),
            _goal(ranks, name, "first barrier", by_side[name].ratio_to(by_side["bare"], "barrier"), OF_BARE),
        )
    ]


def _goal(ranks: int, name: str, what: str, ratio: float, limit: float) -> str:
    peer = "accelerate's" if what == "wall" else "the bare limit's"
    verdict = "holds" if ratio <= limit else "DOES NOT HOLD"
    return f"{verdict}: {LABELS[name]}, {ranks} ranks, {what} {ratio:.3f} of {peer}, at most {limit}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10, help="rounds (default: 10)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8], help="sizes of the world (default: 2 8)")
    options = parser.parse_args()
    before = load()
    with all_sides() as sides:
        results = run(sides, options.ranks, options.repeats)
    print(f"{machine_facts(['torch', 'accelerate'])}; load before {before}, after {load()}\n")
    print(table(results), end="\n\n")
    print("Times are medians; each ratio is the median of the rounds' own ratios.\n")
    print("\n".join(f"- {line}" for line in (*goals(results), *failures(results))))


if __name__ == "__main__":
    main()

"""What it costs to be watched: one write, one look, one refresh, and a training loop with the dashboard and without.

    python tests/benchmarks/bench_dashboard.py [--pairs 40] [--worlds 3] [--ranks 2]

The first three are times of this machine. The last is a ratio: a bare world and one of nbstate, with its live dashboard
in a real kernel, live side by side and take turns in short blocks, the order changing each time (``dashboard_sides``).
Every ratio is that of two neighbours, and the result the median over all of them. A barrier has both its sides in the
same ranks. There is more than one pair of worlds, since where a process lies in memory may make it faster for good.
What a page does with the frames is not part of it: a page need not be on this machine. Takes about three minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from dashboard_sides import IT_HUNG, World
from machine import load, machine_facts

HERE: Final = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]

from real_kernel import RealKernel  # noqa: E402

from nbstate.launch.timeline import EVERY, Timeline  # noqa: E402
from nbstate.telemetry import probe  # noqa: E402
from nbstate.telemetry.board import Board  # noqa: E402

SIZES: Final = (8, 64, 512)
BLOCK: Final = 0.4  # seconds
GOALS: Final = {"train": 1.01, "barriers": 1.03}
WORK: Final = {
    "train": "a DDP training step with the dashboard, of one without nbstate",
    "barriers": "a barrier through wait_for_everyone, of a bare barrier",
}

Pair = tuple[float, float]  # seconds of a round: bare, ours


def each(act: Callable[[], Any], times: int = 2000, repeats: int = 15) -> float:
    """Seconds that ``act`` takes: the median of batches."""
    took = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(times):
            act()
        took.append((time.perf_counter() - began) / times)
    return statistics.median(took)


def writes() -> dict[str, float]:
    """Seconds of each thing that a rank writes on its board."""
    board = Board.create(1)
    probe.attach(board.slot(0))
    flags = {"end_of_dataloader": False, "in_dataloader": True, "sync_with_dataloader": True, "adjust_scheduler": False}

    def collective() -> None:
        probe.enter("all_reduce", 4096)
        probe.leave()

    def barrier() -> None:
        probe.enter_barrier()
        probe.leave()

    try:
        return {
            "a step": each(lambda: probe.step(True)),
            "the gradient state": each(lambda: probe.gradient(sync_gradients=True, num_steps=4, remainder=0, **flags)),
            "an optimizer step": each(probe.optimizer_step),
            "into a collective and out": each(collective),
            "into a barrier and out": each(barrier),
        }
    finally:
        probe.detach()
        board.close()


def looks(size: int) -> dict[str, float]:
    """Seconds of a snapshot of a board on which every rank has written since the last one, or none has."""
    board = Board.create(size)
    timeline = Timeline(size, started=0)
    now, fresh, recorded = EVERY, [], []
    try:
        for step in range(60):
            for rank in range(size):
                slot = board.slot(rank)
                slot.open_collective(step, now - 9, "/tmp/ipykernel_7/42.py", 14, "all_reduce", 4096, False)
                slot.write(step=step)
            began = time.perf_counter()
            snapshots = board.snapshot()
            fresh.append(time.perf_counter() - began)
            now += EVERY
            began = time.perf_counter()
            timeline.record(snapshots, now)
            recorded.append(time.perf_counter() - began)
        return {
            "fresh": statistics.median(fresh),
            "unchanged": each(board.snapshot, times=20),
            "timeline": statistics.median(recorded),
        }
    finally:
        board.close()


REFRESHES: Final = """
import json, time
from nbstate.dashboard import LaunchFacts, LaunchView, LiveDashboard
from nbstate.telemetry.board import Board, Flag, Phase

class Nothing:
    def interrupt(self): ...
    def stop(self): ...
    def stacks(self): return ""
    def diagnose(self): return ""

def refreshes(size, times):
    board, started = Board.create(size), time.monotonic_ns()
    for rank in range(size):
        board.slot(rank).write(phase=Phase.RUNNING, phase_since=started, pid=1000 + rank, flags=Flag.KNOWN, num_steps=4)
        board.slot(rank).write_text(device=f"cuda:{rank}")
    clock = iter(range(1 << 30))
    facts = LaunchFacts("train", "In[5]", "forkserver", "local", size, started)
    live = LiveDashboard(facts, Nothing(), lambda: next(clock))
    live.show()
    took = {True: [], False: []}
    sent = 0
    for turn in range(times):
        for refresh in (True, False) if turn % 2 else (False, True):
            began = time.process_time()
            for step in range(10):
                now = time.monotonic_ns()
                for rank in range(size):
                    slot = board.slot(rank)
                    slot.write_step(10 * turn + step, turn, 3, now)
                    slot.open_collective(turn, now, "/tmp/ipykernel_7/42.py", 14, "all_reduce", 4096, False)
                if refresh:
                    sent += live.refresh(LaunchView(board.snapshot(), now, "running"))
                time.sleep(0.002)  # let the thread that sends have its share
            took[refresh].append((time.process_time() - began) / 10)
    size_of_one = len(live.widget.frame)
    live.finish(LaunchView(board.snapshot(), time.monotonic_ns(), "finished"))
    board.close()
    median = lambda values: sorted(values)[len(values) // 2]
    return {"cpu": median(took[True]) - median(took[False]), "bytes": size_of_one, "sent": sent / (10 * times)}
"""


def refreshes(kernel: RealKernel, size: int) -> dict[str, float]:
    """CPU seconds of a real kernel, all threads, for a refresh in which every rank has changed, and its bytes."""
    times = 15 if size < 512 else 6
    reply = kernel.good(f"print(json.dumps(refreshes({size}, {times})))", timeout=IT_HUNG)
    return dict(json.loads(reply.stdout.strip().splitlines()[-1]))


@contextmanager
def worlds(ranks: int) -> Iterator[tuple[World, World]]:
    """A bare world and one of ours, both warm."""
    with tempfile.TemporaryDirectory() as folder, RealKernel() as kernel:
        pair = World(Path(folder), "bare"), World(Path(folder), "ours")
        environment = _environment()
        bare = subprocess.Popen(
            [sys.executable, str(HERE / "dashboard_sides.py"), "bare", folder, str(ranks)], env=environment
        )
        kernel.good(
            f"import os, sys\nos.environ.update({environment!r})\nsys.path[:0] = {[*sys.path[:2], str(HERE)]!r}\n"
            "import dashboard_sides, nbstate"
        )
        sent = kernel.start(
            f"_ = nbstate.notebook_launcher(dashboard_sides.work, ({folder!r}, 'ours'), num_processes={ranks}, "
            "device='cpu', threads_per_rank=1, dashboard=True)"
        )
        try:
            yield pair
            for world in pair:
                world.stop()
            if bare.wait(IT_HUNG):
                raise RuntimeError("the bare ranks have failed")
            _check(kernel, sent)
        except TimeoutError:
            kernel.interrupt()
            _check(kernel, sent)  # which may say more
            raise
        finally:
            bare.kill()
            bare.wait()
            for world in pair:
                world.close()


def _check(kernel: RealKernel, sent: str) -> None:
    reply = kernel.finish(sent, IT_HUNG)
    if reply.error:
        raise RuntimeError(f"{reply.traceback}\n{reply.stderr}")


def _environment() -> dict[str, str]:
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    ours = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback, "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **ours, "PYTHONPATH": str(HERE.parents[1])}


def training(pair: tuple[World, World], pairs: int) -> list[Pair]:
    """Neighbouring blocks of training steps in both worlds."""
    rounds = max(10, int(BLOCK * 50 / pair[0].ask("train", 50)[0]))
    found = []
    for number in range(pairs):
        order = pair if number % 2 else pair[::-1]
        took = {world.side: world.ask("train", rounds)[0] / rounds for world in order}
        found.append((took["bare"], took["ours"]))
    return found


def barriers(pair: tuple[World, World], pairs: int) -> list[Pair]:
    """Barriers of both kinds by turns, in the ranks of our world."""
    _, ours = pair
    rounds = max(10, int(BLOCK / sum(ours.ask("barriers", 100))))
    return [(bare, mine) for bare, mine in (ours.ask("barriers", rounds) for _ in range(pairs // 2))]


def compare(ranks: int, number_of_worlds: int, pairs: int) -> Iterator[str]:
    """For each kind of work: a row of the table."""
    found: dict[str, list[list[Pair]]] = {name: [] for name in WORK}
    for number in range(number_of_worlds):
        with worlds(ranks) as pair:
            found["train"].append(training(pair, pairs))
            found["barriers"].append(barriers(pair, pairs))
        print(f"worlds {number + 1} of {number_of_worlds} done", file=sys.stderr, flush=True)
    for name, words in WORK.items():
        all_pairs = [one for of_world in found[name] for one in of_world]
        ratio, error = _middle(all_pairs)
        by_world = ", ".join(f"{_middle(of_world)[0]:.3f}" for of_world in found[name])
        verdict = "holds" if ratio <= GOALS[name] else "DOES NOT HOLD"
        yield (
            f"| {words} | {statistics.median(bare for bare, _ in all_pairs) * 1e6:,.0f} µs | {len(all_pairs)} "
            f"| {ratio:.4f} ± {error:.4f} | {by_world} | at most {GOALS[name]:.2f}: {verdict} |"
        )


def _middle(pairs: Sequence[Pair]) -> tuple[float, float]:
    """The median of the ratios, and its standard error as that of normal ones with the same quartiles."""
    ratios = [ours / bare for bare, ours in pairs]
    first, middle, third = statistics.quantiles(ratios, n=4)
    return middle, 1.2533 * (third - first) / 1.349 / len(ratios) ** 0.5


def micro() -> Iterator[str]:
    """The tables of single costs."""
    yield "| a rank writes | time |\n|---|---:|"
    yield from (f"| {what} | {seconds * 1e6:.2f} µs |" for what, seconds in writes().items())
    yield (
        "\n| ranks | snapshot, all have written | snapshot, none has | timeline, a look | refresh, kernel CPU "
        "| message |\n|---:|---:|---:|---:|---:|---:|"
    )
    with RealKernel() as kernel:
        kernel.good(f"import sys\nsys.path.insert(0, {str(HERE.parents[1])!r})\n{REFRESHES}")
        for size in SIZES:
            look, refresh = looks(size), refreshes(kernel, size)
            cells = [f"{look[name] * 1e6:,.0f} µs" for name in ("fresh", "unchanged", "timeline")]
            cells += [f"{refresh['cpu'] * 1e3:.2f} ms", f"{refresh['bytes'] / 1024:.1f} KiB"]
            yield f"| {size} | {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40, help="pairs of blocks in each pair of worlds (default: 40)")
    parser.add_argument("--worlds", type=int, default=3, help="pairs of worlds (default: 3)")
    parser.add_argument("--ranks", type=int, default=2, help="size of a world (default: 2)")
    options = parser.parse_args(arguments)
    before = load()
    tables = [*micro(), ""]
    tables.append("| what | bare | pairs | ratio | by pair of worlds | goal |\n|---|---:|---:|---:|---:|---|")
    tables += compare(options.ranks, options.worlds, options.pairs)
    print(f"{machine_facts(['torch', 'ipykernel', 'anywidget'])}; load before {before}, after {load()}\n")
    print("\n".join(tables))
    print("\nTimes are medians; a ratio is the median over pairs of neighbours, with its standard error.")


if __name__ == "__main__":
    main()

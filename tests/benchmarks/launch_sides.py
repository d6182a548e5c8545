"""The sides of the launch benchmark, one per process: ``python launch_sides.py SIDE FD``.

A side is a stand-in for a kernel: one process with one thread that has imported torch and launches again and again. It
is asked for each launch with the number of ranks and an empty folder (see ``side``).

Every side does the same: N ranks come to be, form one gloo world, pass a barrier, and are gone. Each rank writes when
it had passed the barrier into a file of its own, on all sides alike, so that no launcher's way of bringing results back
is part of what is measured.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch.distributed as dist
from launchers import LAUNCHERS, state_of
from side import serve


def report(folder: str, rank: int, world_size: int) -> None:
    """In a rank: say that the first barrier is passed."""
    passed = time.monotonic_ns()
    Path(folder, f"{rank}.json").write_text(json.dumps([world_size, passed]))


def bare(ranks: int, folder: str) -> None:
    """As little as it can be: fork, a file as the store, gloo, a barrier."""
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            _be_bare(rank, ranks, folder)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        raise RuntimeError(f"the bare ranks ended with {codes}")


def _be_bare(rank: int, ranks: int, folder: str) -> None:
    code = 1
    try:
        store = dist.FileStore(f"{folder}/store", ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        dist.barrier()
        report(folder, rank, dist.get_world_size())
        code = 0
    finally:
        os._exit(code)


def by_launcher(name: str, ranks: int, folder: str) -> None:
    """A notebook_launcher: the peer's, or ours."""
    LAUNCHERS[name](_meet, (name, folder), ranks)


def _meet(launcher: str, folder: str) -> None:
    state = state_of(launcher)
    state.wait_for_everyone()
    report(folder, state.process_index, state.num_processes)


SIDES: dict[str, Callable[[int, str], None]] = {
    "bare": bare,
    **{name: partial(by_launcher, name) for name in LAUNCHERS},
}


def measure(side: str, ranks: int, folder: str) -> dict[str, float]:
    """Launch once.

    Returns
    -------
    dict
        ``wall``: seconds of the whole call; ``barrier``: seconds from the call until the last rank had passed the first
        barrier.

    Raises
    ------
    RuntimeError
        The ranks were not one world of that size, so there is nothing to compare.
    """
    began = time.monotonic_ns()
    SIDES[side](ranks, folder)
    ended = time.monotonic_ns()
    told = [json.loads(file.read_text()) for file in Path(folder).glob("*.json")]
    sizes = [size for size, _ in told]
    if sizes != [ranks] * ranks:
        raise RuntimeError(f"{ranks} ranks should be one world of {ranks}, but worlds of {sizes} passed the barrier")
    last = max(passed for _, passed in told)
    return {"wall": (ended - began) / 1e9, "barrier": (last - began) / 1e9}


if __name__ == "__main__":
    serve(int(sys.argv[2]), partial(measure, sys.argv[1]))

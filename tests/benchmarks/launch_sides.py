"""The sides of the launch benchmark, one per process: ``python launch_sides.py SIDE FD``.

A side is a stand-in for a kernel: one process with one thread that has imported torch and launches again and again. It
reads the number of ranks and an empty folder for each launch from its standard input, one JSON line each, and answers
on descriptor FD. A side has a process to itself because a launcher may leave something behind (a store's server, its
thread, environment variables) that the next one would stumble over.

Every side does the same: N ranks come to be, form one gloo world, pass a barrier, and are gone. Each rank writes when
it had passed the barrier into a file of its own, on all sides alike, so that no launcher's way of bringing results back
is part of what is measured.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

DEVICE = "cpu"


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


def accelerate_ranks(ranks: int, folder: str) -> None:
    """The peer's notebook_launcher, with its defaults and a port that nobody has used."""
    from accelerate import notebook_launcher

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    notebook_launcher(_meet_with_accelerate, (folder,), num_processes=ranks, use_port=str(port))


def _meet_with_accelerate(folder: str) -> None:
    from accelerate import PartialState

    # without cpu=True these would be N worlds of one rank each
    state = PartialState(cpu=True)
    state.wait_for_everyone()
    report(folder, state.process_index, state.num_processes)


def nbstate_ranks(start_method: str, ranks: int, folder: str) -> None:
    """Ours."""
    from nbstate import notebook_launcher

    notebook_launcher(
        _meet_with_nbstate, (folder,), num_processes=ranks, device=DEVICE, start_method=start_method, dashboard=False
    )


def _meet_with_nbstate(folder: str) -> None:
    from nbstate import PartialState

    state = PartialState()
    state.wait_for_everyone()
    report(folder, state.process_index, state.num_processes)


SIDES: dict[str, Callable[[int, str], None]] = {
    "bare": bare,
    "accelerate": accelerate_ranks,
    "forkserver": partial(nbstate_ranks, "forkserver"),
    "fork": partial(nbstate_ranks, "fork"),
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


def main(side: str, fd: int) -> None:
    """Serve until standard input ends."""
    os.set_inheritable(fd, False)
    with os.fdopen(fd, "w", buffering=1) as answers:
        for line in sys.stdin:
            ranks, folder = json.loads(line)
            answer: dict[str, Any]
            try:
                answer = measure(side, ranks, folder)
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

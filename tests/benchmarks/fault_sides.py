"""The sides of the fault benchmark, one per process: ``python fault_sides.py SIDE FD``.

Three things that a launcher is trusted with: to say that a rank has failed, to bring the ranks' output, and to carry a
large argument. Each answers one request (see ``side``): its name, the number of ranks, an empty folder.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import psutil
import torch
from launchers import LAUNCHERS, state_of
from side import serve

LINES: Final = 20_000
MEGABYTE: Final = 2**20
TENSOR_BYTES: Final = 600 * MEGABYTE
_LINE: Final = re.compile(r"^(?:\[(\d+)\] )?rank (\d+) line (\d{5}) x{40}$", re.MULTILINE)


def time_from_raise_to_error(launcher: str, ranks: int, folder: str) -> dict[str, float]:
    """Rank 1 raises while the others wait in a barrier.

    Returns
    -------
    dict
        ``seconds`` from the raise to the error in the caller's hand; ``told``: 1 if the error's text holds what rank 1
        raised, else 0.
    """
    try:
        LAUNCHERS[launcher](_raise, (launcher, folder), ranks)
    except Exception as error:
        caught = time.monotonic()
        raised = float(Path(folder, "raised").read_text())
        return {"seconds": caught - raised, "told": float("ValueError: boom" in str(error))}
    raise RuntimeError("a rank raised, and the launch did not")


def _raise(launcher: str, folder: str) -> None:
    state = state_of(launcher)
    if state.process_index == 1:
        time.sleep(0.1)  # by now the others wait
        Path(folder, "raised").write_text(str(time.monotonic()))
        raise ValueError("boom")
    state.wait_for_everyone()


def lines_of_all_ranks(launcher: str, ranks: int, folder: str) -> dict[str, float]:
    """Every rank prints as fast as it can, into a standard output that is a file.

    Returns
    -------
    dict
        ``rate``: lines a second, from the first print to the launch's end; ``intact``: share of the lines that arrived
        whole (and, where the launcher marks lines, with the right rank).
    """
    arrived = Path(folder, "stdout")
    with _standard_output_in(arrived):
        LAUNCHERS[launcher](_print, (launcher, folder), ranks)
    ended = time.monotonic()
    began = min(float(Path(folder, f"{rank}.began").read_text()) for rank in range(ranks))
    whole = {
        (rank, number) for marked, rank, number in _LINE.findall(arrived.read_text()) if not marked or marked == rank
    }
    printed = ranks * LINES
    return {"rate": printed / (ended - began), "intact": len(whole) / printed}


def _print(launcher: str, folder: str) -> None:
    state = state_of(launcher)
    state.wait_for_everyone()
    rank = state.process_index
    Path(folder, f"{rank}.began").write_text(str(time.monotonic()))
    for number in range(LINES):
        print(f"rank {rank} line {number:05d} {'x' * 40}")


@contextmanager
def _standard_output_in(file: Path) -> Iterator[None]:
    sys.stdout.flush()
    before = os.dup(1)
    into = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(into, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(before, 1)
        os.close(before)
        os.close(into)


def memory_of_a_large_argument(launcher: str, ranks: int, folder: str) -> dict[str, float]:
    """Every rank reads all of a tensor argument; then all processes' shares of memory (PSS) are added up.

    Returns
    -------
    dict
        ``copies``: how many times the tensor is in memory beyond the caller's own; ``seconds``: how long the launch
        with it took.
    """
    small = _launch_with(launcher, torch.ones(1), ranks, folder)
    tensor = torch.ones(TENSOR_BYTES // 4)
    began = time.monotonic()
    large = _launch_with(launcher, tensor, ranks, folder)
    return {"copies": (large - small - TENSOR_BYTES) / TENSOR_BYTES, "seconds": time.monotonic() - began}


def _launch_with(launcher: str, tensor: torch.Tensor, ranks: int, folder: str) -> float:
    LAUNCHERS[launcher](_read, (launcher, tensor, os.getpid(), folder), ranks)
    return float(Path(folder, "bytes").read_text())


def _read(launcher: str, tensor: torch.Tensor, caller: int, folder: str) -> None:
    state = state_of(launcher)
    tensor.sum()
    state.wait_for_everyone()
    if state.process_index == 0:
        process = psutil.Process(caller)
        everyone = [process, *process.children(recursive=True)]
        Path(folder, "bytes").write_text(str(sum(one.memory_full_info().pss for one in everyone)))
    state.wait_for_everyone()


MEASURES: Final[dict[str, Callable[[str, int, str], dict[str, float]]]] = {
    "raise": time_from_raise_to_error,
    "lines": lines_of_all_ranks,
    "memory": memory_of_a_large_argument,
}


def respond(launcher: str, measure: str, ranks: int, folder: str) -> dict[str, Any]:
    """Measure one thing once."""
    return MEASURES[measure](launcher, ranks, folder)


if __name__ == "__main__":
    serve(int(sys.argv[2]), partial(respond, sys.argv[1]))

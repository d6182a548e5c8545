"""The two worlds of the dashboard benchmark: the same ranks, the same work, once bare and once as nbstate runs them.

Both worlds live side by side. Each does nothing until it is told to do so many rounds of its work, and says how long
they took. So one block of the one can follow on a block of the other within a second, whatever else the machine does,
and their ratio is that of two neighbours. A world at rest costs nothing: rank 0 blocks in the read of a pipe, the
others in a broadcast.

A barrier is compared within one world, the instrumented one and torch's own by turns in the same processes: what the
system makes of the sockets of two worlds differs by more than what is to be measured.

``python dashboard_sides.py bare FOLDER RANKS`` is the bare world: forked, a file as the store, torch alone. The other
is ``work`` as the function of a ``notebook_launcher`` in a real kernel.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

IT_HUNG: Final = 60.0  # seconds
ORDERS: Final = "{side}.orders"
ANSWERS: Final = "{side}.answers"
_WARM_UP: Final = {"train": 50, "barriers": 300}
_TASKS: Final = ("stop", *_WARM_UP)


class World:
    """The kernel's end of one side: ``ask`` it for a block of work. Made before the ranks are."""

    def __init__(self, folder: Path, side: str) -> None:
        self.side = side
        for name in (ORDERS, ANSWERS):
            os.mkfifo(folder / name.format(side=side))
        # Open for both, so that neither end waits for the other to open, and no end of file comes.
        self._orders = os.open(folder / ORDERS.format(side=side), os.O_RDWR)
        self._answers = open(folder / ANSWERS.format(side=side), "r+b", buffering=0)  # noqa: SIM115

    def ask(self, task: str, rounds: int) -> list[float]:
        """What so many rounds took, in seconds: see the tasks below.

        Raises
        ------
        TimeoutError
            Its ranks hang, or are gone.
        """
        os.write(self._orders, f"{task} {rounds}\n".encode())
        if not select.select([self._answers], [], [], IT_HUNG)[0]:
            raise TimeoutError(f"the {self.side} ranks have not answered for {IT_HUNG:.0f} s")
        return list(json.loads(self._answers.readline()))

    def stop(self) -> None:
        """Let the ranks go home."""
        os.write(self._orders, b"stop 0\n")

    def close(self) -> None:
        """Close the pipes."""
        os.close(self._orders)
        self._answers.close()


def work(folder: str, side: str) -> None:
    """In a rank, whose process group exists or can be made from the environment: do what is asked for."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tasks: dict[str, Callable[[int], list[float]]] = {}
    if side == "ours":
        from nbstate import PartialState

        tasks["barriers"] = _taking_turns(_bare(dist.barrier), PartialState().wait_for_everyone)
    tasks["train"] = _repeated(_training())
    for name, task in tasks.items():
        task(_WARM_UP[name])
    with contextlib.ExitStack() as pipes:
        orders = answers = None
        if dist.get_rank() == 0:
            orders = pipes.enter_context(Path(folder, ORDERS.format(side=side)).open("rb"))
            answers = pipes.enter_context(Path(folder, ANSWERS.format(side=side)).open("wb", buffering=0))
        while True:
            order = torch.zeros(2, dtype=torch.int64)
            if orders is not None:
                name, _, asked = orders.readline().decode().rpartition(" ")
                order = torch.tensor([_TASKS.index(name), int(asked)])
            dist.broadcast(order, 0)
            name, rounds = _TASKS[int(order[0])], int(order[1])
            if name == "stop":
                break
            took = tasks[name](rounds)
            if answers is not None:
                answers.write(f"{json.dumps(took)}\n".encode())


def _bare(instrumented: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's own function, from below what nbstate has put in its place."""
    bare: Any = getattr(instrumented, "__wrapped__", instrumented)
    if bare is instrumented or "nbstate" in bare.__code__.co_filename:
        raise RuntimeError("torch.distributed is not instrumented as expected, so there is nothing to compare")
    return bare


def _repeated(act: Callable[[], Any]) -> Callable[[int], list[float]]:
    """Seconds of so many rounds together: what a dashboard takes now and then, from outside, is in it."""

    def task(rounds: int) -> list[float]:
        began = time.perf_counter()
        for _ in range(rounds):
            act()
        return [time.perf_counter() - began]

    return task


def _taking_turns(*acts: Callable[[], Any]) -> Callable[[int], list[float]]:
    """Seconds of one round of each, the median of so many that take turns."""

    def task(rounds: int) -> list[float]:
        took: list[list[float]] = [[] for _ in acts]
        for _ in range(rounds):
            for act, mine in zip(acts, took, strict=True):
                began = time.perf_counter()
                act()
                mine.append(time.perf_counter() - began)
        return [statistics.median(mine) for mine in took]

    return task


def _training() -> Callable[[], None]:
    """One step of a small network, as people write it; the only thing that nbstate sees of it is what torch tells."""
    model = DistributedDataParallel(
        torch.nn.Sequential(
            torch.nn.Linear(256, 512),
            torch.nn.ReLU(),
            torch.nn.Linear(512, 512),
            torch.nn.ReLU(),
            torch.nn.Linear(512, 10),
        )
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images, labels = torch.randn(128, 256), torch.randint(0, 10, (128,))

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def _be_bare(folder: str, rank: int, ranks: int) -> None:
    code = 1
    try:
        store = dist.FileStore(f"{folder}/store", ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        work(folder, "bare")
        code = 0
    finally:
        os._exit(code)


def main(folder: str, ranks: int) -> int:
    """The bare world, from its start to its end."""
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            _be_bare(folder, rank, ranks)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children)


if __name__ == "__main__":
    sys.exit(main(sys.argv[2], int(sys.argv[3])))

"""The sides of the training benchmark, one per process: ``python training_sides.py SIDE FD``.

Every side trains the same model on the same data in the same loop: by hand with plain torch, with accelerate, with
nbstate. Each answers requests of three items (see ``side``): what to measure, the number of ranks, an empty folder.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import timeit
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch
import torch.distributed as dist
from launchers import LAUNCHERS
from side import serve
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WARM_UP: Final = 30  # steps
BLOCKS: Final = 7
SIZES: Final = {"tiny": 150, "medium": 25}
"""Steps in a block, by model."""
LAUNCHER: Final = {"accelerate": "accelerate", "nbstate": "forkserver"}


def _model(size: str) -> nn.Module:
    torch.manual_seed(0)
    if size == "tiny":
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), *(nn.Linear(512, 512), nn.ReLU()) * 3, nn.Linear(512, 10))


def _data(size: str, ranks: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    samples = 16 * ranks * (WARM_UP + BLOCKS * SIZES[size])
    return TensorDataset(
        torch.randn(samples, 64, generator=generator), torch.randint(10, (samples,), generator=generator)
    )


def _plain_steps(size: str, rank: int, ranks: int) -> Iterator[None]:
    model: nn.Module = _model(size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = _data(size, ranks)
    sampler = DistributedSampler(data, ranks, rank, shuffle=False) if ranks > 1 else None
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    if ranks > 1:
        model = DistributedDataParallel(model)
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def _prepared_steps(library: ModuleType, size: str, ranks: int) -> Iterator[None]:
    accelerator = library.Accelerator(cpu=True)
    model = _model(size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(_data(size, ranks), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        yield


def _seconds_per_step(steps: Iterator[None], size: str) -> float:
    """Median over blocks of steps, so that one interruption of the machine does not count."""
    for _ in range(WARM_UP):
        next(steps)
    blocks = []
    for _ in range(BLOCKS):
        began = time.perf_counter()
        for _ in range(SIZES[size]):
            next(steps)
        blocks.append((time.perf_counter() - began) / SIZES[size])
    return statistics.median(blocks)


def _import(side: str) -> ModuleType:
    if side == "accelerate":
        import accelerate

        return accelerate
    import nbstate

    return nbstate


def _train_prepared(side: str, size: str, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    seconds = _seconds_per_step(_prepared_steps(_import(side), size, ranks), size)
    if os.environ.get("RANK", "0") == "0":
        Path(folder, "seconds").write_text(str(seconds))


def _train_plain(size: str, rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    if ranks > 1:
        store = dist.FileStore(f"{folder}/store", ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    seconds = _seconds_per_step(_plain_steps(size, rank, ranks), size)
    if rank == 0:
        Path(folder, "seconds").write_text(str(seconds))


def _fork(size: str, ranks: int, folder: str) -> None:
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                _train_plain(size, rank, ranks, folder)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        raise RuntimeError(f"the plain ranks ended with {codes}")


def step(side: str, size: str, ranks: int, folder: str) -> dict[str, float]:
    """Train; ``seconds`` per step on rank 0."""
    if side == "plain":
        _fork(size, ranks, folder)
    else:
        LAUNCHERS[LAUNCHER[side]](_train_prepared, (side, size, ranks, folder), ranks)
        _forget_state(side)
    return {"seconds": float(Path(folder, "seconds").read_text())}


def _forget_state(side: str) -> None:
    """The peer's launch of one rank runs in the caller itself, and leaves a state there that the next would refuse."""
    if side == "accelerate":
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)


def _read_states(side: str, folder: str) -> None:
    library = _import(side)
    accelerator = library.Accelerator(cpu=True)
    state, gradient = accelerator.state, accelerator.gradient_state
    names = {"state": state, "gradient": gradient, "library": library, "accelerator": accelerator}
    reads = {
        "is_main_process": "accelerator.is_main_process",
        "end_of_dataloader": "gradient.end_of_dataloader",
        "PartialState": "PartialState()",
    }
    names["PartialState"] = library.PartialState if side == "nbstate" else _import("accelerate").PartialState
    lines = []
    for name, statement in reads.items():
        taken = min(timeit.repeat(statement, globals=names, number=20_000, repeat=5)) / 20_000
        lines.append(f"{name} {taken}")
    if os.environ.get("RANK", "0") == "0":
        Path(folder, "reads").write_text("\n".join(lines))


def reads(side: str, _: str, ranks: int, folder: str) -> dict[str, float]:
    """Seconds that each of a few reads takes in a rank."""
    if side == "plain":
        return {}
    LAUNCHERS[LAUNCHER[side]](_read_states, (side, folder), ranks)
    pairs = [line.split() for line in Path(folder, "reads").read_text().splitlines()]
    return {name: float(seconds) for name, seconds in pairs}


MEASURES: Final[dict[str, Callable[[str, str, int, str], dict[str, float]]]] = {"step": step, "reads": reads}


def respond(side: str, measure: str, size: str, ranks: int, folder: str) -> dict[str, Any]:
    """Measure one thing once."""
    return MEASURES[measure](side, size, ranks, folder)


if __name__ == "__main__":
    serve(int(sys.argv[2]), partial(respond, sys.argv[1]))

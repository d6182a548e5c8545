"""Checkpoints: whole or not there, and a run that goes on from one is the run that was not interrupted."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from nbstate.errors import RankError
from nbstate.training import Accelerator, DataLoaderConfiguration, ProjectConfiguration, set_seed, storage

Ranks = Callable[..., list[Any]]


class Net(torch.nn.Module):
    """Has what makes saving hard: tied weights, a buffer, and dropout that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.again = torch.nn.Linear(4, 4)
        self.again.weight = self.first.weight
        self.norm = torch.nn.BatchNorm1d(4)
        self.drop = torch.nn.Dropout(0.3)
        self.last = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.drop(self.norm(self.again(torch.tanh(self.first(x))))))
        return out


class Count:
    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(3)
        return iter([(torch.randn(4, generator=generator), torch.tensor([float(i)])) for i in range(22)])


def build(folder: str, precision: str = "no", stream: bool = False, **config: Any) -> tuple[Any, ...]:
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(
        mixed_precision=precision, project_config=project, dataloader_config=DataLoaderConfiguration(**config)
    )
    set_seed(5, device_specific=True)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(22, 4, generator=generator)
    torch.manual_seed(2)
    model = Net()
    set_seed(7, device_specific=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    data: Any = Stream() if stream else TensorDataset(rows, rows.sum(1, keepdim=True))
    loader: DataLoader[Any] = DataLoader(data, batch_size=2, shuffle=None if stream else True)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler, loader)


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([value.detach().flatten().double() for value in model.state_dict().values()])


def run(
    folder: str, save_at: int | None, stop_at: int | None, resume: bool, way: dict[str, Any]
) -> tuple[torch.Tensor, tuple[float, ...]]:
    """Three epochs; saved after, stopped after, or resumed at the given number of batches."""
    accelerator, model, optimizer, scheduler, loader = build(folder, **way)
    count = Count()
    accelerator.register_for_checkpointing(count)
    if resume:
        if not accelerator.is_main_process:
            torch.rand(3)  # what was drawn before must not matter
        accelerator.load_state()
    length = 6
    epoch, done = divmod(count.seen, length)
    for number in range(epoch, 3):
        batches = accelerator.skip_first_batches(loader, done) if number == epoch and done else loader
        for x, y in batches:
            accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            count.seen += 1
            if count.seen == save_at:
                accelerator.save_state()
            if count.seen == stop_at:
                return flat(model), ()
    draws = random.random(), float(np.random.rand()), torch.rand(()).item()
    return flat(model), (float(optimizer.param_groups[0]["lr"]), *draws)


WAYS: list[dict[str, Any]] = [
    {},
    {"use_seedable_sampler": True},
    {"dispatch_batches": True},
    {"stream": True, "dispatch_batches": False},
]


def resume_in_every_way(folder: str, save_at: int, half: str) -> list[Any]:
    results = []
    for number, way in enumerate(WAYS):
        place = f"{folder}/{number}"
        if half == "first":
            whole = run(f"{place}-whole", None, None, False, way)
            results.append((whole, run(place, save_at, save_at + 2, False, way)))
        else:
            results.append(run(place, None, None, True, way))
    return results


@pytest.mark.parametrize("save_at", [8, 12])
def test_a_resumed_run_is_the_run_that_was_not_interrupted(in_ranks: Ranks, tmp_path: Path, save_at: int) -> None:
    """In the middle of an epoch, and at its last batch: weights, learning rate and random numbers of both ranks."""
    first = in_ranks(resume_in_every_way, str(tmp_path), save_at, "first")
    # Another launch: nothing but the files knows of the first one.
    second = in_ranks(resume_in_every_way, str(tmp_path), save_at, "second")
    for rank in range(2):
        for way, (whole, stopped), resumed in zip(WAYS, first[rank], second[rank], strict=True):
            assert not torch.equal(stopped[0], whole[0]), way
            assert torch.equal(resumed[0], whole[0]), way
            assert resumed[1] == whole[1], way


def values(model: torch.nn.Module) -> set[float]:
    return set(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist())


def save_until_killed(folder: str, automatic: bool, victim: int, seed: int) -> int:
    """Load the last checkpoint, check it, and save higher and higher numbers until one rank kills itself."""
    if automatic:
        project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2)
        accelerator, place = Accelerator(project_config=project), None
    else:
        accelerator, place = Accelerator(), f"{folder}/checkpoint"
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    count = Count()
    accelerator.register_for_checkpointing(count)
    model, optimizer = accelerator.prepare(model, optimizer)
    said = Path(folder, "said")

    @accelerator.on_main_process
    def say(number: int) -> None:
        storage.write_file(said, lambda file: file.write(str(number).encode()))

    if said.exists():
        accelerator.load_state(place)
        (value,) = values(model)
        momenta = {float(state["momentum_buffer"].mean()) for state in optimizer.state.values()}
        assert momenta == {value}, (momenta, value)
        assert count.seen == value
        # What save_state returned from is on the disk; what it was in the middle of may be.
        assert value in (float(said.read_text()), float(said.read_text()) + 1), value
        accelerator.wait_for_everyone()
        say(count.seen)
    if accelerator.process_index == victim:
        delay = random.Random(seed).uniform(0.0, 0.06)
        threading.Thread(target=lambda: (time.sleep(delay), os.kill(os.getpid(), signal.SIGKILL)), daemon=True).start()
    while True:
        count.seen += 1
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(count.seen)
                optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, count.seen)
        accelerator.save_state(place)
        say(count.seen)


def kill_often(in_ranks: Ranks, folder: Path, times: int) -> None:
    for trial in range(times):
        automatic = trial % 2 == 0
        place = folder / ("automatic" if automatic else "named")
        place.mkdir(exist_ok=True)
        with pytest.raises(RankError, match="SIGKILL") as caught:
            in_ranks(save_until_killed, str(place), automatic, trial // 2 % 2, trial, start_method="forkserver")
        assert caught.value.rank == trial // 2 % 2, caught.value


def test_a_rank_killed_while_saving_leaves_a_whole_checkpoint(in_ranks: Ranks, tmp_path: Path) -> None:
    kill_often(in_ranks, tmp_path, 10)


@pytest.mark.long
def test_fifty_killed_ranks_leave_whole_checkpoints(in_ranks: Ranks, tmp_path: Path) -> None:
    kill_often(in_ranks, tmp_path, 50)

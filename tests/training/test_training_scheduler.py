"""The scheduler keeps pace with the optimizer, and a OneCycle never passes its total."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader

from nbstate.state import GradientAccumulationPlugin
from nbstate.training import Accelerator, DataLoaderConfiguration, GradScalerKwargs

Ranks = Callable[..., list[Any]]


def epochs_of_schedule(steps: int, split: bool, with_optimizer: bool = True) -> list[int]:
    """How far the scheduler is after each of 6 batches."""
    accelerator = Accelerator(
        gradient_accumulation_steps=steps,
        dataloader_config=DataLoaderConfiguration(split_batches=split),
        step_scheduler_with_optimizer=with_optimizer,
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))
    # The scheduler first: it must find its optimizer whatever the order.
    scheduler, optimizer = accelerator.prepare(scheduler, optimizer)
    seen = []
    for _ in range(6):
        with accelerator.accumulate():
            optimizer.step()
            scheduler.step()
            seen.append(scheduler.scheduler.last_epoch)
    assert scheduler.get_last_lr() == [1 / (1 + seen[-1])]
    return seen


def test_it_advances_on_synchronised_steps_only() -> None:
    assert epochs_of_schedule(2, split=False) == [0, 1, 1, 2, 2, 3]
    assert epochs_of_schedule(3, split=False) == [0, 0, 1, 1, 1, 2]


def test_it_advances_by_the_number_of_ranks_unless_batches_are_split(in_ranks: Ranks) -> None:
    assert in_ranks(epochs_of_schedule, 2, False) == [[0, 2, 2, 4, 4, 6]] * 2
    assert in_ranks(epochs_of_schedule, 2, True) == [[0, 1, 1, 2, 2, 3]] * 2


def test_it_may_go_its_own_way(in_ranks: Ranks) -> None:
    assert in_ranks(epochs_of_schedule, 1, False, False) == [[1, 2, 3, 4, 5, 6]] * 2


def one_cycle(n: int, steps: int, epochs: int) -> tuple[int, int]:
    """A OneCycle made for one process, run to the end of the data and beyond."""
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = DataLoader(torch.ones(n, 1), batch_size=1)  # type: ignore[arg-type]
    scheduler = OneCycleLR(optimizer, max_lr=1.0, total_steps=n // steps, cycle_momentum=False)
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
    for _ in range(epochs):
        for batch in data:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return scheduler.last_epoch, scheduler.total_steps


def test_one_cycle_is_run_to_its_total_and_never_past_it(each_in_ranks: Ranks) -> None:
    # torch raises where a OneCycle is advanced past its total.
    cases = [(n, steps, epochs) for n, steps in [(16, 2), (13, 2), (12, 4), (9, 1)] for epochs in (1, 2)]
    for (n, steps, epochs), found in zip(cases, each_in_ranks(one_cycle, cases), strict=True):
        for reached, total in [one_cycle(n, steps, epochs), *found]:
            assert reached == total == n // steps, (n, steps, epochs)


def test_it_waits_when_the_optimizer_skipped_its_step() -> None:
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=8.0)])
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    idle = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = LambdaLR(optimizer, lambda epoch: 1.0)
    optimizer, scheduler, idle = accelerator.prepare(optimizer, scheduler, idle)
    reached = []
    for factor in (float("inf"), 1.0):
        accelerator.backward((weight * factor).sum())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        reached.append(scheduler.scheduler.last_epoch)
    assert reached == [0, 1]


def plateau() -> list[int]:
    accelerator = Accelerator()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    optimizer, scheduler = accelerator.prepare(optimizer, ReduceLROnPlateau(optimizer, patience=2))
    seen = []
    for metric in (1.0, 1.0, 1.0):
        scheduler.step(metric)
        seen.append(scheduler.num_bad_epochs)
    return seen


def test_a_metric_counts_once_whatever_the_number_of_ranks(in_ranks: Ranks) -> None:
    assert in_ranks(plateau) == [[0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize(("adjust", "calls"), [(True, 5), (False, 3)])
def test_adjust_scheduler_counts_the_calls_between(adjust: bool, calls: int) -> None:
    plugin = GradientAccumulationPlugin(num_steps=2, adjust_scheduler=adjust)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    optimizer, scheduler = accelerator.prepare(optimizer, LambdaLR(optimizer, lambda epoch: 1.0))
    for _ in range(4):
        with accelerator.accumulate():
            optimizer.step()
            scheduler.step()
    assert (scheduler.scheduler.last_epoch, scheduler.state_dict()["_step_count"]) == (2, calls)
    assert accelerator.prepare(scheduler) is scheduler

"""Trackers, local SGD, memory and early stopping: what stands around a training loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nbstate.errors import ArgumentTypeError, ArgumentValueError
from nbstate.training import Accelerator, LocalSGD, find_executable_batch_size
from nbstate.training.memory import is_out_of_memory, release_memory
from nbstate.training.tracking import GeneralTracker

Ranks = Callable[..., list[Any]]


class Kept(GeneralTracker):
    name = "kept"
    requires_logging_directory = False

    def __init__(self) -> None:
        self.rows: list[Any] = []

    @property
    def tracker(self) -> list[Any]:
        return self.rows

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.rows.append(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.rows.append((step, values, kwargs))

    def finish(self) -> None:
        self.rows.append("the end")


def test_a_tracker_of_ones_own() -> None:
    kept = Kept()
    accelerator = Accelerator(cpu=True, log_with=kept)
    accelerator.init_trackers("a run", config={"rate": 0.1})
    accelerator.log({"loss": 0.5}, step=2, log_kwargs={"kept": {"unit": "nats"}})
    assert accelerator.get_tracker("kept", unwrap=True) is kept.rows
    accelerator.end_training()
    assert kept.rows == [{"rate": 0.1}, (2, {"loss": 0.5}, {"unit": "nats"}), "the end"]


def test_trackers_that_are_not_known() -> None:
    with pytest.raises(ArgumentValueError, match="'tensorboard', 'all'"):
        Accelerator(cpu=True, log_with="paper")
    accelerator = Accelerator(cpu=True, log_with=Kept())
    with pytest.raises(ArgumentValueError, match="init_trackers first"):
        accelerator.get_tracker("kept")
    with pytest.raises(ArgumentValueError, match="log_with has"):
        accelerator.get_tracker("other")


def writes_for_tensorboard(folder: str) -> int:
    accelerator = Accelerator(log_with="tensorboard", project_dir=folder)
    accelerator.init_trackers("a run", config={"rate": 0.1})
    for step in range(3):
        accelerator.log({"loss": torch.tensor(float(step)), "both": {"a": 1.0, "b": 2.0}}, step=step)
    accelerator.get_tracker("tensorboard").log_images({}, step=0)
    accelerator.end_training()
    return len(accelerator.trackers)


@pytest.mark.filterwarnings("ignore::Warning:tensorboard", "ignore::Warning:google")
def test_tensorboard_reads_what_one_rank_wrote(in_ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    in_ranks(writes_for_tensorboard, str(tmp_path), start_method="forkserver")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [file] = (tmp_path / "a run").glob("events.*")
    events = EventAccumulator(str(file)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert '"rate": 0.1' in (tmp_path / "a run" / "hparams.json").read_text()


def trains_apart(steps: int, every: int) -> tuple[list[float], list[float], bool]:
    """Rank r always adds r + 1: the weights after training, and what an average at each meeting would make."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    mine, seen, wanted, average = float(accelerator.process_index + 1), [], [], 0.0
    with LocalSGD(accelerator, model, local_sgd_steps=every) as local:
        for step in range(1, steps + 1):
            with accelerator.accumulate(model):
                accelerator.backward(-2 * mine * model(torch.ones(1, 1)).sum())
                optimizer.step()
                optimizer.zero_grad()
                local.step()
            # Every second batch moves the weight by both batches' gradients, each halved: by 2 * mine.
            average = average if step % 2 else average + 2 * mine
            if step % every == 0:
                [average] = accelerator.reduce(torch.tensor([average]), "mean").tolist()
            seen.append(accelerator.unwrap_model(model).weight.item())
            wanted.append(average)
    end = accelerator.unwrap_model(model).weight.item()
    return seen, wanted, accelerator.gather(torch.tensor([end])).unique().numel() == 1


def stops_early() -> tuple[bool, bool, bool]:
    accelerator = Accelerator()
    before = accelerator.check_trigger()
    if accelerator.process_index == 1:
        accelerator.set_trigger()
    return before, accelerator.check_trigger(), accelerator.check_trigger()


def around() -> tuple[Any, Any]:
    return trains_apart(7, 3), stops_early()


def test_local_sgd_meets_every_few_calls_and_a_trigger_is_heard_by_all(in_ranks: Ranks) -> None:
    for (seen, wanted, alike), triggers in in_ranks(around):
        assert seen == pytest.approx(wanted)
        assert alike
        assert triggers == (False, True, False)


def test_local_sgd_alone_changes_nothing() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    with LocalSGD(accelerator, model, local_sgd_steps=2) as local:
        local.step()
    assert not local.enabled
    with pytest.raises(ArgumentValueError, match="at least 1"):
        LocalSGD(accelerator, model, local_sgd_steps=0)


def test_the_batch_size_is_halved_until_memory_suffices() -> None:
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=100)
    def train(batch_size: int, most: int) -> int:
        tried.append(batch_size)
        if batch_size > most:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
        return batch_size

    assert train(30) == 25
    assert tried == [100, 50, 25]
    with pytest.raises(RuntimeError, match="no batch size fits"):
        train(0)


def test_other_errors_pass_and_other_functions_are_refused() -> None:
    @find_executable_batch_size
    def fails(batch_size: int) -> None:
        raise ValueError("another")

    with pytest.raises(ValueError, match="another"):
        fails()
    with pytest.raises(ArgumentTypeError, match="first parameter must be"):
        find_executable_batch_size(lambda size: None)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("shapes differ"))


def test_memory_is_given_back() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    assert accelerator.free_memory(model, 1) == [None, None]
    assert accelerator._models == []
    assert release_memory() == []

"""Every row about loaders and steps in the table of right values of GradientState."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from nbstate.state import GradientAccumulationPlugin, GradientState
from nbstate.telemetry.board import Flag, Slot
from nbstate.training import Accelerator, DataLoaderConfiguration, prepare_data_loader

Loaders = Callable[..., DataLoader[Any]]
Ranks = Callable[..., list[Any]]

# Whether batches are split, and whether one rank reads for all.
WAYS = list(itertools.product((False, True), (False, True)))


class Stream(IterableDataset[int]):
    """The numbers 0 to n - 1, of a length that nobody is told."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Nothing is freed but by reference count."""
    gc.disable()
    yield
    gc.enable()


def sync_flags(accelerator: Accelerator, loader: DataLoader[Any]) -> str:
    flags = ""
    for _ in loader:
        with accelerator.accumulate():
            flags += "FT"[accelerator.sync_gradients]
    return flags


@pytest.mark.parametrize(
    ("batches", "steps", "sync_with_dataloader", "epochs"),
    [
        (5, 2, True, ["FTFTT", "FTFTT"]),
        (5, 2, False, ["FTFTF", "TFTFT"]),
        (10, 4, True, ["FFFTFFFTFT", "FFFTFFFTFT"]),
        (3, 1, True, ["TTT", "TTT"]),
    ],
)
def test_which_batches_synchronise(
    numbers: Loaders, batches: int, steps: int, sync_with_dataloader: bool, epochs: list[str]
) -> None:
    plugin = GradientAccumulationPlugin(num_steps=steps, sync_with_dataloader=sync_with_dataloader)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    loader = accelerator.prepare(numbers(batches, 1))
    assert [sync_flags(accelerator, loader) for _ in epochs] == epochs


def test_the_count_of_steps_can_be_changed_and_nothing_else_changes(numbers: Loaders) -> None:
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False, sync_each_batch=True)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    accelerator.gradient_accumulation_steps = 3
    assert sync_flags(accelerator, accelerator.prepare(numbers(4, 1))) == "FFTF"
    assert accelerator.gradient_state.sync_each_batch


def gradients_after_one_batch(sync_each_batch: bool) -> tuple[float, bool]:
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=sync_each_batch)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.tensor([[1.0 + accelerator.process_index]])).sum())
    return accelerator.unwrap_model(model).weight.grad.item(), accelerator.sync_gradients


def test_sync_each_batch_sends_gradients_and_keeps_the_flags_meaning(in_ranks: Ranks) -> None:
    assert in_ranks(gradients_after_one_batch, False) == [(0.5, False), (1.0, False)]
    assert in_ranks(gradients_after_one_batch, True) == [(0.75, False), (0.75, False)]


def test_at_rest_there_is_no_loader(numbers: Loaders) -> None:
    loader = prepare_data_loader(numbers(5))
    list(loader)
    state = GradientState()
    assert (state.active_dataloader, state.dataloader_references) == (None, [None])
    assert (state.end_of_dataloader, state.remainder) == (False, -1)


def flags_of_an_epoch(n: int, split: bool, dispatch: bool) -> list[tuple[bool, int]]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=split, dispatch_batches=dispatch))
    size = 2 * accelerator.num_processes if split else 2
    loader = accelerator.prepare(DataLoader(torch.arange(n), batch_size=size))  # type: ignore[arg-type]
    state = accelerator.gradient_state
    return [(state.end_of_dataloader, state.remainder) for _ in loader]


@pytest.mark.parametrize(("n", "last"), [(5, (True, 1)), (4, (True, 0)), (1, (True, 1))])
def test_end_and_remainder_alone(n: int, last: tuple[bool, int]) -> None:
    flags = flags_of_an_epoch(n, False, False)
    assert flags[-1] == last
    assert not any(end for end, _ in flags[:-1])


def test_end_and_remainder_are_the_same_on_every_rank(each_in_ranks: Ranks) -> None:
    expected = {16: (4, 0), 17: (5, 1), 15: (4, 3), 1: (1, 1)}
    cases = [(n, *way) for way in WAYS for n in expected]
    for case, (first, second) in zip(cases, each_in_ranks(flags_of_an_epoch, cases), strict=True):
        batches, remainder = expected[case[0]]
        assert first == second, case
        assert [end for end, _ in first] == [False] * (batches - 1) + [True], case
        assert first[-1][1] == remainder, case


def test_an_evaluation_loader_leaves_the_outer_flags_alone(numbers: Loaders) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    train, evaluate = accelerator.prepare(numbers(6, 2), numbers(5, 2))
    state = accelerator.gradient_state
    seen = []
    for _ in train:
        with accelerator.accumulate():
            before = (state.sync_gradients, state.end_of_dataloader, state.remainder)
            inner = [(state.active_dataloader is evaluate, state.end_of_dataloader, state.remainder) for _ in evaluate]
            assert inner == [(True, False, 1), (True, False, 1), (True, True, 1)]
            for _ in evaluate:
                break
            assert state.active_dataloader is train
            assert before == (state.sync_gradients, state.end_of_dataloader, state.remainder)
            seen.append(before)
    assert seen == [(False, False, 0), (True, False, 0), (True, True, 0)]


def evaluate_while_training() -> list[Any]:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1)
    data = torch.arange(12.0)[:, None]
    model, train, evaluate = accelerator.prepare(
        model,
        DataLoader(data, batch_size=2),
        DataLoader(data[:5], batch_size=1),  # type: ignore[arg-type]
    )
    state = accelerator.gradient_state
    seen = []
    for batch in train:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            with torch.no_grad():
                count = sum(len(accelerator.gather_for_metrics(model(part))) for part in evaluate)
            seen.append((count, state.sync_gradients, state.end_of_dataloader, state.remainder))
    return seen


def test_an_evaluation_loader_leaves_the_outer_flags_alone_in_ranks(in_ranks: Ranks) -> None:
    expected = [(5, False, False, 0), (5, True, False, 0), (5, True, True, 0)]
    assert in_ranks(evaluate_while_training) == [expected, expected]


def test_a_loader_within_its_own_loop(numbers: Loaders) -> None:
    loader = prepare_data_loader(numbers(3, 1))
    state = GradientState()
    seen = [([state.end_of_dataloader for _ in loader], state.end_of_dataloader) for _ in loader]
    inner = [False, False, True]
    assert seen == [(inner, False), (inner, False), (inner, True)]


@pytest.mark.usefixtures("no_collector")
def test_break_removes_the_reference_at_once(numbers: Loaders) -> None:
    loader = prepare_data_loader(numbers(8))
    state = GradientState()
    for _ in loader:
        assert state.dataloader_references == [None, loader]
        break
    assert state.dataloader_references == [None]
    for _ in enumerate(loader):
        break
    assert state.dataloader_references == [None]

    def fail() -> None:
        for _ in loader:
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (state.active_dataloader, loader.end_of_dataloader, loader.remainder) == (None, False, -1)


@pytest.mark.usefixtures("no_collector")
def test_break_out_of_the_inner_loader_makes_the_outer_active(numbers: Loaders) -> None:
    outer, inner = prepare_data_loader(numbers(8)), prepare_data_loader(numbers(8))
    state = GradientState()
    for _ in outer:
        for _ in inner:
            break
        assert state.dataloader_references == [None, outer]


@pytest.mark.usefixtures("no_collector")
def test_a_dropped_loader_is_collectable_and_the_outer_one_active_again(numbers: Loaders) -> None:
    outer, dropped = prepare_data_loader(numbers(8)), prepare_data_loader(numbers(8))
    state = GradientState()
    for _ in outer:
        # What a loader does when its iteration starts; then its owner lets go of it without ending the iteration.
        state._add_dataloader(dropped)
        assert state.active_dataloader is dropped
        alive = weakref.ref(dropped)
        del dropped
        assert alive() is None
        assert state.dataloader_references == [None, outer]
        assert state.active_dataloader is outer
        break
    iteration = iter(prepare_data_loader(numbers(8)))
    next(iteration)
    assert state.active_dataloader is not None
    del iteration
    assert state.dataloader_references == [None]
    alive = weakref.ref(outer)
    del outer
    assert alive() is None


def test_the_state_may_be_reset_within_a_loop(numbers: Loaders) -> None:
    for _ in prepare_data_loader(numbers(8)):
        GradientState.reset()
    for _ in prepare_data_loader(numbers(8)):
        GradientState.reset()
        break
    assert GradientState().dataloader_references == [None]


def test_a_new_accelerator_synchronises_whatever_an_abandoned_loop_left_behind(numbers: Loaders) -> None:
    first = Accelerator(gradient_accumulation_steps=4)
    for _ in first.prepare(numbers(8, 1)):
        with first.accumulate():
            # One that is made within a loop, by a library say, changes nothing for that loop.
            assert not Accelerator(gradient_accumulation_steps=4).sync_gradients
        break
    assert not first.sync_gradients
    weight = torch.nn.Parameter(torch.ones(1))
    accelerator = Accelerator()
    optimizer = accelerator.prepare(torch.optim.SGD([weight], lr=0.5))
    assert accelerator.sync_gradients
    accelerator.backward(weight.sum())
    optimizer.step()
    assert weight.item() == 0.5


def test_an_iteration_abandoned_at_exit_is_silent() -> None:
    script = """
import torch
from nbstate.training import prepare_data_loader
iteration = iter(prepare_data_loader(torch.utils.data.DataLoader(torch.arange(4))))
print(int(next(iteration)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True)
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_an_empty_loader_yields_nothing_and_leaves_no_reference(numbers: Loaders) -> None:
    state = GradientState()
    for loader in (prepare_data_loader(numbers(0)), prepare_data_loader(DataLoader(Stream(0), batch_size=4))):
        iteration = iter(loader)
        with pytest.raises(StopIteration):
            next(iteration)
        assert state.dataloader_references == [None]
        assert list(loader) == []


def read_stream(n: int, dispatch: bool | None, workers: int) -> tuple[list[int], list[bool], int]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    loader = accelerator.prepare(DataLoader(Stream(n), batch_size=2, num_workers=workers))
    seen, ends = [], []
    for batch in loader:
        seen += accelerator.gather_for_metrics(batch).tolist()
        ends.append(accelerator.gradient_state.end_of_dataloader)
    return seen, ends, len(accelerator.gradient_state.dataloader_references)


def test_a_stream_of_unknown_length_alone() -> None:
    assert read_stream(5, None, 0) == ([0, 1, 2, 3, 4], [False, False, True], 1)


def test_a_stream_of_unknown_length_in_ranks_ends_and_loses_nothing(each_in_ranks: Ranks) -> None:
    cases = [(n, dispatch, 0) for n in (4, 5, 8, 11) for dispatch in (None, False)]
    for (n, dispatch, _), found in zip(cases, each_in_ranks(read_stream, cases), strict=True):
        global_batches = -(-n // 4)
        # Where every rank reads, nobody knows what is filling; the main rank, which reads for all, does.
        filling = range(global_batches * 4 - n) if dispatch is False else ()
        expected = [*range(n), *filling], [False] * (global_batches - 1) + [True], 1
        assert found == (expected, expected), (n, dispatch)


def test_a_dropped_last_batch_means_that_nothing_is_truncated(in_ranks: Ranks) -> None:
    assert in_ranks(gather_dropping) == [(list(range(8)), [0, 0])] * 2
    assert gather_dropping() == (list(range(8)), [0, 0, 0, 0])


def gather_dropping() -> tuple[list[int], list[int]]:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(torch.arange(9), batch_size=2, drop_last=True))  # type: ignore[arg-type]
    seen, remainders = [], []
    for batch in loader:
        seen += accelerator.gather_for_metrics(batch).tolist()
        remainders.append(accelerator.gradient_state.remainder)
    return seen, remainders


def gather_every_way(n: int, batch_size: int, split: bool, dispatch: bool) -> dict[str, list[Any]]:
    config = DataLoaderConfiguration(split_batches=split, dispatch_batches=dispatch)
    accelerator = Accelerator(dataloader_config=config)
    size = batch_size * accelerator.num_processes if split else batch_size
    loader = accelerator.prepare(DataLoader(torch.arange(n), batch_size=size))  # type: ignore[arg-type]
    seen: dict[str, list[Any]] = {"tensor": [], "nested": [], "objects": [], "forced": [], "doubled": [], "scalar": []}
    for batch in loader:
        seen["tensor"] += accelerator.gather_for_metrics(batch).tolist()
        nested = accelerator.gather_for_metrics({"a": [batch], "b": (batch[:, None],)})
        seen["nested"] += nested["a"][0].tolist()
        seen["objects"] += accelerator.gather_for_metrics([f"sample {i}" for i in batch.tolist()])
        seen["forced"] += accelerator.gather_for_metrics(list(batch), use_gather_object=True)
        seen["doubled"] += accelerator.gather_for_metrics(batch.repeat_interleave(2)).tolist()
        seen["scalar"].append(len(accelerator.gather_for_metrics({"loss": torch.ones(()), "x": torch.ones(3)})["x"]))
    return seen


def check_every_way(seen: dict[str, list[Any]], n: int, ranks: int) -> None:
    assert seen["tensor"] == seen["nested"] == [int(value) for value in seen["forced"]] == list(range(n))
    assert seen["objects"] == [f"sample {i}" for i in range(n)]
    assert seen["doubled"] == [i // 2 for i in range(2 * n)]
    assert set(seen["scalar"]) == {3 * ranks}


@pytest.mark.parametrize("n", [16, 18, 13, 1])
def test_every_sample_is_gathered_once_alone(n: int) -> None:
    check_every_way(gather_every_way(n, 4, False, False), n, 1)


@pytest.mark.parametrize(("ranks", "lengths"), [(2, [20, 18, 17, 1]), (3, [25])])
def test_every_sample_is_gathered_once(each_in_ranks: Ranks, ranks: int, lengths: list[int]) -> None:
    cases = [(n, 4, *way) for n in lengths for way in WAYS]
    for case, found in zip(cases, each_in_ranks(gather_every_way, cases, ranks=ranks), strict=True):
        for seen in found:
            check_every_way(seen, case[0], ranks)


def use_workers() -> tuple[list[int], int, list[int]]:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(torch.arange(18), batch_size=4, num_workers=2))  # type: ignore[arg-type]
    seen: list[int] = []
    for batch in loader:
        seen += accelerator.gather_for_metrics(batch).tolist()
    for _ in loader:
        break
    references = len(accelerator.gradient_state.dataloader_references)
    stream = accelerator.prepare(DataLoader(Stream(6), batch_size=2, num_workers=1))
    return seen, references, [value for batch in stream for value in accelerator.gather_for_metrics(batch).tolist()]


@pytest.mark.parametrize("start_method", ["fork", "forkserver", "spawn"])
def test_workers_inside_a_rank(in_ranks: Ranks, start_method: str) -> None:
    expected = list(range(18)), 1, list(range(6))
    assert in_ranks(use_workers, start_method=start_method) == [expected, expected]


def test_the_board_shows_the_flags(numbers: Loaders, slot: Slot) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    loader = accelerator.prepare(numbers(5, 1))
    shown = []
    for _ in loader:
        with accelerator.accumulate():
            board = slot.snapshot()
            shown.append((board.flag(Flag.SYNC_GRADIENTS), board.flag(Flag.END_OF_DATALOADER), board.step, board.epoch))
            assert board.flag(Flag.IN_DATALOADER)
            assert board.num_steps == 2
    assert shown == [
        (False, False, 1, 0),
        (True, False, 2, 0),
        (False, False, 3, 0),
        (True, False, 4, 0),
        (True, True, 5, 0),
    ]
    assert not slot.snapshot().flag(Flag.IN_DATALOADER)
    for _ in loader:
        assert slot.snapshot().epoch == 1
        break

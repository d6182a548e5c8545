"""Loaders that go on in the middle of an epoch, batches of any size, and data that ends on some ranks first."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from nbstate.errors import ArgumentTypeError, ArgumentValueError
from nbstate.state import AcceleratorState
from nbstate.training import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin, set_seed

Ranks = Callable[..., list[Any]]


class Stream(IterableDataset[int]):
    """Numbers, and how far they have been read, which torchdata asks for."""

    def __init__(self, n: int = 22) -> None:
        self.n = n
        self.read = 0
        self.asked = 0

    def __iter__(self) -> Iterator[int]:
        start, self.read = self.read, 0
        for number in range(start, self.n):
            self.read = number + 1
            self.asked += 1
            yield number
        self.read = 0

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]


def loader_for(accelerator: Accelerator, way: dict[str, Any]) -> Any:
    if way.get("stream"):
        return accelerator.prepare(DataLoader(Stream(), batch_size=2, num_workers=way.get("workers", 0)))
    generator = torch.Generator().manual_seed(11) if way.get("own") else None
    plain = DataLoader(torch.arange(22), batch_size=2, shuffle=True, generator=generator)  # type: ignore[arg-type]
    return accelerator.prepare(plain)


def accelerator_for(way: dict[str, Any]) -> Accelerator:
    config = {name: value for name, value in way.items() if name not in ("stream", "own", "workers")}
    return Accelerator(dataloader_config=DataLoaderConfiguration(**config))


def resume(way: dict[str, Any], stop: int) -> tuple[Any, ...]:
    """Two epochs and a random number; and again, gone on with after ``stop`` batches of the first, or by skipping."""
    accelerator = accelerator_for(way)

    def samples(loader: Any) -> list[int]:
        return [value for batch in loader for value in accelerator.gather_for_metrics(batch).tolist()]

    set_seed(5)
    loader = loader_for(accelerator, way)
    whole: list[int] = []
    position, random_state = None, None
    for number, batch in enumerate(loader, 1):
        whole += accelerator.gather_for_metrics(batch).tolist()
        if number == stop:
            position, random_state = loader.state_dict(), torch.get_rng_state()
            before = len(whole)
    whole += samples(loader)
    drawn = torch.rand(()).item()
    found = []
    for skip in (False, True):
        set_seed(6)
        fresh = loader_for(accelerator, way)
        torch.rand(3 + accelerator.process_index)
        fresh.load_state_dict(position)
        assert position is not None
        assert random_state is not None
        torch.set_rng_state(random_state)
        rest = samples(accelerator.skip_first_batches(fresh, stop) if skip else fresh)
        while len(rest) < len(whole) - before:
            rest += samples(fresh)
        found.append((rest, torch.rand(()).item()))
    return whole[before:], drawn, found, position["epoch"], position["batches"]


WAYS: list[dict[str, Any]] = [
    {},
    {"own": True},
    {"use_seedable_sampler": True, "data_seed": 3},
    {"split_batches": True},
    {"dispatch_batches": True},
    {"dispatch_batches": True, "own": True},
    {"stream": True},
    {"stream": True, "dispatch_batches": False},
]
STATEFUL: list[dict[str, Any]] = [{"use_stateful_dataloader": True, **way} for way in WAYS]


def check_resumed(ways: list[dict[str, Any]], stop: int, results: Any) -> None:
    for way, ranks in zip(ways, results, strict=True):
        for rest, drawn, found, epoch, batches in ranks:
            length = 11 if len(ranks) == 1 or way.get("split_batches") else 6
            assert (epoch, batches) == ((0, stop) if stop < length else (1, 0)), way
            assert sorted(rest[-22:]) == list(range(22)), way
            assert found[0] == (rest, drawn), way
            if stop < length:
                assert found[1][0] == rest, way


@pytest.mark.parametrize("stop", [2, 6])
def test_a_loader_goes_on_where_it_was(each_in_ranks: Ranks, stop: int) -> None:
    """Same samples, same random numbers afterwards; at the last batch it is the next epoch's beginning."""
    ways = WAYS if stop < 6 else [way for way in WAYS if not way.get("split_batches")]
    check_resumed(ways, stop, each_in_ranks(resume, [(way, stop) for way in ways]))


def test_a_loader_goes_on_alone() -> None:
    ways = [way for way in WAYS if not way.get("dispatch_batches")]
    check_resumed(ways, 4, [(resume(way, 4),) for way in ways])


def test_loaders_of_torchdata_go_on(each_in_ranks: Ranks) -> None:
    pytest.importorskip("torchdata", reason="torchdata is not installed")
    check_resumed(STATEFUL, 3, each_in_ranks(resume, [(way, 3) for way in STATEFUL]))


def test_torchdata_does_not_read_again_what_was_read() -> None:
    pytest.importorskip("torchdata", reason="torchdata is not installed")
    way = {"use_stateful_dataloader": True, "stream": True}
    accelerator = accelerator_for(way)
    loader = loader_for(accelerator, way)
    iteration = iter(loader)
    assert [next(iteration).tolist() for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    position = loader.state_dict()
    fresh = loader_for(accelerator, way)
    fresh.load_state_dict(position)
    assert next(iter(fresh)).tolist() == [6, 7]
    # One batch was fetched ahead; none of the first three was read.
    assert fresh.dataset.asked == 4


def test_workers_of_torchdata_go_on() -> None:
    pytest.importorskip("torchdata", reason="torchdata is not installed")
    way = {"use_stateful_dataloader": True, "stream": True, "workers": 1}
    rest, _, found, *_ = resume(way, 3)
    assert found[0][0] == rest


def test_without_torchdata_it_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchdata.stateful_dataloader", None)
    with pytest.raises(ArgumentValueError, match=r"needs torchdata 0\.8 or later \(pip install torchdata\)"):
        DataLoaderConfiguration(use_stateful_dataloader=True)


def test_what_is_no_position_is_refused_and_another_epoch_starts_from_its_beginning() -> None:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(torch.arange(6), batch_size=2))  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="not the state of a prepared loader"):
        loader.load_state_dict({"_num_yielded": 3})
    loader.load_state_dict({"epoch": 2, "batches": 1})
    assert loader.state_dict() == {"epoch": 2, "batches": 1, "order": None, "inner": None}
    loader.set_epoch(2)
    assert [batch.tolist() for batch in loader] == [[2, 3], [4, 5]]
    loader.load_state_dict({"epoch": 2, "batches": 1})
    loader.set_epoch(3)
    assert len(list(loader)) == 3
    assert loader.state_dict()["epoch"] == 4


def any_size(batches: list[list[int]], dispatch: bool) -> tuple[list[int], list[int], list[int]]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    loader = accelerator.prepare(DataLoader(torch.arange(20), batch_sampler=batches))  # type: ignore[arg-type]
    tensors: list[int] = []
    objects: list[int] = []
    remainders = []
    for batch in loader:
        objects += accelerator.gather_for_metrics(batch.tolist(), use_gather_object=True)
        padded = accelerator.pad_across_processes(batch, pad_index=-1)
        tensors += [value for value in accelerator.gather(padded).tolist() if value >= 0]
        remainders.append(accelerator.gradient_state.remainder)
    return objects, tensors, remainders


def test_batches_of_any_size_are_counted_once(each_in_ranks: Ranks) -> None:
    odd = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10, 11]]
    even = odd[:4]
    cases = [(odd, False), (even, False), (odd, True)]
    for (batches, dispatch), ranks in zip(cases, each_in_ranks(any_size, cases), strict=True):
        expected = [index for batch in batches for index in batch]
        for objects, tensors, remainders in ranks:
            assert objects == expected, batches
            # What is gathered by hand has the filling as well: the first batch again, unless parts are cut evenly.
            assert set(tensors) == set(expected)
            assert remainders[-1] == ((2 if batches is odd else 0) if not dispatch else 0), batches


def uneven(join: bool | None, loading: dict[str, Any]) -> tuple[float, int, bool, int]:
    """Sum of the gradient steps of a model that adds up its inputs; 5 samples are 3 batches for 2 ranks."""
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**loading))
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    data = DataLoader(torch.arange(1.0, 6.0)[:, None], batch_size=1)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), data)
    seen = 0
    with accelerator.join_uneven_inputs([model], even_batches=join):
        for batch in loader:
            accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
            seen += 1
    return accelerator.unwrap_model(model).weight.item(), seen, loader.fills, sum(1 for _ in loader)


def test_ranks_wait_for_those_that_still_have_data(each_in_ranks: Ranks) -> None:
    cases: list[tuple[Any, ...]] = [(False, {}), (None, {"even_batches": False}), (None, {}), (True, {})]
    joined, own, filled, forced = each_in_ranks(uneven, cases)
    # (1 + 2) / 2, (3 + 4) / 2, then 5 from one rank, halved like the others, or with the first sample as filling.
    alone = -(1.5 + 3.5 + 2.5)
    full = -(1.5 + 3.5 + 3.0)
    assert joined == ((alone, 3, True, 3), (alone, 2, True, 3))
    assert own == ((alone, 3, False, 3), (alone, 2, False, 2))
    assert filled == forced == ((full, 3, True, 3),) * 2
    assert uneven(False, {}) == (-15.0, 5, False, 5)


def refuse_to_join() -> list[str]:
    told = []
    AcceleratorState.reset(reset_partial_state=False)
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
    for item in (accelerator.prepare(torch.nn.Linear(2, 2)), torch.nn.Linear(2, 2)):
        try:
            with accelerator.join_uneven_inputs([item]):
                pass
        except ArgumentTypeError as error:
            told.append(str(error))
    return told


def test_what_cannot_wait_is_refused(in_ranks: Ranks) -> None:
    for sharded, plain in in_ranks(refuse_to_join):
        assert "a sharded model needs every rank for every batch" in sharded
        assert "not a Linear" in plain


def stream_uneven() -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    results = []
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    loader = accelerator.prepare(DataLoader(Stream(6), batch_size=2))
    for even in (None, False, None):
        with accelerator.join_uneven_inputs([], even_batches=even):
            results.append([batch.tolist() for batch in loader])
    return results[0], results[1], results[2]


def test_streams_may_be_left_uneven_as_well(in_ranks: Ranks) -> None:
    first, second = in_ranks(stream_uneven)
    assert first == ([[0, 1], [4, 5]],) * 3
    assert second == ([[2, 3], [0, 1]], [[2, 3]], [[2, 3], [0, 1]])

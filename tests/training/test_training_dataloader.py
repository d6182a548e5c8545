"""Shuffles, epochs, placement, skipping and reading by one rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler

from nbstate.errors import ArgumentTypeError, ArgumentValueError, MainProcessFailedError
from nbstate.training import (
    Accelerator,
    DataLoaderConfiguration,
    prepare_data_loader,
    set_seed,
    skip_first_batches,
    synchronize_rng_states,
)

Loaders = Callable[..., DataLoader[Any]]
Ranks = Callable[..., list[Any]]


def orders(
    epochs: int, seed: int | None, first_epoch: int | None = None, own: bool = False, **config: Any
) -> list[list[int]]:
    """The order of the samples in each epoch, as all ranks together see it."""
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**config))
    if seed is not None:
        set_seed(seed, device_specific=seed < 0)
    generator = torch.Generator().manual_seed(accelerator.process_index) if own else None
    loader = accelerator.prepare(
        DataLoader(torch.arange(12), batch_size=2, shuffle=True, generator=generator)  # type: ignore[arg-type]
    )
    if first_epoch is not None:
        loader.set_epoch(first_epoch)
    return [[value for batch in loader for value in accelerator.gather(batch).tolist()] for _ in range(epochs)]


def test_ranks_agree_on_a_shuffle_that_changes_by_epoch(each_in_ranks: Ranks) -> None:
    cases: list[dict[str, Any]] = [
        {"seed": None},
        {"seed": None, "own": True},
        {"seed": None, "use_seedable_sampler": True},
        {"seed": 7},
        {"seed": -7},
        {"seed": 7, "dispatch_batches": True},
        {"seed": 7, "dispatch_batches": True, "use_seedable_sampler": True},
    ]
    found = each_in_ranks(orders, [{"epochs": 2, **case} for case in cases])
    for case, (mine, other) in zip(cases, found, strict=True):
        assert mine == other, case
        assert all(sorted(epoch) == list(range(12)) for epoch in mine), case
        assert mine[0] != mine[1], case


def test_many_ranks_see_the_order_that_one_process_sees(each_in_ranks: Ranks) -> None:
    set_seed(3)
    plain = DataLoader(torch.arange(12), batch_size=2, shuffle=True)  # type: ignore[arg-type]
    seen = [[value for batch in plain for value in batch.tolist()] for _ in range(2)]
    assert orders(2, 3) == seen
    configs: list[dict[str, Any]] = [{}, {"use_seedable_sampler": True}, {"dispatch_batches": True}]
    cases = [{"epochs": 2, "seed": 3, **config} for config in configs]
    for case, found in zip(cases, each_in_ranks(orders, cases), strict=True):
        alone = orders(**case)
        assert found == (alone, alone), case


def test_a_seeded_order_depends_on_seed_and_epoch_alone() -> None:
    config = {"use_seedable_sampler": True, "data_seed": 5}
    epochs = orders(3, 1, **config)
    assert epochs == orders(3, 2, **config)
    assert epochs != orders(3, 2, use_seedable_sampler=True, data_seed=6)
    assert orders(2, None, first_epoch=1, **config) == epochs[1:]


def test_break_also_counts_as_an_epoch(numbers: Loaders) -> None:
    loader = prepare_data_loader(numbers(12, shuffle=True), use_seedable_sampler=True, data_seed=1)
    for _ in loader:
        break
    second = [value for batch in loader for value in batch.tolist()]
    loader.set_epoch(1)
    assert second == [value for batch in loader for value in batch.tolist()]
    assert loader.iteration == 2


def test_the_epoch_is_handed_to_whoever_wants_it() -> None:
    class Told(IterableDataset[int]):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Any:
            return iter([self.epoch])

    loader = prepare_data_loader(DataLoader(Told()))
    assert [[int(value) for value in loader] for _ in range(2)] == [[0], [1]]
    loader.set_epoch(8)
    assert [int(value) for value in loader] == [8]


def distributed_sampler_parts() -> list[int]:
    accelerator = Accelerator()
    data = torch.arange(8)
    sampler = DistributedSampler(data, accelerator.num_processes, accelerator.process_index, shuffle=False)  # type: ignore[arg-type]
    loader = accelerator.prepare(DataLoader(data, batch_size=2, sampler=sampler))  # type: ignore[arg-type]
    return [value for batch in loader for value in batch.tolist()]


def test_a_loader_that_is_shared_out_already_is_not_shared_out_again(in_ranks: Ranks) -> None:
    assert in_ranks(distributed_sampler_parts) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_a_prepared_loader_is_a_loader_with_the_users_attributes(numbers: Loaders) -> None:
    plain = numbers(10, 4)
    loader = prepare_data_loader(plain, num_processes=2, process_index=1)
    assert isinstance(loader, DataLoader)
    assert loader.dataset is plain.dataset
    assert (loader.batch_size, loader.total_batch_size, loader.total_dataset_length, len(loader)) == (4, 8, 10, 2)
    assert prepare_data_loader(loader) is loader
    with pytest.raises(AttributeError):
        _ = loader.no_such_thing
    assert len(copy.copy(loader)) == 2


def test_a_loader_of_the_users_own_class_stays_one_where_it_need_not_be_shared_out() -> None:
    class Twice(DataLoader[Any]):
        def __iter__(self) -> Any:
            return (2 * batch for batch in super().__iter__())

    loader = prepare_data_loader(Twice(torch.arange(4), batch_size=4, shuffle=True))  # type: ignore[arg-type]
    assert [sorted(batch.tolist()) for batch in loader] == [[0, 2, 4, 6]]
    assert loader.state_dict() == {"epoch": 1, "batches": 0, "order": None, "inner": None}


def test_loaders_of_other_makes(numbers: Loaders) -> None:
    def parts(plain: DataLoader[Any]) -> list[list[Any]]:
        loaders = [prepare_data_loader(plain, num_processes=2, process_index=index) for index in range(2)]
        return [[value.tolist() for value in loader] for loader in loaders]

    data = torch.arange(6)
    assert parts(numbers(5, None)) == [[0, 2, 4], [1, 3, 0]]
    batches = BatchSampler(range(6), 2, drop_last=False)
    assert parts(DataLoader(data, sampler=batches, batch_size=None)) == [[[0, 1], [4, 5]], [[2, 3], [0, 1]]]  # type: ignore[arg-type]
    assert parts(DataLoader(data, batch_sampler=[[0], [1, 2], [3]])) == [[[0], [3]], [[1, 2], [0]]]  # type: ignore[arg-type]


def test_batches_go_to_the_device(numbers: Loaders) -> None:
    meta = torch.device("meta")
    loader = prepare_data_loader(numbers(4, 2), device=meta, put_on_device=True, non_blocking=True)
    assert [batch.device for batch in loader] == [meta, meta]
    stay = prepare_data_loader(numbers(4, 2), device=meta, put_on_device=False)
    assert [batch.device.type for batch in stay] == ["cpu", "cpu"]


def test_skipping_goes_on_in_the_middle_of_the_same_epoch(each_in_ranks: Ranks) -> None:
    cases = [(dispatch, iterable) for dispatch in (False, True) for iterable in (False, True)]
    for (dispatch, iterable), found in zip(cases, each_in_ranks(skip_some, cases), strict=True):
        for seen, rest, again, length in found:
            assert rest == seen[8:], (dispatch, iterable)
            assert again == seen, (dispatch, iterable)
            assert length == (None if iterable else 3), (dispatch, iterable)


def test_a_stream_that_tells_its_length_has_a_remainder_though_ranks_read_it_through_a_filter() -> None:
    class Told(Numbers):
        def __len__(self) -> int:
            return 19

    data = Told()
    loader = prepare_data_loader(DataLoader(data, 4), num_processes=2, process_index=1, dispatch_batches=False)
    assert loader.dataset is data
    assert {loader.remainder for _ in loader} == {3}


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(19))


def skip_some(dispatch: bool, iterable: bool) -> tuple[Any, ...]:
    config = DataLoaderConfiguration(dispatch_batches=dispatch, use_seedable_sampler=True)
    accelerator = Accelerator(dataloader_config=config)
    plain: DataLoader[Any]
    if iterable:
        plain = DataLoader(Numbers(), batch_size=2)
    else:
        plain = DataLoader(torch.arange(19), batch_size=2, shuffle=True)  # type: ignore[arg-type]
    loader = accelerator.prepare(plain)

    def samples(loader: DataLoader[Any]) -> list[int]:
        return [value for batch in loader for value in accelerator.gather_for_metrics(batch).tolist()]

    seen = samples(loader)
    loader.set_epoch(0)
    skipping = accelerator.skip_first_batches(loader, 2)
    rest = samples(skipping)
    return seen, rest, samples(loader), None if iterable else len(skipping)


def test_skipping_a_plain_loader(numbers: Loaders) -> None:
    assert [batch.tolist() for batch in skip_first_batches(numbers(5, 2), 1)] == [[2, 3], [4]]
    with pytest.raises(ArgumentTypeError):
        skip_first_batches(DataLoader(Numbers()), 1)


def dispatch_structures() -> tuple[Any, ...]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    data = [{"x": torch.full((2,), float(i)), "name": f"sample {i}", "y": (i, i % 2 == 0)} for i in range(5)]
    # Only the main rank's data counts: another rank's may be absent.
    loader = accelerator.prepare(DataLoader(data if accelerator.is_main_process else data[:1], batch_size=2))  # type: ignore[arg-type]
    return tuple(
        (batch["x"][:, 0].tolist(), batch["name"], batch["y"][0].tolist(), batch["y"][1].dtype) for batch in loader
    )


def test_dispatched_batches_keep_structure_and_dtype(in_ranks: Ranks) -> None:
    first, second = in_ranks(dispatch_structures)
    assert first == (
        ([0, 1], ["sample 0", "sample 1"], [0, 1], torch.bool),
        ([4, 0], ["sample 4", "sample 0"], [4, 0], torch.bool),
    )
    assert second == (
        ([2, 3], ["sample 2", "sample 3"], [2, 3], torch.bool),
        ([1, 2], ["sample 1", "sample 2"], [1, 2], torch.bool),
    )


def dispatch_uneven() -> list[list[int]]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True, even_batches=False))
    return [batch.tolist() for batch in accelerator.prepare(DataLoader(torch.arange(5), batch_size=2))]  # type: ignore[arg-type]


def test_a_dispatched_end_need_not_be_filled_up(in_ranks: Ranks) -> None:
    assert in_ranks(dispatch_uneven) == [[[0, 1], [4]], [[2, 3]]]


def dispatch_broken() -> str:
    class Broken(IterableDataset[int]):
        def __iter__(self) -> Any:
            yield from range(6)
            raise KeyError("no more")

    loader = Accelerator().prepare(DataLoader(Broken(), batch_size=2))
    try:
        return str(list(loader))
    except (KeyError, MainProcessFailedError) as error:
        return str(error)


def test_ranks_are_told_when_the_main_one_cannot_read_on(in_ranks: Ranks) -> None:
    told = "Rank 0 reads the data for all ranks, and failed: KeyError: 'no more'"
    assert in_ranks(dispatch_broken) == ["'no more'", told]


def test_a_batch_size_that_cannot_be_split_is_refused(numbers: Loaders) -> None:
    with pytest.raises(ArgumentValueError, match=r"processes \(2\); it is 3"):
        prepare_data_loader(numbers(9, 3), num_processes=2, process_index=0, split_batches=True)


def synchronised_states() -> tuple[float, float]:
    accelerator = Accelerator(rng_types=["torch"])
    set_seed(1, device_specific=True)
    apart = torch.rand(()).item()
    for _ in accelerator.prepare(DataLoader(torch.arange(2))):  # type: ignore[arg-type]
        return apart, torch.rand(()).item()
    raise AssertionError


def test_random_states_are_synchronised_on_request(in_ranks: Ranks) -> None:
    (apart, together), (other, again) = in_ranks(synchronised_states)
    assert apart != other
    assert together == again
    with pytest.raises(ArgumentValueError, match="'dice'"):
        synchronize_rng_states(["dice"])


def test_the_users_own_loader_is_not_changed(numbers: Loaders) -> None:
    plain = numbers(8, 2, shuffle=True)
    before = plain.batch_sampler, plain.sampler
    prepare_data_loader(plain, num_processes=2, process_index=0, use_seedable_sampler=True)
    assert before == (plain.batch_sampler, plain.sampler)
    assert isinstance(plain.sampler, RandomSampler)
    assert plain.sampler.generator is None

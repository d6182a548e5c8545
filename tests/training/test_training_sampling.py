"""Which samples each rank gets."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler

from nbstate.errors import ArgumentValueError
from nbstate.training.sampling import ShardedBatchSampler, ShardedIterable, SkipBatchSampler

SIZES = {"samples": st.integers(1, 40), "batch_size": st.integers(1, 5), "ranks": st.integers(1, 4)}


def shards(
    samples: int, batch_size: int, ranks: int, split: bool, *, drop_last: bool = False, even: bool = True
) -> Any:
    size = batch_size * ranks if split else batch_size
    batches = BatchSampler(range(samples), batch_size=size, drop_last=drop_last)
    return [ShardedBatchSampler(batches, ranks, rank, split, even) for rank in range(ranks)]


def together(parts: list[list[list[int]]]) -> list[int]:
    """What a gather of every batch gives: rank after rank, batch after batch."""
    turns = itertools.zip_longest(*parts, fillvalue=[])
    return [sample for turn in turns for batch in turn for sample in batch]


@given(**SIZES, split=st.booleans())
def test_even_parts_are_the_samples_in_order_then_filling(
    samples: int, batch_size: int, ranks: int, split: bool
) -> None:
    parts = [list(shard) for shard in shards(samples, batch_size, ranks, split)]
    seen = together(parts)
    assert {len(batch) for part in parts for batch in part} == {batch_size}
    assert len({len(part) for part in parts}) == 1
    assert seen[:samples] == list(range(samples))
    assert len(seen) - samples < batch_size * ranks
    assert seen[samples:] == list(itertools.islice(itertools.cycle(range(samples)), len(seen) - samples))


@given(**SIZES, split=st.booleans(), drop_last=st.booleans(), even=st.booleans())
def test_length_is_the_number_of_batches(
    samples: int, batch_size: int, ranks: int, split: bool, drop_last: bool, even: bool
) -> None:
    for shard in shards(samples, batch_size, ranks, split, drop_last=drop_last, even=even):
        if split and not even and not drop_last:
            assert len(list(shard)) in (len(shard), len(shard) - 1)
        else:
            assert len(list(shard)) == len(shard)


@given(**SIZES, split=st.booleans())
def test_uneven_parts_hold_every_sample_once(samples: int, batch_size: int, ranks: int, split: bool) -> None:
    assert together([list(shard) for shard in shards(samples, batch_size, ranks, split, even=False)]) == list(
        range(samples)
    )


@given(**SIZES, split=st.booleans())
def test_dropping_the_last_leaves_whole_global_batches(samples: int, batch_size: int, ranks: int, split: bool) -> None:
    seen = together([list(shard) for shard in shards(samples, batch_size, ranks, split, drop_last=True)])
    assert seen == list(range(samples - samples % (batch_size * ranks)))


@given(**SIZES, even=st.booleans(), drop_last=st.booleans())
def test_data_without_indices_is_shared_like_data_with(
    samples: int, batch_size: int, ranks: int, even: bool, drop_last: bool
) -> None:
    parts = [
        list(ShardedIterable(range(samples), batch_size, drop_last, ranks, rank, even_batches=even))
        for rank in range(ranks)
    ]
    expected = shards(samples, batch_size, ranks, split=True, drop_last=drop_last, even=even)
    assert parts == [list(itertools.chain.from_iterable(shard)) for shard in expected]


def test_batches_of_any_size_are_handed_out_whole() -> None:
    batches = [[0], [1, 2], [3, 4, 5]]
    assert list(ShardedBatchSampler(batches, 2, 0)) == [[0], [3, 4, 5]]
    assert list(ShardedBatchSampler(batches, 2, 1)) == [[1, 2], [0]]
    assert list(ShardedBatchSampler(batches, 2, 1, even_batches=False)) == [[1, 2]]


def test_a_batch_that_cannot_be_split_evenly_is_refused() -> None:
    with pytest.raises(ArgumentValueError, match=r"processes \(2\); it is 3"):
        ShardedBatchSampler(BatchSampler(range(9), 3, False), 2, 0, split_batches=True)


@pytest.mark.parametrize("skip", [0, 2, 3, 9])
def test_skipping_leaves_out_the_first(skip: int) -> None:
    rest = SkipBatchSampler(BatchSampler(range(6), 2, False), skip)
    assert list(rest) == [[0, 1], [2, 3], [4, 5]][skip:]
    assert len(rest) == len(list(rest))

from __future__ import annotations

import array
import collections
import copy
import math

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nbstate.errors import ArgumentTypeError, ArgumentValueError
from nbstate.state.splitting import split


def parts(inputs, count, padded=False):
    return [split(inputs, count, rank, padded) for rank in range(count)]


def joined(lists):
    return [item for items in lists for item in items]


def test_three_items_on_two_ranks():
    assert parts(["A", "B", "C"], 2) == [["A", "B"], ["C"]]
    assert parts(["A", "B", "C"], 2, padded=True) == [["A", "B"], ["C", "C"]]


def test_seventeen_items_on_eight_ranks():
    assert [len(part) for part in parts(list(range(17)), 8)] == [3, 2, 2, 2, 2, 2, 2, 2]


def test_a_divisible_input_gains_nothing():
    assert parts([1, 2, 3, 4], 2, padded=True) == [[1, 2], [3, 4]]


@given(st.integers(0, 40), st.integers(1, 9), st.booleans())
def test_parts_are_contiguous_even_and_complete(length, count, padded):
    items = list(range(length))
    got = parts(items, count, padded)
    if padded and count > 1:
        size = math.ceil(length / count)
        assert all(len(part) == size for part in got)
        plain = parts(items, count)
        assert joined(plain) == items
        assert got == [part + items[-1:] * (size - len(part)) for part in plain]
    else:
        assert joined(got) == items
        sizes = [len(part) for part in got]
        assert sizes == sorted(sizes, reverse=True)
        assert max(sizes) - min(sizes) <= 1


SEQUENCES = {
    "list": [10, 11, 12],
    "tuple": (10, 11, 12),
    "str": "abc",
    "bytes": b"abc",
    "bytearray": bytearray(b"abc"),
    "range": range(10, 13),
    "array": array.array("i", [10, 11, 12]),
    "deque": collections.deque([10, 11, 12]),
    "UserList": collections.UserList([10, 11, 12]),
    "tensor": torch.arange(10, 13),
    "numpy": np.arange(10, 13),
    "frame": pd.DataFrame({"a": [10, 11, 12]}),
    "series": pd.Series([10, 11, 12]),
    "index": pd.Index([10, 11, 12]),
    "dataset": datasets.Dataset.from_dict({"a": [10, 11, 12]}),
}


def items(value):
    if isinstance(value, datasets.Dataset):
        return list(value["a"])
    if isinstance(value, pd.DataFrame):
        return value["a"].tolist()
    return [item.item() if hasattr(item, "item") else item for item in value]


@pytest.mark.parametrize("name", SEQUENCES)
def test_every_sequence_keeps_its_type(name):
    value = SEQUENCES[name]
    whole = items(value)
    first, second = parts(value, 2)
    assert type(first) is type(second) is type(value)
    assert (items(first), items(second)) == (whole[:2], whole[2:])


@pytest.mark.parametrize("name", SEQUENCES)
def test_every_sequence_is_padded_with_its_last_item(name):
    value = SEQUENCES[name]
    whole = items(value)
    first, second = parts(value, 2, padded=True)
    assert (items(first), items(second)) == (whole[:2], [whole[2], whole[2]])
    # A range cannot hold an item twice; everything else stays what it is.
    assert type(second) is (list if name == "range" else type(value))


@pytest.mark.parametrize("name", SEQUENCES)
def test_surplus_ranks_get_an_empty_value_of_the_same_type(name):
    value = SEQUENCES[name]
    whole = items(value)
    got = parts(value, 5)
    assert [items(part) for part in got] == [[whole[0]], [whole[1]], [whole[2]], [], []]
    assert {type(part) for part in got} == {type(value)}
    padded = parts(value, 5, padded=True)
    assert [items(part) for part in padded] == [[whole[0]], [whole[1]], [whole[2]], [whole[2]], [whole[2]]]
    assert {type(part) for part in padded} == {type(value)}


@pytest.mark.parametrize("name", [name for name in SEQUENCES if name != "dataset"])
def test_an_empty_input_is_empty_on_every_rank(name):
    empty = SEQUENCES[name][:0] if name != "deque" else collections.deque()
    for padded in (False, True):
        got = parts(empty, 3, padded)
        assert [len(part) for part in got] == [0, 0, 0]
        assert {type(part) for part in got} == {type(empty)}


def test_an_empty_dataset_is_empty_on_every_rank():
    got = parts(SEQUENCES["dataset"].select([]), 2, padded=True)
    assert [len(part) for part in got] == [0, 0]


def test_a_tensor_is_split_and_padded_by_rows_where_it_is():
    value = torch.arange(6.0).reshape(3, 2)
    first, second = parts(value, 2, padded=True)
    assert first.tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert second.tolist() == [[4.0, 5.0], [4.0, 5.0]]
    on_meta = split(torch.empty(3, 2, dtype=torch.int8, device="meta"), 2, 1, True)
    assert (on_meta.device.type, on_meta.dtype, tuple(on_meta.shape)) == ("meta", torch.int8, (2, 2))


def test_a_tensor_is_padded_without_a_collective(monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("a collective")

    for name in ("all_gather", "all_reduce", "broadcast", "barrier", "all_gather_object"):
        monkeypatch.setattr(torch.distributed, name, never)
    assert split(torch.arange(3), 2, 1, True).tolist() == [2, 2]


def test_a_frame_keeps_its_index():
    frame = pd.DataFrame({"a": [1, 2, 3]}, index=["x", "y", "z"])
    assert split(frame, 2, 1, True).index.tolist() == ["z", "z"]


def test_a_dict_is_split_by_the_length_of_its_values():
    value = {"x": [1, 2, 3], "y": torch.tensor([4, 5, 6]), "z": "abc", "w": (7, 8, 9)}
    first, second = parts(value, 2, padded=True)
    assert (first["x"], first["y"].tolist(), first["z"], first["w"]) == ([1, 2], [4, 5], "ab", (7, 8))
    assert (second["x"], second["y"].tolist(), second["z"], second["w"]) == ([3, 3], [6, 6], "cc", (9, 9))


def test_a_dict_with_more_keys_than_items():
    assert parts({"a": [1], "b": [2], "c": [3]}, 2) == [{"a": [1], "b": [2], "c": [3]}, {"a": [], "b": [], "c": []}]


def test_a_dict_in_a_dict_is_split_by_leaf_length():
    value = {"in": {"ids": [1, 2, 3], "deep": {"mask": [0, 0, 1]}}, "out": [7, 8, 9]}
    assert parts(value, 2) == [
        {"in": {"ids": [1, 2], "deep": {"mask": [0, 0]}}, "out": [7, 8]},
        {"in": {"ids": [3], "deep": {"mask": [1]}}, "out": [9]},
    ]


def test_unequal_lengths_name_the_keys():
    with pytest.raises(ArgumentValueError, match=r"'a': 2, 'b'\['c'\]: 3"):
        split({"a": [1, 2], "b": {"c": [1, 2, 3]}}, 2, 0)


def test_the_callers_dict_is_never_changed():
    value = {"a": [1, 2, 3], "b": {"c": [4, 5, 6]}}
    before = copy.deepcopy(value)
    assert parts(value, 2, padded=True) == parts(value, 2, padded=True)
    assert value == before


def test_a_subclass_of_dict_stays_one():
    counted = collections.defaultdict(list, {"a": [1, 2, 3]})
    part = split(counted, 2, 1)
    assert type(part) is collections.defaultdict
    assert part["a"] == [3]
    assert part["missing"] == []
    assert counted["a"] == [1, 2, 3]
    assert type(split(collections.UserDict({"a": [1, 2]}), 2, 0)) is collections.UserDict


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("value", [(n for n in "ab"), {1, 2}, 3, None, torch.tensor(1), np.array(1), {"a": {1, 2}}])
def test_what_has_no_order_or_length_is_refused(value, count):
    with pytest.raises(ArgumentTypeError, match="cannot be split between processes; accepted is a list, tuple"):
        split(value, count, 0)


def test_one_rank_is_validated_and_gets_the_whole():
    value = {"a": [1, 2], "b": [3, 4]}
    assert split(value, 1, 0, True) is value
    with pytest.raises(ArgumentValueError, match="'a': 1, 'b': 2"):
        split({"a": [1], "b": [1, 2]}, 1, 0)

"""Collectives over nested containers, on real ranks."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nbstate.errors import ArgumentValueError, StructureError
from nbstate.state import PartialState
from nbstate.utils import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    set_seed,
)

Ranks = Callable[..., list[Any]]
Pair = namedtuple("Pair", ["left", "right"])


def gather_much() -> dict[str, Any]:
    rank = PartialState().process_index
    mixed = {"b": torch.tensor([rank]), "a": torch.tensor([10 + rank])}
    if rank:
        mixed = dict(reversed(mixed.items()))
    pair = gather(Pair(torch.full((1, 2), float(rank)), [torch.tensor(rank)]))
    return {
        "mixed": {key: value.tolist() for key, value in gather(mixed).items()},
        "pair": (type(pair).__name__, pair.left.tolist(), pair.right[0].tolist()),
        "bool": gather(torch.tensor([rank == 0])).tolist(),
        "strided": gather(torch.arange(4).reshape(2, 2).T).tolist(),
        "empty": list(gather(torch.empty(0, 3)).shape),
        "grad": gather(torch.ones(1, requires_grad=True)).tolist(),
    }


def test_gather(in_ranks: Ranks) -> None:
    expected = {
        "mixed": {"a": [10, 11], "b": [0, 1]},
        "pair": ("Pair", [[0, 0], [1, 1]], [0, 1]),
        "bool": [True, False],
        "strided": [[0, 2], [1, 3], [0, 2], [1, 3]],
        "empty": [0, 3],
        "grad": [1, 1],
    }
    for found in in_ranks(gather_much):
        # Each rank keeps its own order of keys; the values meet by key.
        assert found == expected


def gather_things() -> tuple[Any, ...]:
    rank = PartialState().process_index
    box = [{"from": rank}, rank]
    broadcast_object_list(box, from_process=1)
    return gather_object([rank] * (rank + 1)), gather_object({"rank": rank}), gather_object("ab"), box


def test_objects(in_ranks: Ranks) -> None:
    expected = ([0, 1, 1], [{"rank": 0}, {"rank": 1}], ["ab", "ab"], [{"from": 1}, 1])
    assert in_ranks(gather_things) == [expected, expected]


def reduce_and_broadcast() -> tuple[Any, ...]:
    rank = PartialState().process_index
    value = torch.tensor([1, 2]) + rank
    results = (
        reduce({"x": [value]}, "sum")["x"][0].tolist(),
        reduce(value, "mean", scale=2.0).tolist(),
        reduce(value, "none").tolist(),
    )
    strided = (torch.arange(4.0) + 10 * rank).reshape(2, 2).T
    sent = broadcast([strided], from_process=1)[0]
    return (*results, value.tolist(), sent.tolist(), sent is strided)


def test_reduce_and_broadcast(in_ranks: Ranks) -> None:
    first, second = in_ranks(reduce_and_broadcast)
    assert first == ([3, 5], [3, 5], [1, 2], [1, 2], [[10, 12], [11, 13]], True)
    assert second == ([3, 5], [3, 5], [2, 3], [2, 3], [[10, 12], [11, 13]], True)


def pad_much() -> tuple[Any, ...]:
    rank = PartialState().process_index
    value = torch.ones(rank + 1, 2)
    return (
        pad_across_processes(value, pad_index=-1).tolist(),
        pad_across_processes({"x": value}, pad_first=True)["x"].tolist(),
        pad_across_processes(value.T, dim=-1).tolist(),
        pad_across_processes(value, dim=5).tolist(),
        gather(pad_across_processes(value)).tolist(),
    )


def test_padding_makes_tensors_gatherable(in_ranks: Ranks) -> None:
    first, second = in_ranks(pad_much)
    gathered = [[1, 1], [0, 0], [1, 1], [1, 1]]
    assert first == ([[1, 1], [-1, -1]], [[0, 0], [1, 1]], [[1, 0], [1, 0]], [[1, 1]], gathered)
    assert second == ([[1, 1], [1, 1]], [[1, 1], [1, 1]], [[1, 1], [1, 1]], [[1, 1], [1, 1]], gathered)


DTYPES = (torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.complex64)


def every_dtype(n: int) -> dict[str, Any]:
    rank = PartialState().process_index
    values = {str(dtype): torch.full((n, 2), rank + 1).to(dtype) for dtype in DTYPES}
    values["nothing"] = torch.empty(0, 3)
    gathered, summed = gather(values), reduce(values, "sum")
    sent = broadcast({name: value.clone() for name, value in values.items()}, from_process=1)
    return {
        name: (
            gathered[name].tolist(),
            summed[name].tolist(),
            sent[name].tolist(),
            gathered[name].dtype,
            summed[name].dtype,
        )
        for name in values
    }


@pytest.mark.parametrize("n", [1, 1500])
def test_every_dtype_travels_whole_in_one_message_or_in_several(in_ranks: Ranks, n: int) -> None:
    for found in in_ranks(every_dtype, n):
        for dtype in DTYPES:
            one, two, three = (torch.full((n, 2), value).to(dtype).tolist() for value in (1, 2, 3))
            if dtype is torch.bool:
                three = one
            assert found[str(dtype)] == (one + two, three, two, dtype, dtype), dtype
        assert found["nothing"] == ([], [], [], torch.float32, torch.float32)


class Unsendable:
    def __reduce__(self) -> Any:
        raise ValueError("stays here")


def mismatches() -> dict[str, str]:
    """What each rank is told when they bring different things; none of it may hang or end the process."""
    rank = PartialState().process_index
    one, other = torch.ones(2), torch.ones(3)
    cases: dict[str, Callable[[], Any]] = {
        "shape": lambda: gather({"x": torch.ones(2 + rank), "y": one}),
        "large": lambda: gather(torch.ones(2000 + rank)),
        "dtype": lambda: gather(one if rank else one.double()),
        "number": lambda: gather([one] * (1 + rank)),
        "nothing": lambda: gather([one] if rank else []),
        "type": lambda: gather([one, "text" if rank else one]),
        "reduce": lambda: reduce(other if rank else one),
        "broadcast": lambda: broadcast((other if rank else one,)),
        "padding": lambda: pad_across_processes(one if rank else one[None]),
        "operation": lambda: gather(one) if rank else reduce(one),
        "object": lambda: gather_object([Unsendable() if rank else 1]),
        "object against tensor": lambda: gather_object([1]) if rank else gather(one),
    }
    told = {}
    for name, case in cases.items():
        try:
            told[name] = str(case())
        except StructureError as error:
            told[name] = str(error)
    # All are still in step.
    told["after"] = str(gather(torch.tensor(rank)).tolist())
    return told


def test_ranks_that_bring_different_things_are_all_told(in_ranks: Ranks) -> None:
    expected = {
        "shape": ["rank 0: ['x'] (2,) torch.float32, ['y'] (2,)", "rank 1: ['x'] (3,) torch.float32"],
        "large": ["rank 0: (2000,)", "rank 1: (2001,)"],
        "dtype": ["rank 0: (2,) torch.float64", "rank 1: (2,) torch.float32"],
        "number": ["rank 0: [0] (2,) torch.float32\n", "rank 1: [0] (2,) torch.float32, [1] (2,)"],
        "nothing": ["rank 0: nothing", "rank 1: [0] (2,)"],
        "type": ["rank 1: [0] (2,) torch.float32, [1] str"],
        "reduce": ["Ranks called reduce", "rank 0: (2,)", "rank 1: (3,)"],
        "broadcast": ["Ranks called broadcast", "rank 0: [0] (2,)", "rank 1: [0] (3,)"],
        "padding": ["Ranks called pad_across_processes", "rank 0: 2 torch.float32", "rank 1: 1 torch.float32"],
        "operation": ["rank 0: reduce of (2,)", "rank 1: gather of (2,)"],
        "object": ["what rank 1 gave cannot be pickled"],
        "object against tensor": ["rank 0: gather of (2,)", "rank 1: gather_object of objects"],
        "after": ["[0, 1]"],
    }
    for told in in_ranks(mismatches):
        assert list(told) == list(expected)
        for name, parts in expected.items():
            for part in parts:
                assert part in told[name], name


def lists_of_any_length() -> list[Any]:
    rank = PartialState().process_index
    return broadcast_object_list([rank] * (1 + rank), from_process=1)


def test_a_broadcast_list_is_the_senders(in_ranks: Ranks) -> None:
    assert in_ranks(lists_of_any_length) == [[1, 1], [1, 1]]


def big_objects() -> list[int]:
    rank = PartialState().process_index
    return [len(text) for text in gather_object(["x" * (10 + 100_000 * rank)])]


def test_objects_of_any_size_are_gathered(in_ranks: Ranks) -> None:
    assert in_ranks(big_objects) == [[10, 100_010]] * 2


def test_alone_a_world_of_one() -> None:
    assert gather(torch.tensor(3)).tolist() == [3]
    assert gather_object(["a"]) == ["a"]
    assert gather_object({"a": 1}) == [{"a": 1}]
    assert broadcast_object_list([1]) == [1]
    assert broadcast(torch.tensor([1])).tolist() == [1]
    assert reduce(torch.tensor([2.0]), "mean", scale=3).tolist() == [6]
    assert pad_across_processes(torch.ones(1)).tolist() == [1]


@pytest.mark.parametrize("operation", [gather, broadcast, reduce, pad_across_processes])
def test_what_is_no_tensor_is_named(operation: Callable[..., Any]) -> None:
    with pytest.raises(StructureError, match=r"str at \['names'\]\[1\]"):
        operation({"names": [torch.ones(1), "Ada"]})


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(ArgumentValueError, match="'median'"):
        reduce(torch.ones(1), "median")


def draw() -> tuple[float, float, float]:
    import random

    import numpy as np

    set_seed(4)
    same = random.random() + float(np.random.rand()) + torch.rand(()).item()
    set_seed(4)
    again = random.random() + float(np.random.rand()) + torch.rand(()).item()
    assert same == again
    set_seed(4, device_specific=True)
    return same, random.random(), torch.rand(()).item()


def test_seeds_agree_or_differ_on_purpose(in_ranks: Ranks) -> None:
    first, second = in_ranks(draw)
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert first[2] != second[2]

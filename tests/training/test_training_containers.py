"""Walks over nested containers."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple

import pytest
import torch

from nbstate.errors import StructureError
from nbstate.training.containers import (
    concatenate,
    find_batch_size,
    leaves,
    map_leaves,
    pad_rows,
    send_to_device,
    slice_rows,
)

Pair = namedtuple("Pair", ["left", "right"])
META = torch.device("meta")


def test_types_of_containers_are_kept() -> None:
    data = {
        "pair": Pair(torch.ones(2), [torch.ones(2)]),
        "ordered": OrderedDict(b=torch.ones(2), a=(torch.ones(2),)),
        "default": defaultdict(list, x=torch.ones(2)),
    }
    done = map_leaves(lambda leaf, _: leaf + 1, data)
    assert isinstance(done["pair"], Pair)
    assert isinstance(done["pair"].right, list)
    assert list(done["ordered"]) == ["b", "a"]
    assert isinstance(done["ordered"], OrderedDict)
    assert isinstance(done["ordered"]["a"], tuple)
    assert done["default"]["new"] == []
    assert "new" not in data["default"]
    assert done["pair"].left.tolist() == [2, 2]


def test_mappings_are_walked_in_one_order_whatever_order_they_were_filled_in() -> None:
    one = [path for path, _ in leaves({"b": 1, "a": [2, 3]})]
    other = [path for path, _ in leaves({"a": [2, 3], "b": 1})]
    assert one == other == ["['a'][0]", "['a'][1]", "['b']"]


def test_batch_size_is_of_the_first_tensor_with_rows() -> None:
    assert find_batch_size({"loss": torch.tensor(1.0), "pixels": torch.zeros(3, 4)}) == 3
    assert find_batch_size([(torch.zeros(2),), torch.zeros(5)]) == 2
    for without in ({"loss": torch.tensor(1.0)}, [], "text"):
        with pytest.raises(StructureError):
            find_batch_size(without)


def test_sending_leaves_other_objects_and_skipped_keys_alone() -> None:
    moved = send_to_device(
        {"x": torch.ones(1), "names": ["a"], "pair": Pair(torch.ones(1), 3), "stay": torch.ones(1)},
        META,
        skip_keys="stay",
    )
    assert moved["x"].device == META
    assert moved["pair"].left.device == META
    assert moved["pair"].right == 3
    assert moved["names"] == ["a"]
    assert moved["stay"].device.type == "cpu"


def test_an_object_that_can_move_itself_is_asked_to() -> None:
    class Batch(dict):  # type: ignore[type-arg]
        def to(self, device: torch.device) -> str:
            return f"moved to {device}"

    assert send_to_device([Batch(x=torch.ones(1))], META) == ["moved to meta"]


def test_rows_of_tensors_and_of_columns_are_cut_and_joined() -> None:
    first = {"x": torch.tensor([0, 1]), "name": ["a", "b"], "pair": (torch.tensor([5, 6]), torch.tensor([7, 8]))}
    second = {"x": torch.tensor([2]), "name": ["c"], "pair": (torch.tensor([9]), torch.tensor([10]))}
    whole = concatenate([first, second])
    assert whole["x"].tolist() == [0, 1, 2]
    assert whole["name"] == ["a", "b", "c"]
    assert whole["pair"][1].tolist() == [7, 8, 10]
    part = slice_rows(whole, slice(1, 3))
    assert part["name"] == ["b", "c"]
    assert part["pair"][0].tolist() == [6, 9]
    assert pad_rows(second, first, 6)["name"] == ["c", "a", "b", "a", "b", "a"]


def test_batches_of_different_structure_do_not_join() -> None:
    with pytest.raises(StructureError):
        concatenate([(torch.ones(1), torch.ones(1)), (torch.ones(1),)])
    with pytest.raises(StructureError):
        concatenate([{"x": 1}, {"x": 2}])

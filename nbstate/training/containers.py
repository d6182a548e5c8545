"""Walks over nested tuples, named tuples, lists and dicts of tensors. Pure: no state, no collective."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch

from nbstate.errors import StructureError

__all__ = [
    "batch_size_of",
    "concatenate",
    "find_batch_size",
    "is_container",
    "leaves",
    "map_leaves",
    "pad_rows",
    "rebuild",
    "send_to_device",
    "slice_rows",
]


def is_container(value: object) -> TypeGuard[Sequence[Any] | Mapping[Any, Any]]:
    """Whether the walk goes into a value: a list, a tuple, a named tuple or a mapping, each with its subclasses."""
    return isinstance(value, list | tuple | Mapping)


def rebuild(like: Any, items: Any) -> Any:
    """A container of the same type as another, with new items.

    Parameters
    ----------
    like : list, tuple, named tuple or mapping
        Gives the type. It is not changed.
    items : dict or list
        A dict where ``like`` is a mapping, else a list.
    """
    kind = type(like)
    if isinstance(like, Mapping):
        if kind is dict:
            return items
        try:
            # A copy keeps what a subclass carries besides its items (a default factory, attributes).
            new = copy.copy(like)
            for key, value in items.items():
                new[key] = value  # type: ignore[index]
        except TypeError:
            return kind(items)
        return new
    if hasattr(like, "_fields"):
        return kind(*items)
    return items if kind is list else kind(items)


def _children(container: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(container, Mapping):
        # Ranks may have filled their dicts in different orders; a collective per leaf must still meet its peers.
        for key in sorted(container, key=repr):
            yield f"[{key!r}]", key, container[key]
    else:
        for index, value in enumerate(container):
            yield f"[{index}]", index, value


def map_leaves(function: Callable[[Any, str], Any], data: Any, path: str = "") -> Any:
    """Apply a function to every leaf and keep the containers' types.

    Parameters
    ----------
    function : callable
        Takes a leaf and its path, as ``"['labels'][0]"``. Mappings are walked in the order of their keys' ``repr``, so
        that every rank comes to the same leaf at the same time.
    data
        Anything; what is not a container is a leaf.
    path : str
        The path of ``data`` itself.
    """
    if not is_container(data):
        return function(data, path)
    done = {key: map_leaves(function, value, path + step) for step, key, value in _children(data)}
    if isinstance(data, Mapping):
        return rebuild(data, {key: done[key] for key in data})
    return rebuild(data, list(done.values()))


def leaves(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its path, in the order of ``map_leaves``."""
    if is_container(data):
        for step, _, value in _children(data):
            yield from leaves(value, path + step)
    else:
        yield path, data


def batch_size_of(data: Any) -> int | None:
    """Rows of the first tensor that has any, in the order the containers were written; None if there is none."""
    if isinstance(data, torch.Tensor):
        return data.shape[0] if data.ndim else None
    if not is_container(data):
        return None
    for value in data.values() if isinstance(data, Mapping) else data:
        size = batch_size_of(value)
        if size is not None:
            return size
    return None


def find_batch_size(data: Any) -> int:
    """Rows of the first tensor in nested containers.

    Raises
    ------
    StructureError
        (a TypeError) There is no tensor with at least one dimension.

    Examples
    --------
    >>> import torch
    >>> from nbstate.training.containers import find_batch_size
    >>> find_batch_size({"pixels": torch.zeros(4, 64), "labels": torch.zeros(4)})
    4
    """
    size = batch_size_of(data)
    if size is None:
        raise StructureError(f"No batch size in a {type(data).__name__}: it holds no tensor with a dimension.")
    return size


def send_to_device(
    tensor: Any,
    device: str | torch.device | int,
    non_blocking: bool = False,
    skip_keys: str | Sequence[str] | None = None,
) -> Any:
    """Move every tensor in nested containers to a device.

    Parameters
    ----------
    tensor
        A tensor, anything else with a method ``to``, or containers of them. Other leaves pass unchanged.
    device : str, torch.device or int
        Where to.
    non_blocking : bool
        Let copies from pinned memory run beside the computation.
    skip_keys : str or sequence of str, optional
        Keys of mappings whose values stay where they are.

    Returns
    -------
    object
        The same structure; a tensor that is there already is returned itself.
    """
    skip = (skip_keys,) if isinstance(skip_keys, str) else tuple(skip_keys or ())
    return _send(tensor, device, non_blocking, skip)


def _send(data: Any, device: str | torch.device | int, non_blocking: bool, skip: tuple[str, ...]) -> Any:
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=non_blocking)
    # Before the walk: a batch class of a tokenizer is a mapping that knows better how to move itself.
    move = getattr(data, "to", None)
    if callable(move):
        try:
            return move(device, non_blocking=non_blocking)
        except TypeError:
            return move(device)
    if isinstance(data, Mapping):
        return rebuild(data, {k: v if k in skip else _send(v, device, non_blocking, skip) for k, v in data.items()})
    if isinstance(data, list | tuple):
        return rebuild(data, [_send(value, device, non_blocking, skip) for value in data])
    return data


def _is_column(data: Any) -> bool:
    """Whether a list or tuple holds one object a row (the strings of a batch), not one field an entry."""
    return (
        isinstance(data, list | tuple)
        and not hasattr(data, "_fields")
        and not any(is_container(value) or isinstance(value, torch.Tensor) for value in data)
    )


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Join several batches of the same structure into one, tensors along ``dim`` and columns of objects end to end.

    Raises
    ------
    StructureError
        The batches do not have the same structure, or hold something that has no rows.
    """
    first = data[0]
    if isinstance(first, torch.Tensor):
        return torch.cat([value if value.ndim else value[None] for value in data], dim=dim)
    if not is_container(first):
        raise StructureError(f"Batches with a {type(first).__name__} among their fields cannot be joined.")
    if any(not is_container(other) or len(other) != len(first) for other in data) and not _is_column(first):
        raise StructureError(f"Batches to join differ in structure: {type(first).__name__} of different lengths.")
    if isinstance(first, Mapping):
        return rebuild(first, {key: concatenate([other[key] for other in data], dim) for key in first})
    if _is_column(first):
        return rebuild(first, list(itertools.chain.from_iterable(data)))
    return rebuild(first, [concatenate(fields, dim) for fields in zip(*data, strict=True)])


def slice_rows(data: Any, rows: slice) -> Any:
    """Take rows of every tensor and column of objects in nested containers; other leaves pass whole."""
    if isinstance(data, torch.Tensor):
        return data[rows] if data.ndim else data
    if isinstance(data, Mapping):
        return rebuild(data, {key: slice_rows(value, rows) for key, value in data.items()})
    if _is_column(data):
        return rebuild(data, list(data[rows]))
    if isinstance(data, list | tuple):
        return rebuild(data, [slice_rows(value, rows) for value in data])
    return data


def pad_rows(data: Any, filler: Any, rows: int) -> Any:
    """Lengthen a batch to a number of rows with the rows of another, from its first and round again as needed."""
    have = find_batch_size(data)
    room = find_batch_size(filler)
    parts = [data]
    while have < rows:
        take = min(room, rows - have)
        parts.append(slice_rows(filler, slice(0, take)))
        have += take
    return parts[0] if len(parts) == 1 else concatenate(parts)

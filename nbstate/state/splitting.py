"""Split a value into contiguous parts, one per rank. Pure: nothing is sent, nothing moves, no input is changed.

``divmod(n, p)``: each of ``p`` ranks gets ``n // p`` items and the first ``n % p`` ranks one more, so 17 items on 8
ranks are 3, 2, 2, 2, 2, 2, 2, 2. With padding every rank gets ``ceil(n / p)``: the short ones are filled with the last
item of the WHOLE input.

Where a type is not a sequence that Python can slice and add, its own way is used: rows of a tensor or an array,
``iloc`` of a pandas object, ``select`` of a ``datasets.Dataset``. None of those packages is imported here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from itertools import islice
from typing import Any, Final

import numpy as np
import torch

from nbstate.errors import ArgumentTypeError, ArgumentValueError

__all__ = ["bounds", "split"]

_ACCEPTED: Final = (
    "a list, tuple, str, range or other sequence, a tensor or array with at least one dimension, "
    "a pandas object, a datasets.Dataset, or a dict of these of one length"
)


def bounds(length: int, parts: int, index: int) -> tuple[int, int]:
    """Start and stop of one contiguous part.

    Parameters
    ----------
    length : int
        Number of items.
    parts : int
        Number of ranks.
    index : int
        Which rank.

    Examples
    --------
    >>> [bounds(3, 2, rank) for rank in range(2)]
    [(0, 2), (2, 3)]
    """
    size, surplus = divmod(length, parts)
    start = index * size + min(index, surplus)
    return start, start + size + (index < surplus)


def split(inputs: Any, parts: int, index: int, apply_padding: bool = False) -> Any:
    """One rank's part of a value.

    Parameters
    ----------
    inputs : sequence, tensor, array, pandas object, Dataset, or mapping of these
        What is split. A mapping is split leaf by leaf; its leaves must have one length.
    parts : int
        Number of ranks.
    index : int
        Which rank's part.
    apply_padding : bool
        Whether short parts are filled with the last item, so that all parts have one length. A ``range`` that is
        filled becomes a list, because no range repeats an item.

    Returns
    -------
    object
        Of the type of ``inputs``; empty for a rank that is left without. With one rank ``inputs`` itself.

    Raises
    ------
    ArgumentTypeError
        If the value cannot be split, also with one rank. The text says what can be.
    ArgumentValueError
        If the values of a mapping have unequal lengths. The text names the keys.

    Examples
    --------
    >>> split(["A", "B", "C"], 2, 1)
    ['C']
    >>> split(["A", "B", "C"], 2, 1, apply_padding=True)
    ['C', 'C']
    """
    length = _length(inputs)
    if parts == 1:
        return inputs
    start, stop = bounds(length, parts, index)
    fill = -(-length // parts) - (stop - start) if apply_padding else 0
    return _part(inputs, start, stop, fill)


def _length(inputs: Any) -> int:
    """Number of items; raises for what cannot be split."""
    if not isinstance(inputs, Mapping):
        return _leaf_length(inputs, "")
    lengths = dict(_leaf_lengths(inputs, ""))
    if len(set(lengths.values())) > 1:
        each = ", ".join(f"{key}: {length}" for key, length in lengths.items())
        raise ArgumentValueError(f"the values of a dict must have one length to be split between processes, not {each}")
    return next(iter(lengths.values()), 0)


def _leaf_lengths(inputs: Mapping[Any, Any], path: str) -> Iterator[tuple[str, int]]:
    for key, value in inputs.items():
        where = f"{path}[{key!r}]" if path else repr(key)
        if isinstance(value, Mapping):
            yield from _leaf_lengths(value, where)
        else:
            yield where, _leaf_length(value, where)


def _leaf_length(value: Any, where: str) -> int:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        if value.ndim > 0:
            return len(value)
    elif isinstance(value, Sequence) or _is_pandas(value) or _is_dataset(value):
        return len(value)
    found = (
        f"a {type(value).__name__}" if not hasattr(value, "ndim") else f"a {type(value).__name__} without dimensions"
    )
    key = f" under key {where}" if where else ""
    raise ArgumentTypeError(f"{found}{key} cannot be split between processes; accepted is {_ACCEPTED}")


def _is_pandas(value: Any) -> bool:
    return hasattr(value, "iloc") or (_package(value) == "pandas" and hasattr(value, "take"))


def _is_dataset(value: Any) -> bool:
    return _package(value) == "datasets" and hasattr(value, "select") and hasattr(value, "__len__")


def _package(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def _part(value: Any, start: int, stop: int, fill: int) -> Any:
    """Items ``start`` to ``stop``, then ``fill`` times the last item of the whole value."""
    if isinstance(value, Mapping):
        return _mapping_part(value, start, stop, fill)
    if isinstance(value, torch.Tensor):
        part = value[start:stop]
        return torch.cat([part, value[-1:].expand(fill, *value.shape[1:])]) if fill else part
    if isinstance(value, np.ndarray):
        return value[_indices(value, start, stop, fill)] if fill else value[start:stop]
    if _is_dataset(value):
        # An empty range past the end is out of bounds to a dataset, an empty list is not.
        return value.select(_indices(value, start, stop, fill) if fill or start == stop else range(start, stop))
    if hasattr(value, "iloc"):
        return value.iloc[_indices(value, start, stop, fill)] if fill else value.iloc[start:stop]
    if _is_pandas(value):
        return value.take(_indices(value, start, stop, fill))
    if isinstance(value, range):
        return _range_part(value, start, stop, fill)
    return _sequence_part(value, start, stop, fill)


def _indices(value: Any, start: int, stop: int, fill: int) -> list[int]:
    return [*range(start, stop), *[len(value) - 1] * fill]


def _mapping_part(value: Mapping[Any, Any], start: int, stop: int, fill: int) -> Any:
    parts = {key: _part(item, start, stop, fill) for key, item in value.items()}
    if type(value) is dict or not isinstance(value, MutableMapping):
        return parts
    # Subclasses (UserDict, defaultdict, a tokenizer's BatchEncoding) take other constructor arguments, so theirs is
    # never called: a shallow copy keeps what they are, and only the copy is changed.
    result = copy.copy(value)
    result.update(parts)
    return result


def _range_part(value: range, start: int, stop: int, fill: int) -> range | list[int]:
    if not fill:
        return value[start:stop]
    if start == stop and fill == 1:
        return value[-1:]
    return [*value[start:stop], *[value[-1]] * fill]


def _sequence_part(value: Any, start: int, stop: int, fill: int) -> Any:
    try:
        part, last = value[start:stop], value[-1:]
    except TypeError:  # a deque and its like know single items only
        part = type(value)(islice(value, start, stop))
        last = type(value)(islice(value, max(0, len(value) - 1), None))
    return part + last * fill if fill else part

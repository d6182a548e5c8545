"""Collectives over nested containers of tensors, and over objects.

Every function is to be called on all ranks. Alone (one process) each returns what a world of one would.

Ranks must hand in the same structure with the same shapes and dtypes. If they do not, ``StructureError`` is raised on
every one of them, with what each had (see ``agreement``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from nbstate.errors import ArgumentValueError, StructureError
from nbstate.state import PartialState
from nbstate.training.agreement import agree, all_objects, describe, pack, unpack
from nbstate.training.containers import leaves, map_leaves
from nbstate.training.layout import data_place

__all__ = [
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "pad_across_processes",
    "reduce",
]

_REDUCTIONS = ("sum", "mean", "none")


def _tensor(leaf: Any, path: str, operation: str) -> torch.Tensor:
    if isinstance(leaf, torch.Tensor):
        return leaf
    where = f" at {path}" if path else ""
    raise StructureError(
        f"{operation} takes tensors in nested lists, tuples and dicts; there is a {type(leaf).__name__}{where}. "
        "Use gather_object or broadcast_object_list for other objects."
    )


def _all(state: PartialState, data: Any, operation: str) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """This rank's tensors, and every rank's bytes if they are few; raises on all ranks where they do not match."""
    found = list(leaves(data))
    tensors = [_rows(leaf) for _, leaf in found if isinstance(leaf, torch.Tensor)]
    block = agree(state, operation, describe(data), pack(tensors, state.device))
    for path, leaf in found:
        _tensor(leaf, path, operation)
    return tensors, block


def _rebuilt(data: Any, tensors: Iterable[torch.Tensor]) -> Any:
    """The same containers with other tensors, in the order of the walk."""
    following = iter(tensors)
    return map_leaves(lambda leaf, path: next(following), data)


def _together(state: PartialState, tensor: torch.Tensor) -> torch.Tensor:
    """Tensors of the same shape from every rank, stacked in rank order: (world size, ...)."""
    block = tensor.new_empty((state.num_processes, *tensor.shape))
    dist.all_gather(list(block.unbind(0)), tensor.detach().contiguous())
    return block


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.ndim else tensor[None]


def gather(tensor: Any, once: bool = False) -> Any:
    """Collect tensors from every rank, joined along dimension 0 in rank order.

    Parameters
    ----------
    tensor
        A tensor or nested containers of them, of the same shapes on every rank. A tensor without dimensions counts as
        one of shape (1,).
    once : bool
        Of ranks that share their samples (one tensor-parallel group) take one.

    Returns
    -------
    object
        The same structure on every rank; a tensor of shape (n, ...) becomes (world size * n, ...).

    Raises
    ------
    StructureError
        (a TypeError) A leaf is not a tensor, or the ranks' structures differ; on every rank.
    """
    state = PartialState()
    if state.num_processes == 1:
        return map_leaves(lambda leaf, path: _rows(_tensor(leaf, path, "gather")), tensor)
    step = data_place().group if once else 1
    mine, block = _all(state, tensor, "gather")
    together = unpack(block, mine) if block is not None else (_together(state, value) for value in mine)
    return _rebuilt(tensor, (value[::step].flatten(0, 1) for value in together))


def gather_object(object: Any, once: bool = False) -> list[Any]:
    """Collect picklable objects from every rank in rank order.

    Parameters
    ----------
    object
        A list or tuple (its items are joined into one list), or any other object (taken as one item).
    once : bool
        Of ranks that share their samples (one tensor-parallel group) take one.

    Examples
    --------
    >>> from nbstate.utils import gather_object
    >>> gather_object(["seen", "also seen"])
    ['seen', 'also seen']
    """
    state = PartialState()
    items = list(object) if isinstance(object, list | tuple) else [object]
    if state.num_processes == 1:
        return items
    everyones = all_objects(state, items, "gather_object")
    step = data_place().group if once else 1
    return [item for part in everyones[::step] for item in part]


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Give every rank the tensors of one.

    Parameters
    ----------
    tensor
        A tensor or nested containers of them, of the same shapes on every rank. The tensors themselves are filled.
    from_process : int
        The rank whose values go out.
    """
    state = PartialState()
    if state.num_processes == 1:
        return map_leaves(lambda leaf, path: _tensor(leaf, path, "broadcast"), tensor)
    mine, block = _all(state, tensor, "broadcast")
    told = unpack(block, mine) if block is not None else None

    def fill(index: int, leaf: torch.Tensor) -> torch.Tensor:
        sent = leaf.detach()
        if told is not None:
            sent.copy_(told[index][from_process].reshape(leaf.shape))
        elif sent.is_contiguous():
            dist.broadcast(sent, src=from_process)
        else:
            copy = sent.contiguous()
            dist.broadcast(copy, src=from_process)
            sent.copy_(copy)
        return leaf

    return _rebuilt(tensor, (fill(index, leaf) for index, (_, leaf) in enumerate(leaves(tensor))))


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Fill a list on every rank with one rank's picklable objects.

    Parameters
    ----------
    object_list : list
        Its entries are replaced.
    from_process : int
        The rank whose objects go out.

    Returns
    -------
    list
        The same list.
    """
    if PartialState().num_processes > 1:
        # As one object: then nothing depends on how long the others' lists are.
        box = [list(object_list)]
        dist.broadcast_object_list(box, src=from_process)
        object_list[:] = box[0]
    return object_list


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Combine tensors over all ranks, element by element.

    Parameters
    ----------
    tensor
        A tensor or nested containers of them, of the same shapes on every rank. They are not changed.
    reduction : {"mean", "sum", "none"}
        "none" combines nothing and only scales.
    scale : float
        Factor of the result.

    Returns
    -------
    object
        The same structure. The mean of whole numbers is of the default floating type.
    """
    if reduction not in _REDUCTIONS:
        raise ArgumentValueError(f"reduction is one of {', '.join(map(repr, _REDUCTIONS))}, not {reduction!r}.")
    state = PartialState()
    if state.num_processes == 1 or reduction == "none":
        values = [_tensor(leaf, path, "reduce") for path, leaf in leaves(tensor)]
        totals: Iterable[torch.Tensor] = [value.detach().clone() for value in values]
    else:
        mine, block = _all(state, tensor, "reduce")
        values = [leaf for _, leaf in leaves(tensor)]
        totals = _sums(mine, block)

    def finish(total: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        total = total.reshape(value.shape)
        if reduction == "mean":
            total = total / state.num_processes
        return total if scale == 1.0 else total * scale

    return _rebuilt(tensor, (finish(total, value) for total, value in zip(totals, values, strict=True)))


def _sums(mine: Sequence[torch.Tensor], block: torch.Tensor | None) -> Iterator[torch.Tensor]:
    if block is not None:
        for value, everyones in zip(mine, unpack(block, mine), strict=True):
            # A sum of small whole numbers would widen them, and bool has none.
            yield everyones.any(0) if value.dtype is torch.bool else everyones.sum(0, dtype=value.dtype)
        return
    for value in mine:
        total = value.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        yield total


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Lengthen tensors along one dimension to the longest of any rank, so that they can be gathered.

    Parameters
    ----------
    tensor
        A tensor or nested containers of them, of the same number of dimensions on every rank.
    dim : int
        The dimension; one that a tensor lacks leaves that tensor as it is.
    pad_index : number
        What to fill with.
    pad_first : bool
        Fill before the values, not after.
    """
    state = PartialState()
    if state.num_processes == 1:
        return map_leaves(lambda leaf, path: _tensor(leaf, path, "pad_across_processes"), tensor)
    found = list(leaves(tensor))
    values = [leaf for _, leaf in found if isinstance(leaf, torch.Tensor)]
    sizes = torch.tensor([value.shape[dim] if _has(value, dim) else 0 for value in values], dtype=torch.int64)
    block = agree(state, "pad_across_processes", describe(tensor, shapes=False), pack([sizes], state.device))
    for path, leaf in found:
        _tensor(leaf, path, "pad_across_processes")
    everyones = unpack(block, [sizes])[0] if block is not None else _together(state, sizes.to(state.device))
    longest = everyones.amax(0).tolist() if values else []

    def pad(value: torch.Tensor, length: int) -> torch.Tensor:
        if not _has(value, dim) or value.shape[dim] == length:
            return value
        have, shape = value.shape[dim], list(value.shape)
        shape[dim] = length
        padded = value.new_full(shape, pad_index)
        padded.narrow(dim, length - have if pad_first else 0, have).copy_(value)
        return padded

    return _rebuilt(tensor, map(pad, values, longest))


def _has(value: torch.Tensor, dim: int) -> bool:
    return -value.ndim <= dim < value.ndim

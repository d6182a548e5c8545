"""Collectives over nested containers of tensors, and over objects.

Every function is to be called on all ranks. Alone (one process) each returns what a world of one would.

Ranks must hand in the same structure with the same shapes. When the state's ``debug`` is set this is checked first,
and a mismatch raises ``StructureError`` on every rank with what each one had; otherwise it is left to the backend,
since the check costs a collective.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from nbstate.errors import ArgumentValueError, StructureError
from nbstate.state import PartialState
from nbstate.training.containers import leaves, map_leaves

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


def _check(state: PartialState, data: Any, operation: str) -> None:
    if not state.debug:
        return
    mine = [
        (path, tuple(leaf.shape), str(leaf.dtype))
        if isinstance(leaf, torch.Tensor)
        else (path, type(leaf).__name__, "")
        for path, leaf in leaves(data)
    ]
    everyones: list[Any] = [None] * state.num_processes
    dist.all_gather_object(everyones, mine)
    if all(other == mine for other in everyones):
        return
    rows = [
        f"  rank {rank}: " + (", ".join(f"{path} {shape} {dtype}".strip() for path, shape, dtype in what) or "nothing")
        for rank, what in enumerate(everyones)
    ]
    raise StructureError("\n".join([f"Ranks called {operation} with different structures:", *rows]))


def _together(state: PartialState, tensor: torch.Tensor) -> torch.Tensor:
    """Tensors of the same shape from every rank, stacked in rank order: (world size, ...)."""
    block = tensor.new_empty((state.num_processes, *tensor.shape))
    dist.all_gather(list(block.unbind(0)), tensor.detach().contiguous())
    return block


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.ndim else tensor[None]


def gather(tensor: Any) -> Any:
    """Collect tensors from every rank, joined along dimension 0 in rank order.

    Parameters
    ----------
    tensor
        A tensor or nested containers of them, of the same shapes on every rank. A tensor without dimensions counts as
        one of shape (1,).

    Returns
    -------
    object
        The same structure on every rank; a tensor of shape (n, ...) becomes (world size * n, ...).

    Raises
    ------
    StructureError
        (a TypeError) A leaf is not a tensor; or, with ``debug``, the ranks' structures differ.
    """
    state = PartialState()
    if state.num_processes == 1:
        return map_leaves(lambda leaf, path: _rows(_tensor(leaf, path, "gather")), tensor)
    _check(state, tensor, "gather")

    def one(leaf: Any, path: str) -> torch.Tensor:
        return _together(state, _rows(_tensor(leaf, path, "gather"))).flatten(0, 1)

    return map_leaves(one, tensor)


def gather_object(object: Any) -> list[Any]:
    """Collect picklable objects from every rank in rank order.

    Parameters
    ----------
    object
        A list or tuple (its items are joined into one list), or any other object (taken as one item).

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
    everyones: list[Any] = [None] * state.num_processes
    dist.all_gather_object(everyones, items)
    return [item for part in everyones for item in part]


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
    if state.num_processes > 1:
        _check(state, tensor, "broadcast")

    def one(leaf: Any, path: str) -> torch.Tensor:
        value = _tensor(leaf, path, "broadcast")
        if state.num_processes == 1:
            return value
        if value.is_contiguous():
            dist.broadcast(value.detach(), src=from_process)
            return value
        copy = value.detach().contiguous()
        dist.broadcast(copy, src=from_process)
        with torch.no_grad():
            value.copy_(copy)
        return value

    return map_leaves(one, tensor)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Fill a list on every rank with one rank's picklable objects.

    Parameters
    ----------
    object_list : list
        Of the same length on every rank; its entries are replaced.
    from_process : int
        The rank whose objects go out.

    Returns
    -------
    list
        The same list.
    """
    if PartialState().num_processes > 1:
        dist.broadcast_object_list(object_list, src=from_process)
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
    alone = state.num_processes == 1 or reduction == "none"
    if not alone:
        _check(state, tensor, "reduce")

    def one(leaf: Any, path: str) -> torch.Tensor:
        value = _tensor(leaf, path, "reduce")
        total = value.detach().clone(memory_format=torch.contiguous_format)
        if not alone:
            dist.all_reduce(total)
        if reduction == "mean":
            total = total / state.num_processes
        return total if scale == 1.0 else total * scale

    return map_leaves(one, tensor)


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

    def one(leaf: Any, path: str) -> torch.Tensor:
        value = _tensor(leaf, path, "pad_across_processes")
        if state.num_processes == 1 or not -value.ndim <= dim < value.ndim:
            return value
        size = torch.tensor([value.shape[dim]], device=state.device)
        longest = int(_together(state, size).max())
        have = value.shape[dim]
        if have == longest:
            return value
        shape = list(value.shape)
        shape[dim] = longest
        padded = value.new_full(shape, pad_index)
        padded.narrow(dim, longest - have if pad_first else 0, have).copy_(value)
        return padded

    return map_leaves(one, tensor)

"""One message of fixed size in front of a collective, so that ranks cannot meet in it with different things.

A backend takes it on trust that all ranks bring the same shapes. If they do not, gloo ends the process, NCCL waits for
ever, and a rank that brings fewer tensors than the others leaves them waiting. So each rank first tells the others a
digest of what it brings, in a message whose size does not depend on it. If the digests differ all ranks know, and all
raise. What is small travels in the same message, and then there is no second one: a whole batch of labels, or a loss,
costs one collective, however many tensors it is made of.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from nbstate.errors import StructureError
from nbstate.state import DistributedType, PartialState
from nbstate.training.containers import leaves

__all__ = ["agree", "all_objects", "describe", "pack", "unpack"]

# Bytes of a message: the digest, the length, and room for what is small.
_HEAD: Final = 16
_ROOM: Final = 4096
_UNSENDABLE: Final = -1

Facts = tuple[tuple[Any, ...], ...]
_OBJECTS: Final[Facts] = (("", "objects", ""),)


def describe(data: Any, shapes: bool = True) -> Facts:
    """What a rank brings: each leaf's path, shape (or number of dimensions) and dtype; of no tensor its type."""
    return tuple(
        (path, tuple(leaf.shape) if shapes else leaf.ndim, str(leaf.dtype))
        if isinstance(leaf, torch.Tensor)
        else (path, type(leaf).__name__, "")
        for path, leaf in leaves(data)
    )


@functools.lru_cache(maxsize=256)
def _digest(operation: str, facts: Facts) -> int:
    # Not hash(): each process salts it differently.
    digest = hashlib.blake2b(repr((operation, facts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def pack(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor | None:
    """The bytes of some tensors end to end, (bytes,); None if a message has no room for them."""
    if sum(tensor.numel() * tensor.element_size() for tensor in tensors) > _ROOM:
        return None
    parts = [tensor.detach().to(device).contiguous().flatten().view(torch.uint8) for tensor in tensors]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)


def unpack(block: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors of every rank out of their bytes.

    Parameters
    ----------
    block : torch.Tensor
        (world size, bytes), uint8.
    like : sequence of torch.Tensor
        Shapes, dtypes and devices, in the order in which they were packed.

    Returns
    -------
    list of torch.Tensor
        Each (world size, ...).
    """
    found, start = [], 0
    for tensor in like:
        size = tensor.numel() * tensor.element_size()
        part = block[:, start : start + size].contiguous().view(tensor.dtype)
        found.append(part.reshape(block.shape[0], *tensor.shape).to(tensor.device))
        start += size
    return found


def _tell(state: PartialState, digest: int, length: int, payload: torch.Tensor | None) -> tuple[Any, torch.Tensor]:
    """Exchange one message: every rank's (digest, length) as rows of numbers, and every rank's room."""
    head = torch.tensor([digest, length], dtype=torch.int64).view(torch.uint8)
    message = torch.zeros(_HEAD + _ROOM, dtype=torch.uint8, device=state.device)
    message[:_HEAD] = head.to(state.device)
    if payload is not None:
        message[_HEAD : _HEAD + payload.numel()] = payload
    block = message.new_empty((state.num_processes, message.numel()))
    dist.all_gather(list(block.unbind(0)), message)
    return block[:, :_HEAD].contiguous().view(torch.int64).tolist(), block[:, _HEAD:]


def agree(state: PartialState, operation: str, facts: Facts, payload: torch.Tensor | None) -> torch.Tensor | None:
    """Make sure that all ranks bring the same to a collective.

    Parameters
    ----------
    state : PartialState
        Of several ranks.
    operation : str
        What is about to be called.
    facts : tuple
        Of ``describe``.
    payload : torch.Tensor, optional
        Of ``pack``: what can travel along, as long on every rank.

    Returns
    -------
    torch.Tensor or None
        Every rank's payload, (world size, bytes); None if there is none, or nothing could be exchanged.

    Raises
    ------
    StructureError
        On every rank, with what each one brought.
    """
    if state.distributed_type is DistributedType.XLA:
        # There the exchange would cut the step's graph in two.
        return None
    digest = _digest(operation, facts)
    heads, rooms = _tell(state, digest, 0 if payload is None else payload.numel(), payload)
    _check(state, heads, digest, operation, facts)
    return None if payload is None else rooms[:, : payload.numel()]


def _check(state: PartialState, heads: Any, digest: int, operation: str, facts: Facts) -> None:
    if all(head[0] == digest for head in heads):
        return
    everyones: list[Any] = [None] * state.num_processes
    dist.all_gather_object(everyones, (operation, facts))
    raise StructureError("\n".join([f"Ranks called {operation} with different structures:", *_rows(everyones)]))


def _rows(everyones: Sequence[tuple[str, Facts]]) -> list[str]:
    several = len({operation for operation, _ in everyones}) > 1
    return [
        f"  rank {rank}: {f'{operation} of ' if several else ''}"
        + (", ".join(f"{path} {shape} {dtype}".strip() for path, shape, dtype in facts) or "nothing")
        for rank, (operation, facts) in enumerate(everyones)
    ]


def all_objects(state: PartialState, mine: Any, operation: str) -> list[Any]:
    """Every rank's picklable object, in rank order.

    Raises
    ------
    StructureError
        On every rank, if some rank's object cannot be pickled, or some rank called something else.
    """
    failure: Exception | None = None
    try:
        data = pickle.dumps(mine)
    except Exception as error:  # whatever a user's own class raises
        failure, data = error, b""
    digest = _digest(operation, _OBJECTS)
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(state.device) if data else None
    small = raw if raw is not None and raw.numel() <= _ROOM else None
    heads, rooms = _tell(state, digest, _UNSENDABLE if failure is not None else len(data), small)
    _check(state, heads, digest, operation, _OBJECTS)
    lengths = [length for _, length in heads]
    guilty = [rank for rank, length in enumerate(lengths) if length == _UNSENDABLE]
    if guilty:
        where = ", ".join(map(str, guilty))
        reason = f": {type(failure).__name__}: {failure}" if failure is not None else ""
        raise StructureError(f"{operation}: what rank {where} gave cannot be pickled{reason}") from failure
    if max(lengths) > _ROOM:
        rooms = _padded(state, raw, max(lengths))
    rows = rooms.cpu()
    return [pickle.loads(rows[rank, :length].numpy().tobytes()) for rank, length in enumerate(lengths)]


def _padded(state: PartialState, raw: torch.Tensor | None, length: int) -> torch.Tensor:
    sent = torch.zeros(length, dtype=torch.uint8, device=state.device)
    if raw is not None:
        sent[: raw.numel()] = raw
    block = sent.new_empty((state.num_processes, length))
    dist.all_gather(list(block.unbind(0)), sent)
    return block

"""Wrappers around the public functions of ``torch.distributed``: each tells the probe where the rank enters and leaves.

Everything a wrapper needs on its way is a local or a cell of its closure; looking a name up in a module costs as much
as a store on the board.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from nbstate.telemetry import flight, neighbours, probe
from nbstate.telemetry.groups import WORLD, group_of, known_groups, members_text
from nbstate.telemetry.payload import facts_of, known, remember, shape_of, size_of

__all__ = ["NAMES", "wrap"]

Function = Callable[..., Any]


@dataclass(frozen=True)
class _Call:
    """What is to be known of one public function: the arguments that hold this rank's own part, and the group.

    ``payload`` names a tensor or a list of tensors; empty where the size cannot be known before the call.
    """

    payload: str = ""
    group: str = "group"


@dataclass(frozen=True)
class _Exchange:
    """The same for one that concerns two ranks: also the argument that names the other, and which way it goes."""

    payload: str
    peer: str
    sends: bool


_BARRIERS: Final = ("barrier", "monitored_barrier")
_CALLS: Final = {
    "init_process_group": _Call(group=""),
    "init_device_mesh": _Call(group=""),
    "split_group": _Call(group="parent_pg"),
    "all_reduce": _Call("tensor"),
    "all_reduce_coalesced": _Call("tensors"),
    "reduce": _Call("tensor"),
    "broadcast": _Call("tensor"),
    "all_gather": _Call("tensor"),
    "all_gather_coalesced": _Call("input_tensor_list"),
    "all_gather_into_tensor": _Call("input_tensor"),
    "all_gather_single": _Call("input_tensor"),
    "gather": _Call("tensor"),
    "scatter": _Call("tensor"),
    "reduce_scatter": _Call("input_list"),
    "reduce_scatter_tensor": _Call("input"),
    "reduce_scatter_single": _Call("input"),
    "all_to_all": _Call("input_tensor_list"),
    "all_to_all_single": _Call("input"),
    "broadcast_object_list": _Call(),
    "all_gather_object": _Call(),
    "gather_object": _Call(),
    "scatter_object_list": _Call(),
}
_EXCHANGES: Final = {
    "send": _Exchange("tensor", "dst", sends=True),
    "recv": _Exchange("tensor", "src", sends=False),
    "isend": _Exchange("tensor", "dst", sends=True),
    "irecv": _Exchange("tensor", "src", sends=False),
    "send_object_list": _Exchange("", "dst", sends=True),
    "recv_object_list": _Exchange("", "src", sends=False),
}
NAMES: Final = (*_BARRIERS, *_CALLS, *_EXCHANGES, "batch_isend_irecv", "new_group")
_ABSENT: Final = 1 << 30  # the position of an argument that a function does not have


def wrap(bare: Function, name: str) -> Function:
    """A wrapper around the public function ``name``, one of ``NAMES``: same arguments, result and errors."""
    if name in _BARRIERS:
        return _wrap_barrier(bare, name)
    if name in _EXCHANGES:
        return _wrap_exchange(bare, name, _EXCHANGES[name])
    if name == "batch_isend_irecv":
        return _wrap_batch(bare)
    if name == "new_group":
        return _wrap_new_group(bare)
    seen = _wrap_call(bare, name, _CALLS[name])
    return _and_watch(bare, seen) if name == "init_process_group" else seen


@functools.cache
def _position(function: Function, argument: str) -> int:
    parameters = list(inspect.signature(function).parameters)
    return parameters.index(argument) if argument in parameters else _ABSENT


def _learn_positions() -> None:
    """Read the signatures once, where this module is imported, and not again in every rank that is forked there."""
    for name in NAMES:
        bare = getattr(dist, name, None)
        if bare is not None:
            wrap(bare, name)


def _wrap_call(bare: Function, name: str, call: _Call) -> Function:
    payload, payload_at = call.payload, _position(bare, call.payload)
    group_name, group_at = call.group, _position(bare, call.group)
    enter, leave, follow = probe.enter, probe.leave, probe.follow
    world, groups, seen_before = WORLD, known_groups, known
    tensor_type, work_type = torch.Tensor, dist.Work
    compiling = torch.compiler.is_dynamo_compiling

    @functools.wraps(bare)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if compiling():
            return bare(*args, **kwargs)
        count = len(args)
        part: Any = args[payload_at] if count > payload_at else kwargs.get(payload)
        group = args[group_at] if count > group_at else kwargs.get(group_name)
        if type(part) is tensor_type:
            nbytes, shape = seen_before.get((part.dtype, part.shape)) or remember(part)
        else:
            nbytes, shape = facts_of(part)
        part_of = world if group is None else groups.get(id(group)) or group_of(group)
        if part_of is world:
            entered = enter(name, nbytes, False, shape)
        else:
            entered = enter(name, nbytes, True, shape, part_of.members, part_of.begun + 1)
            if entered:
                part_of.begun += 1
        if not entered:
            return bare(*args, **kwargs)
        try:
            result = bare(*args, **kwargs)
        except BaseException:
            leave(False)
            raise
        leave()
        if result is not None and type(result) is work_type:
            follow(result)
        return result

    return wrapper


def _and_watch(bare: Function, seen: Function) -> Function:
    """From the first process group on there is something that a flight recorder can tell, and who has asked for it."""

    @functools.wraps(bare)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = seen(*args, **kwargs)
        flight.watch()
        neighbours.look()
        return result

    return wrapper


def _wrap_barrier(bare: Function, name: str) -> Function:
    """A barrier of the whole world is numbered as such; one of a group is a collective."""
    group_at = _position(bare, "group")
    enter, enter_barrier, leave = probe.enter, probe.enter_barrier, probe.leave
    compiling = torch.compiler.is_dynamo_compiling

    @functools.wraps(bare)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if compiling():
            return bare(*args, **kwargs)
        group = args[group_at] if len(args) > group_at else kwargs.get("group")
        part_of = group_of(group)
        whole = part_of is WORLD
        if whole:
            entered = enter_barrier()
        else:
            entered = enter(name, 0, True, "", part_of.members, part_of.begun + 1)
            if entered:
                part_of.begun += 1
        if not entered:
            return bare(*args, **kwargs)
        try:
            result = bare(*args, **kwargs)
        except BaseException:
            leave(False)
            raise
        leave()
        if type(result) is dist.Work:
            probe.follow(result, barrier=whole)
        return result

    return wrapper


def _wrap_exchange(bare: Function, name: str, call: _Exchange) -> Function:
    """A send or a receive. It is numbered among those that go the same way between the same two ranks."""
    payload, payload_at = call.payload, _position(bare, call.payload)
    peer_name, peer_at = call.peer, _position(bare, call.peer)
    inner_name, inner_at = f"group_{call.peer}", _position(bare, f"group_{call.peer}")
    group_at, sends = _position(bare, "group"), call.sends
    enter, leave = probe.enter, probe.leave
    compiling = torch.compiler.is_dynamo_compiling

    @functools.wraps(bare)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if compiling():
            return bare(*args, **kwargs)
        count = len(args)
        part: Any = args[payload_at] if count > payload_at else kwargs.get(payload)
        part_of = group_of(args[group_at] if count > group_at else kwargs.get("group"))
        peer = args[peer_at] if count > peer_at else kwargs.get(peer_name)
        if type(peer) is not int:
            peer = part_of.global_rank(args[inner_at] if count > inner_at else kwargs.get(inner_name))
        so_far = part_of.sent if sends else part_of.received
        number = so_far.get(peer, 0) + 1
        nbytes, shape = facts_of(part)
        if not enter(name, nbytes, True, shape, part_of.members, number, peer):
            return bare(*args, **kwargs)
        so_far[peer] = number
        try:
            result = bare(*args, **kwargs)
        except BaseException:
            leave(False)
            raise
        leave()
        if type(result) is dist.Work:
            probe.follow(result)
        return result

    return wrapper


def _wrap_batch(bare: Function) -> Function:
    """Sends and receives together: one entry, and each is counted and its handle followed by itself."""
    at = _position(bare, "p2p_op_list")

    @functools.wraps(bare)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return bare(*args, **kwargs)
        batch: Any = args[at] if len(args) > at else kwargs.get("p2p_op_list")
        parts = [op for op in batch if isinstance(op, dist.P2POp)] if isinstance(batch, list | tuple) else []
        groups = {group_of(op.group) for op in parts}
        members = groups.pop().members if len(groups) == 1 else ""
        peers = {op.peer for op in parts}
        peer = peers.pop() if len(peers) == 1 else -1
        tensors = [op.tensor for op in parts]
        if not probe.enter("batch_isend_irecv", size_of(tensors), True, shape_of(tensors), members, 0, peer):
            return bare(*args, **kwargs)
        numbers = [_count(op) for op in parts]
        try:
            works = bare(*args, **kwargs)
        except BaseException:
            probe.leave(False)
            raise
        probe.leave()
        if len(works) == len(parts):
            for work, op, number in zip(works, parts, numbers, strict=True):
                _follow_part(work, op, number)
        else:  # a backend that joins them gives one handle for all
            for work in works:
                _follow_part(work, None, 0)
        return works

    return wrapper


def _count(op: Any) -> int:
    part_of = group_of(op.group)
    so_far = part_of.sent if "send" in op.op.__name__ else part_of.received
    so_far[op.peer] = so_far.get(op.peer, 0) + 1
    return so_far[op.peer]


def _follow_part(work: Any, op: Any, number: int) -> None:
    if type(work) is not dist.Work:
        return
    if op is None:
        probe.follow(work)
        return
    nbytes, shape = facts_of(op.tensor)
    probe.follow(work, part=(op.op.__name__, nbytes, shape, group_of(op.group).members, number, op.peer))


def _wrap_new_group(bare: Function) -> Function:
    """All ranks of the world make a group together, or, where that is asked for, only its members."""
    local_at, ranks_at = _position(bare, "use_local_synchronization"), _position(bare, "ranks")

    @functools.wraps(bare)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return bare(*args, **kwargs)
        local = args[local_at] if len(args) > local_at else kwargs.get("use_local_synchronization")
        ranks = args[ranks_at] if len(args) > ranks_at else kwargs.get("ranks")
        members = members_text(tuple(ranks)) if local and isinstance(ranks, list | tuple | range) else ""
        if not probe.enter("new_group", 0, bool(members), "", members):
            return bare(*args, **kwargs)
        try:
            made = bare(*args, **kwargs)
        except BaseException:
            probe.leave(False)
            raise
        probe.leave()
        return made

    return wrapper


if dist.is_available():
    _learn_positions()

"""Plain torch code seen by the probe: ``torch.distributed``, DDP's forward and the optimizers, in a rank.

``install`` replaces each public function of ``torch.distributed`` with a wrapper that tells the probe where the rank
enters and leaves. A wrapper adds under 2 microseconds, raises what the function raises and returns what it returns.

What must not break, and how it is kept:

- *Pickling.* Wrappers carry the name and module of what they wrap and stand where those names point, so they pickle
  by reference, and a process without wrappers unpickles the bare function.
- *torch.compile.* Dynamo turns some of these functions into traceable ones, which it knows by identity in a table of
  ``torch.distributed._functional_collectives``. The wrappers are entered in that table beside the bare ones. Under a
  trace, a wrapper that is not in the table is only the bare call. Compiled code is not seen by the probe.
- *Order of imports.* torch's own modules import these functions by name, some of them lazily. The table is put right
  again by ``uninstall``, whenever it came to be.

A collective with ``async_op=True`` is left as soon as the call returns; its handle is not followed.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from nbstate.telemetry import probe

__all__ = ["install", "installed", "uninstall"]


@dataclass(frozen=True)
class _Call:
    """What is to be known of one public function: the argument that holds this rank's own part, and who takes part.

    ``payload`` names a tensor or a list of tensors; empty where the size cannot be known before the call.
    ``pairwise`` calls never concern the whole world, whatever their group.
    """

    payload: str = ""
    pairwise: bool = False


_BARRIERS: Final = ("barrier", "monitored_barrier")
_CALLS: Final = {
    "init_process_group": _Call(),
    "all_reduce": _Call("tensor"),
    "reduce": _Call("tensor"),
    "broadcast": _Call("tensor"),
    "all_gather": _Call("tensor"),
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
    "send": _Call("tensor", pairwise=True),
    "recv": _Call("tensor", pairwise=True),
    "batch_isend_irecv": _Call("p2p_op_list", pairwise=True),
}
_shapes: Final[dict[tuple[torch.dtype, torch.Size], str]] = {}
_MAX_SHAPES: Final = 4096
_ABSENT: Final = 1 << 30  # the position of an argument that a function does not have


@dataclass
class _Installed:
    """What was replaced, and what undoes the rest."""

    wrappers: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = field(default_factory=dict)
    undo: list[Callable[[], None]] = field(default_factory=list)


_installed: _Installed | None = None


def installed() -> bool:
    """Whether this process's ``torch.distributed`` is instrumented."""
    return _installed is not None


def install() -> None:
    """Instrument ``torch.distributed``, DDP's forward and the optimizers of this process. Safe to call twice.

    Without an attached probe the wrappers write nothing.
    """
    global _installed
    if _installed is not None:
        return
    state = _Installed()
    if dist.is_available():
        _install_calls(state)
        _install_ddp(state)
    state.undo.append(register_optimizer_step_post_hook(_after_optimizer_step).remove)
    _installed = state


def uninstall() -> None:
    """Put everything back. Safe to call twice.

    A place that someone else has replaced since is left to them; the wrapper below it goes on as a plain call once
    the probe is detached.
    """
    global _installed
    if _installed is None:
        return
    state, _installed = _installed, None
    for name, (bare, wrapper) in state.wrappers.items():
        for module in _modules():
            if getattr(module, name, None) is wrapper:
                setattr(module, name, bare)
        _forget_traceable(bare, wrapper)
    for undo in state.undo:
        undo()


def _modules() -> tuple[ModuleType, ...]:
    """Where the public functions live, and where torch's own code looks them up."""
    from torch.distributed import distributed_c10d

    return dist, distributed_c10d


def _install_calls(state: _Installed) -> None:
    for name in (*_BARRIERS, *_CALLS):
        bare: Any = getattr(dist, name, None)
        if bare is None:
            continue
        wrapper = _wrap_barrier(bare) if name in _BARRIERS else _wrap_call(bare, name, _CALLS[name])
        state.wrappers[name] = bare, wrapper
        for module in _modules():
            if getattr(module, name, None) is bare:
                setattr(module, name, wrapper)
        _add_traceable(bare, wrapper)


@functools.cache
def _position(function: Callable[..., Any], argument: str) -> int:
    parameters = list(inspect.signature(function).parameters)
    return parameters.index(argument) if argument in parameters else _ABSENT


def _learn_positions() -> None:
    """Read the signatures once, where this module is imported, and not again in every rank that is forked there."""
    for name in (*_BARRIERS, *_CALLS):
        bare = getattr(dist, name, None)
        if bare is not None:
            _position(bare, "group")
            if name in _CALLS:
                _position(bare, _CALLS[name].payload)


_learn_positions()


def _wrap_call(bare: Callable[..., Any], name: str, call: _Call) -> Callable[..., Any]:
    """A wrapper around one collective. Everything the hot path needs is a local or a cell of the closure."""
    payload, payload_at = call.payload, _position(bare, call.payload)
    group_at = _position(bare, "group")
    pairwise, shapes = call.pairwise, _shapes
    enter, leave = probe.enter, probe.leave
    tensor_type = torch.Tensor
    compiling = torch.compiler.is_dynamo_compiling

    @functools.wraps(bare)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if compiling():
            return bare(*args, **kwargs)
        count = len(args)
        part: Any = args[payload_at] if count > payload_at else kwargs.get(payload)
        group = args[group_at] if count > group_at else kwargs.get("group")
        try:
            if type(part) is tensor_type:
                nbytes = part.nbytes
                shape = shapes.get((part.dtype, part.shape)) or _remember_shape(part)
            else:
                nbytes, shape = _size(part), _shape(part)
        except RuntimeError:  # a sparse tensor has no such number
            nbytes, shape = 0, ""
        if not enter(name, nbytes, pairwise or (group is not None and _smaller(group)), shape):
            return bare(*args, **kwargs)
        try:
            result = bare(*args, **kwargs)
        except BaseException:
            leave(False)
            raise
        leave()
        return result

    return wrapper


def _wrap_barrier(bare: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper around a barrier: one of the whole world is numbered as such, one of a group is a collective."""
    name = bare.__name__
    group_at = _position(bare, "group")
    enter, enter_barrier, leave = probe.enter, probe.enter_barrier, probe.leave
    compiling = torch.compiler.is_dynamo_compiling

    @functools.wraps(bare)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if compiling():
            return bare(*args, **kwargs)
        group = args[group_at] if len(args) > group_at else kwargs.get("group")
        whole = group is None or not _smaller(group)
        if not (enter_barrier() if whole else enter(name, 0, True)):
            return bare(*args, **kwargs)
        try:
            result = bare(*args, **kwargs)
        except BaseException:
            leave(False)
            raise
        leave()
        return result

    return wrapper


def _smaller(group: Any) -> bool:
    """Whether a group is not the whole world. torch itself takes the world's own group, or None, for the world."""
    return group is not dist.group.WORLD


def _size(part: Any) -> int:
    """Bytes of a tensor, of a list of tensors, or of the tensors of point-to-point operations.

    What is no tensor counts nothing: it is for the wrapped function to say what is wrong with its arguments.
    """
    if part is None:
        return 0
    try:
        if isinstance(part, list | tuple):
            return sum((item.tensor if hasattr(item, "tensor") else item).nbytes for item in part)
        return int(part.nbytes)
    except (AttributeError, RuntimeError):
        return 0


def _remember_shape(tensor: torch.Tensor) -> str:
    """A tensor's shape and dtype as ``"4x8 float32"``: one text for all tensors alike."""
    if len(_shapes) >= _MAX_SHAPES:
        _shapes.clear()
    sizes = "x".join(map(str, tensor.shape)) or "scalar"
    return _shapes.setdefault((tensor.dtype, tensor.shape), f"{sizes} {str(tensor.dtype).removeprefix('torch.')}")


def _shape(part: Any) -> str:
    """The same for what need not be a tensor: ``"2 of 4x8 float32"`` for a list of tensors that are alike."""
    if isinstance(part, torch.Tensor):
        return _remember_shape(part)
    if not isinstance(part, list | tuple) or not part or not all(isinstance(item, torch.Tensor) for item in part):
        return ""
    kinds = {_remember_shape(item) for item in part}
    return f"{len(part)} of {kinds.pop()}" if len(kinds) == 1 else f"{len(part)} tensors"


def _traceable() -> dict[Any, Any]:
    """Dynamo's table of collectives it can trace; empty as long as nothing has imported it."""
    module = sys.modules.get("torch.distributed._functional_collectives")
    table = getattr(module, "traceable_collective_remaps", None)
    return table if isinstance(table, dict) else {}


def _add_traceable(bare: Callable[..., Any], wrapper: Callable[..., Any]) -> None:
    table = _traceable()
    if bare in table:
        table[wrapper] = table[bare]


def _forget_traceable(bare: Callable[..., Any], wrapper: Callable[..., Any]) -> None:
    """Take the wrapper out. If the table was built while it stood in the bare one's place, the bare one moves in."""
    table = _traceable()
    if wrapper in table:
        table.setdefault(bare, table.pop(wrapper))


def _install_ddp(state: _Installed) -> None:
    """Count a step for each forward of a wrapped model in training, so that plain DDP code shows."""
    bare: Callable[..., Any] = DistributedDataParallel.forward
    compiling = torch.compiler.is_dynamo_compiling

    @functools.wraps(bare)
    def forward(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        if not compiling() and self.training and torch.is_grad_enabled():
            probe.step(bool(self.require_backward_grad_sync), "ddp")
        return bare(self, *args, **kwargs)

    def undo() -> None:
        if DistributedDataParallel.forward is forward:
            DistributedDataParallel.forward = bare  # type: ignore[method-assign]

    DistributedDataParallel.forward = forward  # type: ignore[method-assign]
    state.undo.append(undo)


def _after_optimizer_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Count an executed optimizer step; where nothing better counts steps, each is a synchronised one."""
    if torch.compiler.is_dynamo_compiling():
        return
    probe.optimizer_step()
    probe.step(True, "optimizer")

"""Plain torch code seen by the probe: ``torch.distributed``, DDP's forward and the optimizers, in a rank.

``install`` replaces each public function of ``torch.distributed`` with a wrapper (see ``calls``) that tells the probe
where the rank enters and leaves, and follows the handles that they give (``async_op=True``, ``isend``) until they are
waited for. A wrapper raises what the function raises and returns what it returns; what it adds to a call, 2
to 3 microseconds, is measured by ``tests/benchmarks/bench_collectives.py``.

What must not break, and how it is kept:

- *Pickling.* Wrappers carry the name and module of what they wrap and stand where those names point, so they pickle
  by reference, and a process without wrappers unpickles the bare function.
- *Handles.* A handle stays the object that torch made: its class, ``dist.Work``, gets methods that tell the probe, so
  nothing that looks at its type, or hands it to C++, sees a difference.
- *P2POp.* torch knows ``isend`` and ``irecv`` in it by identity. A bare one, imported by name before ``install``, is
  put down as the one that stands in torch's own module.
- *torch.compile.* Dynamo turns some of these functions into traceable ones, which it knows by identity in a table of
  ``torch.distributed._functional_collectives``. The wrappers are entered in that table beside the bare ones. Under a
  trace, a wrapper that is not in the table is only the bare call. Compiled code is not seen by the probe.
- *Order of imports.* torch's own modules import these functions by name, some of them lazily. The table is put right
  again by ``uninstall``, whenever it came to be.

What torch issues by itself, from C++ (DDP's gradients) or as functional collectives, passes no public function:
``flight`` finds it when a rank stands still.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from nbstate.telemetry import calls, neighbours, probe, waits

__all__ = ["install", "installed", "uninstall", "unseen"]


@dataclass
class _Installed:
    """What was replaced, and what undoes the rest."""

    wrappers: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = field(default_factory=dict)
    undo: list[Callable[[], None]] = field(default_factory=list)


_installed: _Installed | None = None
_bare: dict[Callable[..., Any], Callable[..., Any]] = {}


def installed() -> bool:
    """Whether this process's ``torch.distributed`` is instrumented."""
    return _installed is not None


def unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function below a wrapper of ours, for our own code that has told the probe already; others as they are."""
    return _bare.get(function, function)


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
        state.undo.append(waits.install())
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
    _bare.clear()
    for undo in state.undo:
        undo()
    neighbours.unwatch()


def _modules() -> tuple[ModuleType, ...]:
    """Where the public functions live, and where torch's own code looks them up."""
    from torch.distributed import device_mesh, distributed_c10d

    return dist, distributed_c10d, device_mesh


def _install_calls(state: _Installed) -> None:
    for name in calls.NAMES:
        bare: Any = getattr(dist, name, None)
        if bare is None:
            continue
        wrapper = calls.wrap(bare, name)
        state.wrappers[name] = bare, wrapper
        _bare[wrapper] = bare
        for module in _modules():
            if getattr(module, name, None) is bare:
                setattr(module, name, wrapper)
        _add_traceable(bare, wrapper)
    _install_operations(state)


def _install_operations(state: _Installed) -> None:
    """Let ``P2POp`` take a bare function and a wrapper alike, and hold the wrapper."""
    from torch.distributed import distributed_c10d as module

    pairs = tuple(state.wrappers[name] for name in ("isend", "irecv") if name in state.wrappers)
    bare_check, bare_init = module._check_op, dist.P2POp.__init__

    def current(op: Any) -> Any:
        return next((wrapper for bare, wrapper in pairs if op is bare), op)

    @functools.wraps(bare_check)
    def check(op: Any) -> Any:
        return bare_check(current(op))

    @functools.wraps(bare_init)
    def init(self: Any, op: Any, *args: Any, **kwargs: Any) -> None:
        bare_init(self, current(op), *args, **kwargs)

    def undo() -> None:
        if module._check_op is check:
            module._check_op = bare_check
        if dist.P2POp.__init__ is init:
            dist.P2POp.__init__ = bare_init  # type: ignore[method-assign]

    module._check_op = check
    dist.P2POp.__init__ = init  # type: ignore[method-assign]
    state.undo.append(undo)


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
            neighbours.look()
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
    neighbours.look()
    probe.optimizer_step()
    probe.step(True, "optimizer")

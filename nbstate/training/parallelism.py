"""Data parallelism: how replicas are wrapped and unwrapped, and when their gradients go out."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Final

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from nbstate.state import DistributedType, GradientState, PartialState
from nbstate.training.fully_shard import is_sharded
from nbstate.training.handlers import DistributedDataParallelKwargs
from nbstate.training.precision import unwrap_forward

__all__ = [
    "Unsynchronised",
    "extract_model_from_parallel",
    "reduce_on_xla",
    "trigger_sync",
    "wrap_model",
]

# How many contexts hold a sharded model's gradients back: they may be nested, and only the outermost lets go.
_HELD: Final = "_nbstate_held_back"


def wrap_model(
    model: torch.nn.Module, state: PartialState, handler: DistributedDataParallelKwargs | None
) -> torch.nn.Module:
    """Wrap a model so that its gradients are averaged over ranks.

    One that is wrapped already, that has nothing to train, or that runs alone is handed back as it is. So is one on
    XLA, whose gradients ``reduce_on_xla`` averages; it gets the main process's parameters.
    """
    if state.num_processes == 1 or isinstance(model, DistributedDataParallel):
        return model
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    if state.distributed_type is DistributedType.XLA:
        importlib.import_module("torch_xla.core.xla_model").broadcast_master_param(model)
        return model
    arguments = handler.to_kwargs() if handler else {}
    if state.device.type in ("cpu", "mps"):
        ids = None
    else:
        ids = [state.device.index if state.device.index is not None else state.local_process_index]
    wrapped = DistributedDataParallel(model, device_ids=ids, **arguments)
    if handler is not None:
        handler.register_comm_hook(wrapped)
    return wrapped


def reduce_on_xla(optimizers: Iterable[torch.optim.Optimizer], gradient_state: GradientState) -> None:
    """Average the gradients of some optimizers' parameters over ranks, once a step. Does nothing off XLA.

    An accumulated step is one graph on XLA, and one reduction at its end is part of that graph; DDP's hooks would cut
    it at each backward. ``is_xla_gradients_synced`` says that it was done; the optimizer's step clears it.
    """
    # Stands on the hot path of every step: no instance is made to find out that there is nothing to do.
    if PartialState._shared_state.get("distributed_type") is not DistributedType.XLA:
        return
    if gradient_state.is_xla_gradients_synced:
        return
    gradients = [
        parameter.grad
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]
    xla = importlib.import_module("torch_xla.core.xla_model")
    xla.all_reduce("sum", gradients, scale=1.0 / PartialState().num_processes)
    gradient_state.is_xla_gradients_synced = True


def extract_model_from_parallel(
    model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> torch.nn.Module:
    """The user's own model, out of what it was wrapped in.

    Parameters
    ----------
    model : torch.nn.Module
        Wrapped or not.
    keep_fp32_wrapper : bool
        Keep the forward that computes in the mixed precision and returns float32.
    keep_torch_compile : bool
        Hand a compiled model back compiled.
    recursive : bool
        Also unwrap the model's children.
    """
    compiled = None
    if isinstance(getattr(model, "_orig_mod", None), torch.nn.Module):
        compiled, model = model, model._orig_mod  # type: ignore[assignment]
    while isinstance(model, DistributedDataParallel | DataParallel):
        model = model.module
    if recursive:
        for name, child in model.named_children():
            setattr(model, name, extract_model_from_parallel(child, keep_fp32_wrapper, keep_torch_compile, recursive))
    if not keep_fp32_wrapper:
        unwrap_forward(model)
    if compiled is None or not keep_torch_compile:
        return model
    compiled._orig_mod = model
    return compiled


def _hold_back(sharded: Any, more: int) -> None:
    """One context more, or fewer, that holds a sharded model's gradients back."""
    count = getattr(sharded, _HELD, 0) + more
    setattr(sharded, _HELD, count)
    if count <= 1:
        sharded.set_requires_gradient_sync(count == 0)


class Unsynchronised:
    """A context in which backward passes leave gradients on their own rank.

    Stands on the hot path of every accumulated step, so it is a class that touches one flag of DDP (what DDP's own
    ``no_sync`` does) instead of a stack of generators. A sharded model keeps whole gradients until it synchronises.
    """

    __slots__ = ("_entered", "_flags", "_models", "_sharded")

    def __init__(self, models: tuple[Any, ...]) -> None:
        self._models = models
        self._flags: list[tuple[DistributedDataParallel, bool]] = []
        self._sharded: list[Any] = []
        self._entered: list[Any] = []

    def __enter__(self) -> None:
        for model in self._models:
            # A compiled DDP is DDP inside.
            inner = model if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", model)
            if isinstance(inner, DistributedDataParallel):
                self._flags.append((inner, inner.require_backward_grad_sync))
                inner.require_backward_grad_sync = False
            elif is_sharded(inner):
                _hold_back(inner, 1)
                self._sharded.append(inner)
            elif hasattr(model, "no_sync"):
                context = model.no_sync()
                context.__enter__()
                self._entered.append(context)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for model, flag in self._flags:
            model.require_backward_grad_sync = flag
        self._flags.clear()
        while self._sharded:
            _hold_back(self._sharded.pop(), -1)
        while self._entered:
            self._entered.pop().__exit__(kind, error, trace)


class trigger_sync:  # noqa: N801 - used as a function
    """A context in which the next backward synchronises gradients although its forward ran without."""

    __slots__ = ("_model", "_saved", "_sharded")

    def __init__(self, model: Any) -> None:
        inner = model if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", model)
        self._model = inner if isinstance(inner, DistributedDataParallel) else None
        self._sharded: Any = inner if self._model is None and is_sharded(inner) else None

    def __enter__(self) -> None:
        model = self._model
        if self._sharded is not None:
            self._sharded.set_requires_gradient_sync(True)
        if model is None:
            return
        self._saved = model.require_backward_grad_sync, model.require_forward_param_sync
        model.require_backward_grad_sync = model.require_forward_param_sync = True
        # The reducer prepares itself in a forward that synchronises; there was none.
        model.reducer.prepare_for_backward([])

    def __exit__(self, *_: object) -> None:
        if self._sharded is not None and getattr(self._sharded, _HELD, None):
            self._sharded.set_requires_gradient_sync(False)
        if self._model is not None:
            self._model.require_backward_grad_sync, self._model.require_forward_param_sync = self._saved

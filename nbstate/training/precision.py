"""What 'no', 'fp16', 'bf16' and 'fp8' mean for a model, a loss and an optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from nbstate.state import read_environment
from nbstate.training.clipping import local
from nbstate.training.containers import is_container, rebuild
from nbstate.training.fp8 import check_fp8
from nbstate.training.handlers import AutocastKwargs, GradScalerKwargs

__all__ = [
    "AutocastForward",
    "LossScaler",
    "autocast",
    "cast_outputs",
    "check_precision",
    "grad_scaler",
    "unwrap_forward",
    "wrap_forward",
]

# What is not done in 8 bits is done in bf16.
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


def check_precision(precision: str | None, cpu: bool = False) -> None:
    """Refuse a precision that cannot be had here, before any state is built.

    Parameters
    ----------
    precision : str, optional
        What is asked for; what the launch asked for if None.
    cpu : bool
        Whether the CPU is.
    """
    environment = read_environment()
    if str(environment.mixed_precision if precision is None else precision).lower() == "fp8":
        check_fp8(cpu or environment.use_cpu)


def autocast(
    precision: str, device: torch.device, handler: AutocastKwargs | None = None
) -> contextlib.AbstractContextManager[Any]:
    """The context in which a model computes; does nothing for 'no'."""
    dtype = _DTYPES.get(precision)
    if dtype is None:
        return contextlib.nullcontext()
    handler = handler or AutocastKwargs()
    return torch.autocast(device.type, dtype, enabled=handler.enabled, cache_enabled=handler.cache_enabled)


class LossScaler(torch.amp.GradScaler):
    """A scaler that knows which optimizers' gradients it has unscaled since its last update.

    The base class raises when it is asked twice, but clipping by norm and then by value asks twice.
    """

    def __init__(self, device: str, **options: Any) -> None:
        super().__init__(device, **options)
        self._unscaled: set[int] = set()

    def unscale_once(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide an optimizer's gradients by the scale, unless that was done in this step."""
        if id(optimizer) not in self._unscaled:
            self.unscale_(optimizer)
            self._unscaled.add(id(optimizer))

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """The base class's work, which it cannot do where some gradients are cut over ranks and others whole.

        What is not finite in one rank's part is finite in another's, and all must leave the step out: they agree.
        """
        held = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
        gradients = [gradient for gradient in held if gradient is not None]
        if not any(hasattr(gradient, "placements") for gradient in gradients):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for part in map(local, gradients):
            alike.setdefault((part.device, part.dtype), []).append(part)
        device = found_inf.device
        with torch.no_grad():
            for (place, _), parts in alike.items():
                found = found_inf.to(place)
                torch._amp_foreach_non_finite_check_and_unscale_(parts, found, inv_scale.to(place))
                found_inf = torch.maximum(found_inf, found.to(device))
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX)
        return {device: found_inf}

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adapt the scale to how the step went; a new step begins for every optimizer."""
        super().update(new_scale)
        self._unscaled.clear()


def grad_scaler(precision: str, device: torch.device, handler: GradScalerKwargs | None) -> LossScaler | None:
    """The scaler of losses under 'fp16', whose gradients would else vanish; None for the others."""
    if precision != "fp16":
        return None
    return LossScaler(device.type, **(handler.to_kwargs() if handler else {}))


def cast_outputs(data: Any) -> Any:
    """Half-precision tensors in nested containers as float32, so that a loss is computed in full."""
    if isinstance(data, torch.Tensor):
        return data.float() if data.dtype in (torch.float16, torch.bfloat16) else data
    if not is_container(data):
        return data
    if isinstance(data, Mapping):
        return rebuild(data, {key: cast_outputs(value) for key, value in data.items()})
    return rebuild(data, [cast_outputs(value) for value in data])


class AutocastForward:
    """A model's forward in its precision. A class, so that the model can still be copied and pickled."""

    def __init__(
        self, forward: Callable[..., Any], precision: str, device: torch.device, handler: AutocastKwargs | None = None
    ) -> None:
        self.forward = forward
        self.precision = precision
        self.device = device
        self.handler = handler

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with autocast(self.precision, self.device, self.handler):
            outputs = self.forward(*args, **kwargs)
        return cast_outputs(outputs)


def wrap_forward(
    model: torch.nn.Module, precision: str, device: torch.device, handler: AutocastKwargs | None = None
) -> None:
    """Make a model compute in a precision and return float32, once. Under 'no' it is left alone."""
    if precision in _DTYPES and not isinstance(model.forward, AutocastForward):
        model.forward = AutocastForward(model.forward, precision, device, handler)


def unwrap_forward(model: torch.nn.Module) -> None:
    """Give a model its own forward back."""
    if isinstance(model.__dict__.get("forward"), AutocastForward):
        del model.__dict__["forward"]

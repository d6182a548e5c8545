"""An optimizer that acts on the steps that synchronise gradients and rests on the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nbstate.state import GradientState
from nbstate.telemetry import probe
from nbstate.training.containers import send_to_device
from nbstate.training.parallelism import reduce_on_xla
from nbstate.training.precision import LossScaler
from nbstate.training.succession import follow

__all__ = ["AcceleratedOptimizer"]


class AcceleratedOptimizer(torch.optim.Optimizer):
    """Wraps an optimizer; a training loop calls it on every batch.

    ``step`` and ``zero_grad`` do nothing while gradients are accumulated (``sync_gradients`` is False). Under 'fp16'
    the scaler unscales the gradients and leaves out steps whose gradients are not finite.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Does the work; also the attribute ``optimizer``.
    device_placement : bool
        Move the optimizer's state to its parameters' devices now.
    scaler : LossScaler, optional
        Set under 'fp16'.
    """

    # Not a call of Optimizer's __init__: parameters and state are the wrapped optimizer's, and only there.
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device_placement: bool = True,
        scaler: LossScaler | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.scaler = scaler
        self.gradient_state = GradientState()
        self._skipped = False
        follow(optimizer)
        if device_placement:
            _move_state(optimizer)

    def __getattr__(self, name: str) -> Any:
        # Copying and unpickling ask before there is anything inside.
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    # The base class packs a list of its own attributes, none of which live here.
    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"AcceleratedOptimizer({self.optimizer!r})"

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's parameter groups."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        """The wrapped optimizer's defaults."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    @property
    def step_was_skipped(self) -> bool:
        """Whether the scaler left out the last step because the gradients were not finite."""
        return self._skipped

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, without a trace of the wrapper."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` gave, wrapped or not."""
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """Tell an optimizer that has such a mode (schedule-free ones) that training begins."""
        mode = getattr(self.optimizer, "train", None)
        if callable(mode):
            mode()

    def eval(self) -> None:
        """Tell an optimizer that has such a mode that evaluation begins."""
        mode = getattr(self.optimizer, "eval", None)
        if callable(mode):
            mode()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients, unless they are still being accumulated."""
        if not self.gradient_state.sync_gradients:
            return
        if set_to_none is None:
            self.optimizer.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters, unless gradients are still being accumulated."""
        if not self.gradient_state.sync_gradients:
            return None
        reduce_on_xla([self.optimizer], self.gradient_state)
        try:
            if self.scaler is not None:
                return self._scaled_step(self.scaler, closure)
            return self.optimizer.step() if closure is None else self.optimizer.step(closure)
        finally:
            self.gradient_state.is_xla_gradients_synced = False

    def _scaled_step(self, scaler: LossScaler, closure: Callable[[], Any] | None) -> Any:
        before = scaler.get_scale()
        result = scaler.step(self.optimizer) if closure is None else scaler.step(self.optimizer, closure)
        scaler.update()
        # A scale falls for one reason only: gradients that were not finite, and so a step that was left out.
        self._skipped = scaler.get_scale() < before
        if self._skipped:
            probe.optimizer_step(skipped=True)
        return result

    def unscale(self) -> None:
        """Divide the gradients by the scale, once a step; before clipping. Does nothing without a scaler."""
        if self.scaler is not None:
            self.scaler.unscale_once(self.optimizer)


def _move_state(optimizer: torch.optim.Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            # Step counters stay on the CPU, where most optimizers want them.
            if isinstance(value, torch.Tensor) and value.ndim and value.device != parameter.device:
                state[name] = send_to_device(value, parameter.device)

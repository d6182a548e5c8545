"""A learning-rate scheduler that keeps pace with the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from nbstate.state import GradientState
from nbstate.training.layout import data_place

__all__ = ["AcceleratedScheduler"]


class AcceleratedScheduler:
    """Wraps a scheduler; a training loop calls ``step`` on every batch.

    The wrapped scheduler advances only when its optimizers do. A scheduler is written for one process, which needs
    ``num_processes`` times as many steps for the same data: each call advances it that many steps, unless
    ``split_batches`` keeps the number of steps. A scheduler with a total (OneCycleLR) is never advanced past it.

    Parameters
    ----------
    scheduler : torch.optim.lr_scheduler.LRScheduler
        Does the work; also the attribute ``scheduler``.
    optimizers : optimizer or sequence of optimizers
        Prepared ones; when one skipped its step, so does the scheduler.
    step_with_optimizer : bool
        False: advance by one at every call, whatever the optimizers do.
    split_batches : bool
        Whether loaders split batches among ranks.
    """

    def __init__(
        self, scheduler: Any, optimizers: Any, step_with_optimizer: bool = True, split_batches: bool = False
    ) -> None:
        self.scheduler = scheduler
        self.optimizers: Sequence[Any] = optimizers if isinstance(optimizers, list | tuple) else [optimizers]
        self.step_with_optimizer = step_with_optimizer
        self.split_batches = split_batches
        self.gradient_state = GradientState()
        # Ranks that share their samples take one step together, as one process would.
        self._paces = data_place().parts

    def __getattr__(self, name: str) -> Any:
        # Copying and unpickling ask before there is anything inside.
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __repr__(self) -> str:
        return f"AcceleratedScheduler({self.scheduler!r})"

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance, if gradients were synchronised and no optimizer skipped its step."""
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        state = self.gradient_state
        if not state.sync_gradients:
            if state.adjust_scheduler and hasattr(self.scheduler, "_step_count"):
                # Counts calls, as torch itself does; the learning rate goes by another number.
                self.scheduler._step_count += 1
            return
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        # A metric seen N times would look like N epochs without improvement.
        once = self.split_batches or isinstance(self.scheduler, ReduceLROnPlateau)
        for _ in range(1 if once else self._paces):
            if self._is_over():
                return
            self.scheduler.step(*args, **kwargs)

    def _is_over(self) -> bool:
        total = getattr(self.scheduler, "total_steps", None)
        return total is not None and bool(self.scheduler.last_epoch >= total)

    def get_last_lr(self) -> list[float]:
        """The learning rates last computed, one a parameter group."""
        return list(self.scheduler.get_last_lr())

    def state_dict(self) -> dict[str, Any]:
        """The wrapped scheduler's state, without a trace of the wrapper."""
        return dict(self.scheduler.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` gave, wrapped or not."""
        self.scheduler.load_state_dict(state_dict)

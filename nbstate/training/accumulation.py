"""One batch under gradient accumulation: does it synchronise or not?"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol

from nbstate.state import GradientState
from nbstate.telemetry import probe
from nbstate.training.parallelism import Unsynchronised

__all__ = ["Accumulation", "StepCounter"]


class StepCounter(Protocol):
    """Who counts the batches: ``step`` of them since the count last began."""

    step: int
    gradient_state: GradientState


class Accumulation:
    """The context of one batch. On the hot path: nothing is built here that the step does not need.

    Every ``num_steps``-th batch synchronises, and the last one of a loader where ``sync_with_dataloader`` is set; then
    the count begins anew. Without, the count carries on into the next epoch.
    """

    __slots__ = ("_counter", "_models", "_unsynchronised")

    def __init__(self, counter: StepCounter, models: tuple[Any, ...]) -> None:
        self._counter = counter
        self._models = models
        self._unsynchronised: Unsynchronised | None = None

    def __enter__(self) -> None:
        counter = self._counter
        state = counter.gradient_state
        if state.sync_with_dataloader and state.end_of_dataloader:
            counter.step = 0
            sync = True
        else:
            counter.step += 1
            sync = counter.step % state.num_steps == 0
        # Only a change is told: telling costs a write on the board.
        if state.sync_gradients is not sync:
            state._set_sync_gradients(sync)
        probe.step(sync)
        if not sync and not state.sync_each_batch:
            self._unsynchronised = Unsynchronised(self._models)
            self._unsynchronised.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._unsynchronised is not None:
            self._unsynchronised.__exit__(kind, error, trace)
            self._unsynchronised = None

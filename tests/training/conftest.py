"""Fresh singletons for every test, and real ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from nbstate.launch.launcher import notebook_launcher
from nbstate.state import AcceleratorState, GradientState, PartialState
from nbstate.telemetry import probe
from nbstate.telemetry.board import Board, Slot

HUNG = 60.0  # seconds after which a launch that should have ended is called hung


@pytest.fixture(autouse=True)
def _fresh_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    _forget()
    yield
    _forget()


def _forget() -> None:
    AcceleratorState.reset()
    PartialState.reset()
    GradientState.reset()


@pytest.fixture
def in_ranks() -> Callable[..., list[Any]]:
    """Runs ``function(*args)`` in real ranks; returns their results in rank order."""

    def run(function: Callable[..., Any], *args: Any, ranks: int = 2, start_method: str = "fork", **more: Any) -> Any:
        return notebook_launcher(
            function,
            args,
            num_processes=ranks,
            start_method=start_method,
            device="cpu",
            dashboard=False,
            timeout=HUNG,
            **more,
        )

    return run


@pytest.fixture
def slot() -> Iterator[Slot]:
    """This process's place on a real board, with the probe writing on it."""
    board = Board.create(1)
    probe.attach(board.slot(0))
    yield board.slot(0)
    probe.detach()
    board.close()


@pytest.fixture
def numbers() -> Callable[..., DataLoader[Any]]:
    """Makes a loader over the numbers 0 to n - 1."""

    def make(n: int, batch_size: int | None = 4, **more: Any) -> DataLoader[Any]:
        return DataLoader(torch.arange(n), batch_size=batch_size, **more)  # type: ignore[arg-type]

    return make

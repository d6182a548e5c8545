"""Fresh singletons for every test, and real ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch._dynamo  # DDP and the optimizers import it when they are first used: once here, not in every forked rank
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
def each_in_ranks(in_ranks: Callable[..., list[Any]]) -> Callable[..., list[tuple[Any, ...]]]:
    """Runs a function for many cases in one launch; returns for each case the results in rank order.

    A case is what to call the function with: a tuple of positional or a dict of keyword arguments.
    """

    def run(
        function: Callable[..., Any], cases: Sequence[tuple[Any, ...] | Mapping[str, Any]], **more: Any
    ) -> list[tuple[Any, ...]]:
        def one_after_the_other() -> list[Any]:
            results = []
            for case in cases:
                GradientState.reset()
                results.append(function(**case) if isinstance(case, Mapping) else function(*case))
            return results

        return list(zip(*in_ranks(one_after_the_other, **more), strict=True))

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

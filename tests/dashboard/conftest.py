"""Boards written by hand: every number on them is known, and times are small."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nbstate.dashboard import LaunchFacts, LaunchView
from nbstate.telemetry.board import Barrier, Board, Flag, Phase

SECOND = 1_000_000_000
CELL = "/tmp/ipykernel_7/42.py"
CELLS = {CELL: "In[5]"}


class Stage:
    """A launch at one moment: a board to write on, and the facts and the view of it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.board = Board.create(size)
        self.facts = LaunchFacts("train", "In[5]", "forkserver", "local", size, started=10 * SECOND)
        self.now = 51 * SECOND

    def running(self, step: int = 120, sync: bool = True) -> Stage:
        """Let every rank be in the middle of its training."""
        for rank in range(self.size):
            self.rank(rank, phase=Phase.RUNNING, phase_since=50 * SECOND, heartbeat=50 * SECOND, step=step)
            self.rank(rank, flags=Flag.KNOWN | (Flag.SYNC_GRADIENTS if sync else 0), num_steps=4)
            self.board.slot(rank).write_text(device=f"cuda:{rank}", collective_name="all_reduce", barrier_file=CELL)
        return self

    def rank(self, rank: int, **words: int) -> None:
        self.board.slot(rank).write(**words)

    def meet(self, number: int, arrivals: list[int], line: int = 14) -> None:
        """Write a barrier that is over: when each rank came, in nanoseconds."""
        for rank, entered in enumerate(arrivals):
            self.board.slot(rank).write_barrier(Barrier(number, entered, max(arrivals) + 1, line))
            self.rank(rank, barrier=number, barrier_entered=entered, barrier_left=max(arrivals) + 1, barrier_line=line)

    def wait(self, number: int, arrivals: dict[int, int], line: int = 14) -> None:
        """Write a barrier in which some ranks wait."""
        for rank, entered in arrivals.items():
            self.board.slot(rank).open_barrier(number, entered, CELL, line)

    def view(self, **changes: Any) -> LaunchView:
        return LaunchView(
            **{"snapshots": self.board.snapshot(), "now": self.now, "state": "running", "cells": CELLS, **changes}
        )


@pytest.fixture
def stage() -> Iterator[Callable[[int], Stage]]:
    """Make stages of any size."""
    made: list[Stage] = []

    def make(size: int) -> Stage:
        made.append(Stage(size))
        return made[-1]

    yield make
    for each in made:
        each.board.close()

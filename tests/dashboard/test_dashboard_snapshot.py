"""The picture in words: aligned, without colours, and the sentences that every picture shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from nbstate.dashboard import build_frame, frame_to_text
from nbstate.dashboard.snapshot import age
from nbstate.telemetry.board import Phase

SECOND = 1_000_000_000
Make = Callable[[int], Any]


@pytest.fixture
def late(stage: Make) -> Any:
    """Two ranks, one of which the other waits for."""
    board = stage(2).running()
    board.meet(6, [30 * SECOND, 30 * SECOND + 31_000_000])
    board.rank(1, phase=Phase.LOADER, phase_since=48 * SECOND, sync_history=0b0101, sync_count=4)
    board.wait(7, {0: 48 * SECOND})
    return board


def test_many_ranks_are_counted(stage: Make) -> None:
    board = stage(64).running()
    board.wait(1, dict.fromkeys(range(60), 48 * SECOND))
    text = frame_to_text(build_frame(board.facts, board.view()))
    assert "barrier #1: 60 ranks" in text
    assert "running: 4 ranks" in text
    assert "60 of 64" in text


def test_text_is_aligned_and_says_the_same(late: Any) -> None:
    frame = build_frame(late.facts, late.view(lines=[(0, "\x1b[31mhello\x1b[0m")]))
    lines = frame_to_text(frame, now=41.0).splitlines()
    assert lines[0] == "train  2 ranks · forkserver · local · In[5] · 00:41"
    assert lines[1].startswith("▲ rank 1 is 3.0 s late")
    assert lines[2] == "barrier #7: 1 of 2 · missing: rank 1 · waiting 3.0 s · In[5], line 14"
    head, first, second = lines[3:6]
    assert head.index("phase") == first.index("barrier #7") == second.index("in loader")
    assert first.endswith("barrier #7, in it 3.0 s")
    assert lines[-1] == "[0] hello"


def test_ended_launch_needs_no_clock(late: Any) -> None:
    frame = build_frame(late.facts, late.view(state="finished"))
    assert frame_to_text(frame, now=999.0) == frame_to_text(frame)
    assert "00:41" in frame_to_text(frame)


def test_age() -> None:
    assert [age(s) for s in (0, 0.012, 0.0996, 3.14, 125)] == ["<1 ms", "12 ms", "0.1 s", "3.1 s", "02:05"]

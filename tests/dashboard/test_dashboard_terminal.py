"""One line on a terminal, read back from a real pseudo-terminal."""

from __future__ import annotations

import io
import os
import pty
import tty
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nbstate.dashboard.terminal import TerminalDashboard, terminal_available

SECOND = 1_000_000_000
Make = Callable[[int], Any]
WIPE = "\r\x1b[K"


class Terminal:
    """Both ends of a pseudo-terminal."""

    def __init__(self) -> None:
        self.reader, writer = pty.openpty()
        tty.setraw(writer)
        self.stream = os.fdopen(writer, "w", encoding="utf-8")

    def read(self) -> str:
        """What has been written since the last time. The kernel hands it over when it likes: a NUL ends it."""
        self.stream.write("\0")
        self.stream.flush()
        got = b""
        while not got.endswith(b"\0"):
            got += os.read(self.reader, 100_000)
        return got[:-1].decode()


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    made.stream.close()
    os.close(made.reader)


@pytest.fixture(autouse=True)
def columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")


def test_a_terminal_is_told_from_a_file(terminal: Terminal) -> None:
    closed = io.StringIO()
    closed.close()
    assert terminal_available(terminal.stream) is True
    assert terminal_available(io.StringIO()) is False
    assert terminal_available(closed) is False


def test_line_is_redrawn_in_place_and_only_when_it_says_something_else(stage: Make, terminal: Terminal) -> None:
    board, times = stage(2).running(), iter(range(100))
    line = TerminalDashboard(board.facts, terminal.stream, clock=lambda: next(times))
    assert line.refresh(board.view()) is True
    assert terminal.read() == WIPE + "train · 2 ranks · 00:41  ● both ranks training, step 120"
    assert line.refresh(board.view()) is False
    assert terminal.read() == ""
    board.now += SECOND
    assert line.refresh(board.view()) is True
    assert terminal.read().startswith(WIPE + "train · 2 ranks · 00:42")


def test_at_most_ten_a_second(stage: Make, terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    board, ticks = stage(2).running(), iter(range(1000))
    line = TerminalDashboard(board.facts, terminal.stream, clock=lambda: next(ticks) * 0.002)
    drawn = 0
    for step in range(500):
        board.rank(0, step=step)
        drawn += line.refresh(board.view())
    assert 8 <= drawn <= 10


def test_clear_makes_room_and_finish_stays(stage: Make, terminal: Terminal) -> None:
    board, times = stage(2).running(), iter(range(100))
    line = TerminalDashboard(board.facts, terminal.stream, clock=lambda: next(times))
    line.clear()
    assert terminal.read() == ""  # nothing was there
    line.refresh(board.view())
    line.clear()
    assert terminal.read().endswith(WIPE)
    line.finish(board.view(state="failed", message="rank 1 raised ValueError: boom\nand more"))
    line.finish(board.view(state="finished"))
    line.clear()
    assert line.refresh(board.view()) is False
    assert terminal.read() == WIPE + "train · 2 ranks · 00:41  ✕ rank 1 raised ValueError: boom\n"


def test_a_long_or_hostile_sentence_keeps_to_its_line(stage: Make, terminal: Terminal) -> None:
    board = stage(2).running()
    line = TerminalDashboard(board.facts, terminal.stream)
    line.finish(board.view(state="failed", message="\x1b[2J" + "x" * 500))
    shown = terminal.read().removeprefix(WIPE).removesuffix("\n")
    assert len(shown) == 59
    assert shown.endswith("x…")
    assert "\x1b" not in shown


def test_a_closed_terminal_is_no_error(stage: Make, terminal: Terminal) -> None:
    board = stage(2).running()
    line = TerminalDashboard(board.facts, io.StringIO())
    line._stream.close()
    line.finish(board.view(state="finished"))

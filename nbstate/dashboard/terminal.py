"""One line on a terminal, for launches outside a notebook: the same frames, the same three calls as the widget."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable
from typing import Final, TextIO

from nbstate.dashboard.lines import clean_line, without_colours
from nbstate.dashboard.model import LaunchFacts, LaunchView, build_frame, seconds_after, show_elapsed
from nbstate.dashboard.snapshot import SYMBOLS, verdict_sentence

__all__ = ["TerminalDashboard", "terminal_available"]

_EVERY: Final = 0.1  # seconds between two looks at the board
_WIPE: Final = "\r\x1b[K"  # to the start of the line, and erase to its end


def terminal_available(stream: TextIO | None = None) -> bool:
    """Whether ``stream`` (stderr) is a terminal, so that a line on it can be redrawn."""
    stream = sys.stderr if stream is None else stream
    with contextlib.suppress(ValueError):  # a closed stream
        return stream is not None and stream.isatty()
    return False


class TerminalDashboard:
    """Redraws one line: verdict, name and time. On stderr, so that a script's stdout stays its own.

    Parameters
    ----------
    facts : LaunchFacts
        What is known before the launch.
    stream : file, optional
        A terminal; ``sys.stderr`` if left out.
    clock : callable
        Seconds, for the limit of ten redraws a second.

    Notes
    -----
    Whoever prints on the same terminal calls ``clear`` first. The next ``refresh`` draws the line anew, below.
    """

    def __init__(
        self, facts: LaunchFacts, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.facts = facts
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._lock = threading.Lock()
        self._looked_at = float("-inf")
        self._drawn = ""
        self._finished = False

    def show(self) -> None:
        """Do nothing: the first refresh draws."""

    def refresh(self, view: LaunchView) -> bool:
        """Redraw the line if it says something else, at most ten times a second. Returns whether it was drawn."""
        with self._lock:
            moment = self._clock()
            if self._finished or moment - self._looked_at < _EVERY:
                return False
            self._looked_at = moment
            return self._draw(view)

    def clear(self) -> None:
        """Take the line away, so that others can print in its place."""
        with self._lock:
            if self._drawn and not self._finished:
                self._write(_WIPE)
                self._drawn = ""

    def finish(self, view: LaunchView) -> None:
        """Leave the last word on a line of its own. Later calls do nothing."""
        with self._lock:
            if self._finished:
                return
            self._finished = True
            self._drawn = ""
            self._draw(view)
            self._write("\n")

    def _draw(self, view: LaunchView) -> bool:
        line = self._line(view)
        if line == self._drawn:
            return False
        self._write(_WIPE + line)
        self._drawn = line
        return True

    def _line(self, view: LaunchView) -> str:
        frame = build_frame(self.facts, view)
        symbol = SYMBOLS.get(frame["verdict"]["kind"], "?")
        now = seconds_after(self.facts.started, view.now)
        size = f"{frame['world_size']} rank{'s' if frame['world_size'] != 1 else ''}"
        words = f"{frame['title']} · {size} · {show_elapsed(now)}  {symbol} {verdict_sentence(frame, now)}"
        line = without_colours(clean_line(words.splitlines()[0]))
        # One column stays free: a terminal that wraps could not take the line back.
        room = shutil.get_terminal_size().columns - 1
        return line if len(line) <= room else line[: max(0, room - 1)] + "…"

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal was closed: nobody looks any more
            self._stream.write(text)
            self._stream.flush()

"""How much text a cell of a notebook may take, and how fast, so that no front end throws any of it away.

The problem: jupyter_server passes on at most 1 MB of output a second, taken over 3 s, and drops what is more with
"IOPub data rate exceeded". What it has not read yet piles up in the kernel's sockets. And a page that holds hundreds
of megabytes of text in one cell does not move any more.

What does not work: to slow the ranks down until the page has caught up; a print would cost them a training step.

What does: the ranks go on, their output goes to their logs, and the cell gets it at the rate that front ends pass on.
A cell with ``CELL`` bytes gets no more until the end, when a word on what was left out comes, and the last ``TAIL``
bytes of each rank. ``Launch.logs`` has all of it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

__all__ = ["CELL", "TAIL", "Flow"]

CELL: Final = 8_000_000
"""Bytes of text that a cell gets while its ranks run."""
TAIL: Final = 16_000
"""About so many bytes of each rank's text it gets at the end, of what was left out till then."""
_WINDOW: Final = 3.0  # seconds over which jupyter_server takes the rate (rate_limit_window)
_IN_WINDOW: Final = 2_500_000  # bytes in that time; the server's limit is 3,000,000, of messages as they are packed


class Flow:
    """The text that one cell has got: when and how much.

    Parameters
    ----------
    clock : callable
        Seconds.

    Attributes
    ----------
    left : int
        Bytes until the cell is full.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.left = CELL
        self._clock = clock
        self._sent: deque[tuple[float, int]] = deque()
        self._in_window = 0

    @property
    def is_full(self) -> bool:
        """Whether the cell has got as much as one cell may."""
        return self.left <= 0

    @property
    def is_open(self) -> bool:
        """Whether more may go now."""
        until = self._clock() - _WINDOW
        while self._sent and self._sent[0][0] <= until:
            self._in_window -= self._sent.popleft()[1]
        return self._in_window < _IN_WINDOW

    def add(self, text: str) -> None:
        """Count what went to the cell."""
        size = len(text.encode("utf-8", "replace")) + text.count("\n") + 5 * text.count("\x1b")  # as json has them
        self.left -= size
        self._in_window += size
        self._sent.append((self._clock(), size))

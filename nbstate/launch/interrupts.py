"""What SIGINT does to the kernel's main thread while it waits for a launch.

The problem: Python raises KeyboardInterrupt between any two lines of the main thread. In the middle of our own code
that is a lock that stays taken, a port that nobody closes, a second thread that works on what the first has dropped.

What does not work: to catch it everywhere, or to block the signal (a process has threads enough that take it, and
Python raises in the main one all the same).

What does: while a launch is waited for, the signal's handler leaves a note and returns. The ranks are ended in order,
and then KeyboardInterrupt is raised, once, at a place of our choosing. Only the user's own code may still be torn:
where results are unpacked, ``run_torn`` lets the interrupt through.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["Interrupts", "run_torn"]

_let_through = False


class Interrupts:
    """``with Interrupts() as interrupts:`` on the main thread; elsewhere, and under a handler of the user's, nothing.

    Attributes
    ----------
    count : int
        How many there were.
    """

    def __init__(self) -> None:
        self.count = 0
        self._pass_on: Callable[[], None] | None = None
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread() and _is_replaceable(signal.getsignal(signal.SIGINT)):
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def pass_on(self, to: Callable[[], None]) -> None:
        """Call ``to`` for each interrupt from now on, and for those that have been."""
        self._pass_on = to
        for _ in range(self.count):
            to()

    def _note(self, number: int, frame: FrameType | None) -> None:
        global _let_through
        self.count += 1
        if _let_through:
            _let_through = False
            raise KeyboardInterrupt
        if self._pass_on is not None:
            self._pass_on()


def _is_replaceable(handler: Any) -> bool:
    """Python's own handler, or the one that ipykernel has while an async cell runs."""
    return handler is signal.default_int_handler or str(getattr(handler, "__module__", "")).startswith("ipykernel")


def run_torn(work: Callable[[], None]) -> bool:
    """Run the user's code: on the main thread an interrupt tears it. Returns whether it came to its end."""
    global _let_through
    if threading.current_thread() is not threading.main_thread():
        work()
        return True
    try:
        _let_through = True
        work()
        _let_through = False
    except KeyboardInterrupt:
        return False
    finally:
        _let_through = False
    return True

"""What the kernel sees of a rank from outside, as pure data: its process, what that has used, and its stack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Observed", "StackFrame"]


@dataclass(frozen=True)
class StackFrame:
    """One frame of a stack: the file and line as the code object has them, and the function."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Observed:
    """One rank at one moment, seen from outside.

    Attributes
    ----------
    rank : int
        Which one.
    process : {"running", "sleeping", "stopped", "gone", "unknown"}
        What its process does; ``"stopped"`` by a signal such as SIGSTOP.
    cpu_seconds : float
        CPU time that it has used so far; -1 if unknown.
    io_bytes : int
        Bytes that it has read and written so far; -1 if unknown.
    cpu_used, cpu_window : float
        CPU seconds that it has used, of so many that went by, up to now; -1 and 0 if it was looked at only once.
    stack : tuple of StackFrame
        Its main thread, innermost call first; empty if it was not taken.
    """

    rank: int
    process: Literal["running", "sleeping", "stopped", "gone", "unknown"] = "unknown"
    cpu_seconds: float = -1.0
    io_bytes: int = -1
    stack: tuple[StackFrame, ...] = ()
    cpu_used: float = -1.0
    cpu_window: float = 0.0

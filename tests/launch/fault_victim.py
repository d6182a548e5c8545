"""What the ranks of the fault matrix run: rank 1 comes to harm at a given moment, rank 0 is elsewhere by then.

Importable without pytest, so that a real kernel can use it, too.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

PHASES = ("start-up", "user code", "barrier", "tear-down")
GUILTY = 1


def strike(fault: str, folder: str) -> None:
    """Note the moment, then do what ``fault`` says."""
    note = Path(folder, "noting")
    note.write_text(str(time.monotonic()))
    note.rename(Path(folder, "struck"))  # so that whoever sees it sees all of it
    if fault == "raise":
        raise ValueError("boom")
    if fault == "sys.exit(3)":
        sys.exit(3)
    if fault == "os._exit(3)":
        os._exit(3)
    if fault == "hang":
        threading.Event().wait()
    os.kill(os.getpid(), signal.Signals[fault])


def struck_at(folder: str) -> float | None:
    """``time.monotonic()`` of the strike, in any process of this machine; None if it has not come yet."""
    note = Path(folder, "struck")
    return float(note.read_text()) if note.exists() else None


class StrikesOnArrival:
    """An argument that strikes while rank 1 unpickles it."""

    def __init__(self, fault: str, folder: str) -> None:
        self.fault, self.folder = fault, folder

    def __reduce__(self) -> Any:
        return _arrive, (self.fault, self.folder)


def _arrive(fault: str, folder: str) -> None:
    if _is_guilty():
        strike(fault, folder)


def _is_guilty() -> bool:
    return int(os.environ["RANK"]) == GUILTY


def victim(fault: str, phase: str, folder: str, _on_arrival: StrikesOnArrival | None = None) -> int:
    """The function of a launch. Returns the rank's number if nothing happens before the tear-down."""
    if phase == "start-up" and _is_guilty():  # under fork, where nothing is unpickled: the very first line
        strike(fault, folder)
    from nbstate import PartialState

    state = PartialState()
    if phase == "barrier":
        _into_the_barrier(state, fault, folder)
    elif phase == "user code":
        if _is_guilty():
            strike(fault, folder)
        threading.Event().wait()
    elif phase == "tear-down" and _is_guilty():
        atexit.register(strike, fault, folder)
    return int(state.process_index)


def _into_the_barrier(state: Any, fault: str, folder: str) -> None:
    """Rank 0 waits in a barrier that rank 1 never reaches."""
    entering = Path(folder, "entering")
    if not _is_guilty():
        entering.touch()
        state.wait_for_everyone()
    while not entering.exists():
        time.sleep(0.005)
    time.sleep(0.1)
    strike(fault, folder)


def arguments(start_method: str, fault: str, phase: str, folder: str) -> tuple[Any, ...]:
    """``args`` of the launch."""
    unpickled = phase == "start-up" and start_method != "fork"
    return fault, phase, folder, StrikesOnArrival(fault, folder) if unpickled else None

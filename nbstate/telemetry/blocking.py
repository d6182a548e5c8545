"""What holds a rank up in its own code, read from the innermost frames of its stack.

Python shows no frame for a call into C, so ``time.sleep``, a lock's ``acquire`` and a read of a file all end in the
user's own line. What passes through the standard library or torch on its way is told from there.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from nbstate.telemetry.observed import StackFrame
from nbstate.telemetry.source import is_user_file

__all__ = ["connects_to_the_store", "describe_stack", "own_frame"]

# The end of a frame's file name, and functions in it (none: any), to what it is that the frame waits for.
_HOLDUPS: Final[tuple[tuple[str, tuple[str, ...], str], ...]] = (
    ("torch/utils/data/dataloader.py", (), "the data loader"),
    ("nbstate/training/dataloader.py", (), "the data loader"),
    ("/threading.py", ("join", "_wait_for_tstate_lock"), "a thread"),
    ("/threading.py", (), "a lock"),
    ("/queue.py", (), "a queue"),
    ("/synchronize.py", (), "a lock"),
    ("/subprocess.py", (), "another process"),
    ("/popen_fork.py", (), "another process"),
    ("/connection.py", (), "another process"),
    ("/ssl.py", (), "the network"),
    ("/socket.py", (), "the network"),
    ("/http/client.py", (), "the network"),
    ("/selectors.py", (), "input or output"),
    ("/concurrent/futures/_base.py", (), "a future"),
    ("/filelock/_api.py", (), "a file lock"),
)
_STORE: Final = frozenset(
    {"_create_c10d_store", "next_prefix"}
)  # torch's function that connects, and launch/rendezvous.py's


def own_frame(stack: Sequence[StackFrame]) -> StackFrame | None:
    """The innermost frame that is the user's own, or None."""
    return next((frame for frame in stack if frame.line and is_user_file(frame.file)), None)


def describe_stack(stack: Sequence[StackFrame]) -> str:
    """What holds a sleeping rank up, to follow on "blocked": ``", waiting for a lock,"``; empty if that is not known.

    The outermost frame above the user's own line that is known speaks: a data loader waits in a queue, and it is the
    loader that the user asked.
    """
    above: list[StackFrame] = []
    for frame in stack:
        if frame.line and is_user_file(frame.file):
            break
        above.append(frame)
    for frame in reversed(above):
        name = frame.file.replace(os.sep, "/")
        for file, functions, what in _HOLDUPS:
            if name.endswith(file) and (not functions or frame.function in functions):
                return f", waiting for {what},"
    return ""


def connects_to_the_store(stack: Sequence[StackFrame]) -> bool:
    """Whether a rank is still on its way to the store that all ranks meet through."""
    return any(frame.function in _STORE for frame in stack)

"""A private directory for what must have a name in the file system for a moment, and the sweep of forgotten ones.

Its owner holds a lock on it, which the system lets go when the owner ends, however it ends. So whoever gets the lock of
another's directory knows that it is a leftover: a pid could be another process's by now, and says nothing across
containers that share a ``/tmp``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from typing import Final

__all__ = ["RunDirectory", "sweep"]

_PREFIX: Final = "nbstate-run-"
_YOUNG: Final = 10.0  # seconds in which a directory may not have its lock yet


class RunDirectory:
    """A directory with mode 0700 that is removed on request, or swept by a later kernel of the same user."""

    def __init__(self) -> None:
        sweep()
        self.path = tempfile.mkdtemp(prefix=_PREFIX)
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Remove it and all that is in it. Safe to call twice."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def sweep() -> None:
    """Remove this user's run directories whose owner is gone."""
    with os.scandir(tempfile.gettempdir()) as entries:
        found = [entry.path for entry in entries if entry.name.startswith(_PREFIX)]
    for path in found:
        with contextlib.suppress(OSError):
            _remove_if_left(path)


def _remove_if_left(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        about = os.fstat(fd)
        if about.st_uid != os.geteuid() or time.time() - about.st_mtime < _YOUNG:
            return
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(fd)

"""A private directory for what must have a name in the file system for a moment, and the sweep of forgotten ones.

Its owner holds a lock on it, which the system lets go when the owner ends, however it ends. So whoever gets the lock of
another's directory knows that it is a leftover: a pid could be another process's by now, and says nothing across
containers that share a ``/tmp``. A directory has its final name only once it is locked.
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
_UNLOCKED: Final = "nbstate-new-"
_OLD: Final = 10.0  # seconds after which one that has no lock will never get it


class RunDirectory:
    """A directory with mode 0700 that is removed on request, or swept by a later kernel of the same user.

    A process that its owner forks shares the lock: only when all of them have ended is the directory a leftover.
    """

    def __init__(self) -> None:
        new = tempfile.mkdtemp(prefix=_UNLOCKED)
        self._lock = os.open(new, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = os.path.join(os.path.dirname(new), _PREFIX + os.path.basename(new).removeprefix(_UNLOCKED))
        os.rename(new, self.path)

    def remove(self) -> None:
        """Remove it and all that is in it. Safe to call twice."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def sweep() -> None:
    """Remove this user's run directories whose owner is gone."""
    found: list[str] = []
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        found += [entry.path for entry in entries if entry.name.startswith((_PREFIX, _UNLOCKED))]
    for path in found:
        with contextlib.suppress(OSError):
            _remove_if_left(path)


def _remove_if_left(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        about = os.fstat(fd)
        may_be_locked_soon = os.path.basename(path).startswith(_UNLOCKED) and time.time() - about.st_mtime < _OLD
        if about.st_uid != os.geteuid() or may_be_locked_soon:
            return
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(fd)

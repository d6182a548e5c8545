"""A process dies with the one that made it, however that one ends.

On Linux the kernel itself sees to it: ``prctl(PR_SET_PDEATHSIG, SIGKILL)``. It needs no watching thread and works for a
rank that is stuck in C++. Two traps:

* The signal comes when the forking THREAD ends, not the process. So ranks are made by the supervisor thread, which
  outlives them, and the fork server by the kernel's main thread.
* If the parent died before the call, no signal comes. So the parent's pid is compared after the call.

Elsewhere a daemon thread compares the parent's pid twice a second.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

__all__ = ["die_with_parent", "forks_die_with_this_process"]

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None


def die_with_parent(parent: int | None = None) -> None:
    """Make this process end when its parent does.

    Parameters
    ----------
    parent : int, optional
        Pid that the parent must have; if it is another by now, the parent is gone and this process ends at once.
    """
    expected = os.getppid() if parent is None else parent
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(expected,), name="nbstate-lifeline", daemon=True).start()
    if os.getppid() != expected:
        os._exit(1)


def forks_die_with_this_process() -> None:
    """Make each process that the main thread of this one forks from now on die with it, such as a loader's workers.

    A loader's worker looks for its parent only every 5 s. Not so for what they fork in turn: whoever forks twice means
    to leave something behind.
    """
    here = os.getpid()
    forked_by_main = False

    def before() -> None:
        nonlocal forked_by_main
        forked_by_main = threading.current_thread() is threading.main_thread()

    def after() -> None:
        if forked_by_main and os.getppid() == here:
            die_with_parent(here)

    if _libc is not None:  # elsewhere each would need a thread
        os.register_at_fork(before=before, after_in_child=after)


def _watch(parent: int) -> None:  # pragma: no cover - not on Linux
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)

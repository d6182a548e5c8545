"""What a launch could leave behind: processes, threads, shared memory, open ports, temporary directories."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

Found = Mapping[str, set[object]]


class Remains:
    """What a process has come to hold since this object was made.

    Parameters
    ----------
    pid : int, optional
        The process; this one if left out.
    """

    def __init__(self, pid: int | None = None) -> None:
        self._pid = os.getpid() if pid is None else pid
        self._before = self._look()

    def left(self, within: float = 0.0) -> Found:
        """What is there now and was not before, by kind; empty if nothing is.

        Parameters
        ----------
        within : float
            Seconds that what is on its way out has to be gone.
        """
        deadline = time.monotonic() + within
        while True:
            now = self._look()
            extra = {kind: found - self._before[kind] for kind, found in now.items() if found - self._before[kind]}
            if not extra or time.monotonic() >= deadline:
                return extra
            time.sleep(0.01)

    def _look(self) -> Found:
        return {
            "process": _processes(self._pid),
            "thread": _threads() if self._pid == os.getpid() else set(),
            "shared memory": _shared_files(self._pid),
            "port": _ports(self._pid),
            "temporary directory": _temporary_directories(),
        }


def describe(left: Found) -> str:
    """``"nothing"``, or what and how many."""
    return ", ".join(f"{len(found)} x {kind}" for kind, found in left.items()) or "nothing"


def _processes(pid: int) -> set[object]:
    """Descendants that run, are stopped, or are zombies."""
    found = {child.pid for child in psutil.Process(pid).children(recursive=True)}
    return set(found - _helpers() if pid == os.getpid() else found)


def _helpers() -> set[int]:
    """Processes that are meant to stay: fork servers and resource trackers, of this process and only once."""
    pids: set[int] = set()
    for package in ("multiprocess", "multiprocessing"):
        server = sys.modules.get(f"{package}.forkserver")
        tracker = sys.modules.get(f"{package}.resource_tracker")
        if server is not None:
            pids.add(server._forkserver._forkserver_pid or 0)
        if tracker is not None:
            pids.add(tracker._resource_tracker._pid or 0)
    return pids


def _threads() -> set[object]:
    ours = ("nbstate-supervisor", "nbstate-settler")
    return {f"{thread.name}:{thread.ident}" for thread in threading.enumerate() if thread.name.startswith(ours)}


def _shared_files(pid: int) -> set[object]:
    # semaphores of other programs on this machine come and go; nbstate makes none
    place = Path("/dev/shm")
    found: set[object] = set()
    if place.is_dir():
        found |= {str(path) for path in place.iterdir() if not path.name.startswith("sem.")}
    # the board has no name, so it shows as an open descriptor only
    descriptors = Path(f"/proc/{pid}/fd")
    for fd in descriptors.iterdir() if descriptors.is_dir() else ():
        try:
            target = os.readlink(fd)
        except OSError:
            continue
        if "nbstate" in target and not target.endswith("/socket (deleted)"):  # the fork server's, and stays as it does
            found.add(f"{fd.name}:{target}")
    return found


def _ports(pid: int) -> set[object]:
    connections = psutil.Process(pid).net_connections(kind="inet")
    return {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}


def _temporary_directories() -> set[object]:
    return {str(path) for path in Path(tempfile.gettempdir()).glob("nbstate*")}

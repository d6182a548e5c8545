"""What every test shares: nothing may outlive it, and functions of test modules travel by value, as a notebook's do."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import psutil
import pytest
from real_kernel import RealKernel

START_METHODS = ("fork", "forkserver", "spawn")
_SETTLE = 5.0  # seconds that what is on its way out has to be gone


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        cloudpickle.register_pickle_by_value(module)


@pytest.fixture(params=START_METHODS)
def start_method(request: pytest.FixtureRequest) -> str:
    """Each of the ways in which a rank's process comes to be."""
    return str(request.param)


@pytest.fixture
def own_kernel() -> Iterator[RealKernel]:
    """A fresh Jupyter kernel in a process of its own, for a test that kills or changes it."""
    with RealKernel() as running:
        yield running


@pytest.fixture(scope="module")
def kernel() -> Iterator[RealKernel]:
    """A real Jupyter kernel that the tests of one module share, with nbstate imported and its helpers warm."""
    with RealKernel() as running:
        running.good(
            "import functools, os, sys, time\nimport torch, nbstate\n"
            "from nbstate import notebook_launcher, PartialState\n"
            "notebook_launcher(lambda: None, num_processes=1, start_method='forkserver', dashboard=False)"
        )
        yield running


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


def _processes() -> set[int]:
    """This process's descendants: running, stopped or zombie."""
    return {child.pid for child in psutil.Process().children(recursive=True)} - _helpers()


def _threads() -> set[str]:
    ours = ("nbstate-supervisor", "nbstate-settler")
    return {f"{thread.name}:{thread.ident}" for thread in threading.enumerate() if thread.name.startswith(ours)}


def _shared_files() -> set[str]:
    # semaphores of other programs on this machine come and go; nbstate makes none
    place = Path("/dev/shm")
    found = {str(path) for path in place.iterdir() if not path.name.startswith("sem.")} if place.is_dir() else set()
    # the board has no name, so it shows as an open descriptor only
    for fd in Path("/proc/self/fd").iterdir() if Path("/proc/self/fd").is_dir() else ():
        try:
            target = os.readlink(fd)
        except OSError:
            continue
        if "nbstate" in target:
            found.add(f"{fd.name}:{target}")
    return found


def _ports() -> set[int]:
    connections = psutil.Process().net_connections(kind="inet")
    return {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Fail a test that leaves a process, a supervisor thread, shared memory or an open port behind."""
    looks = {"process": _processes, "thread": _threads, "shared memory": _shared_files, "port": _ports}
    before = {name: look() for name, look in looks.items()}
    yield
    deadline = time.monotonic() + _SETTLE
    while True:
        left = {name: extra for name, look in looks.items() if (extra := look() - before[name])}
        if not left:
            return
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    for pid in left.get("process", ()):
        if psutil.pid_exists(int(pid)):
            psutil.Process(int(pid)).kill()
    pytest.fail(f"left behind: {left}")

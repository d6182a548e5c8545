"""What every test shares: nothing may outlive it, and functions of test modules travel by value, as a notebook's do."""

from __future__ import annotations

from collections.abc import Iterator

import cloudpickle
import psutil
import pytest
from real_kernel import RealKernel
from remains import Remains

START_METHODS = ("fork", "forkserver", "spawn")
_SETTLE = 5.0  # seconds that what is on its way out has to be gone
_TABLES = pytest.StashKey[dict[str, list[str]]]()


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


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[Remains]:
    """Fail a test that leaves a process, a supervisor thread, shared memory, an open port or a directory behind."""
    remains = Remains()
    yield remains
    left = remains.left(within=_SETTLE)
    for pid in left.get("process", ()):
        if psutil.pid_exists(int(str(pid))):
            psutil.Process(int(str(pid))).kill()
    if left:
        pytest.fail(f"left behind: {dict(left)}")


@pytest.fixture(scope="session")
def shown_at_the_end(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """Tables that the terminal summary prints: title to lines, to be filled by tests."""
    return request.config.stash.setdefault(_TABLES, {})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for title, lines in config.stash.get(_TABLES, {}).items():
        terminalreporter.section(title)
        for line in lines:
            terminalreporter.line(line)

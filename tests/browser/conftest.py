"""What browser tests share: one Chromium and one JupyterLab for all of them, and a look at what they leave behind.

The look of all other tests, before and after each, does not fit here: the server and Chromium start and end processes
of their own when they see fit. Here every process that was ever seen has to be gone at the end.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator

import psutil
import pytest
from playwright.sync_api import Browser, sync_playwright

from .lab import Lab, chromium

_MARK = "NBSTATE_BROWSER_TESTS"
_SETTLE = 5.0  # seconds that what is on its way out has to be gone


class Watch:
    """Every process that came from here: by descent, or, for orphans, by a mark in the environment."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(8)
        self._before = set(psutil.Process().children(recursive=True))
        self._seen: set[psutil.Process] = set()

    def look(self) -> set[psutil.Process]:
        """Note who is there, and return those of all who were ever noted that still are."""
        found = set(psutil.Process().children(recursive=True)) - self._before
        for process in psutil.process_iter():
            try:
                if process.environ().get(_MARK) == self.token:
                    found.add(process)
            except psutil.Error:
                continue
        self._seen |= found - {psutil.Process()}
        return {process for process in self._seen if process.is_running() and not _is_dead(process)}


def _is_dead(process: psutil.Process) -> bool:
    # An orphan is reaped by whoever adopts it, when it pleases them: a zombie of theirs is none of ours.
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE and process.ppid() != psutil.Process().pid)
    except psutil.NoSuchProcess:
        return True


@pytest.fixture(scope="package")
def watch() -> Iterator[Watch]:
    """Fail if a server, kernel, rank or browser outlives the last test of this folder."""
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch()
        patch.setenv(_MARK, watch.token)
        yield watch
    deadline = time.monotonic() + _SETTLE
    while (left := watch.look()) and time.monotonic() < deadline:
        time.sleep(0.05)
    shown = [f"{process.pid}: {' '.join(process.cmdline())[:200]}" for process in left]
    for process in left:
        process.kill()
    assert not shown, f"left behind: {shown}"


@pytest.fixture(autouse=True)
def nothing_left(watch: Watch) -> Iterator[None]:
    """Take the place of the look of all other tests."""
    yield
    watch.look()


@pytest.fixture(scope="package")
def browser(watch: Watch) -> Iterator[Browser]:
    """The one Chromium."""
    with sync_playwright() as playwright:
        running = chromium(playwright)
        yield running
        watch.look()
        running.close()


@pytest.fixture(scope="package")
def lab(watch: Watch, browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """The one JupyterLab."""
    with Lab(tmp_path_factory.mktemp("lab"), browser) as running:
        yield running
        watch.look()

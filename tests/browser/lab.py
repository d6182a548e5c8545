"""A real JupyterLab in a real Chromium, driven from a test.

The server gets a free port, a token, and directories of its own for settings, workspaces and runtime files, so that
nothing of the user's is read or written. Cells are run through JupyterLab's own commands (``expose_app_in_browser``),
not by clicking menus: what is tested is what a cell shows, not where Lab keeps its buttons.

::

    with Lab(tmp_path) as lab:
        notebook = lab.open(["import nbstate", "nbstate.notebook_launcher(train, num_processes=2)"])
        notebook.run(0)
        notebook.start(1)
        notebook.page.get_by_role("button", name="Stop").click()
        notebook.wait_idle()
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from playwright.sync_api import Browser, Page, Playwright, sync_playwright

__all__ = ["Lab", "Notebook", "chromium"]

# Headless on a machine without a GPU or a network.
_ARGUMENTS: Final = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_UP_WITHIN: Final = 90.0  # seconds: later than this means it hung


def chromium(playwright: Playwright) -> Browser:
    """Start Chromium: ``NBSTATE_CHROMIUM``, else the system's, else the one that playwright brought."""
    path = os.environ.get("NBSTATE_CHROMIUM", "/usr/bin/chromium")
    return playwright.chromium.launch(executable_path=path if os.path.exists(path) else None, args=list(_ARGUMENTS))


class Notebook:
    """One notebook, open in a page.

    Attributes
    ----------
    page : Page
        Playwright's page.
    complaints : list of str
        Errors of the page's console and scripts so far.
    path : Path
        The notebook's file.
    """

    def __init__(self, page: Page, path: Path) -> None:
        self.page = page
        self.path = path
        self.complaints: list[str] = []
        page.on("console", lambda message: message.type == "error" and self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def start(self, index: int) -> None:
        """Run a cell, and return at once."""
        self._do(
            """index => {
                const content = window.jupyterapp.shell.currentWidget.content;
                content.activeCellIndex = index;
                window.jupyterapp.commands.execute("notebook:run-cell");
            }""",
            index,
        )

    def run(self, index: int, within: float = 60.0) -> None:
        """Run a cell and wait for its end."""
        before = self._count(index)
        self.start(index)
        self.wait_done(index, before, within)

    def wait_done(self, index: int, before: int | None = None, within: float = 60.0) -> None:
        """Wait until a cell has an execution number, and another one than ``before``."""
        self._wait(
            """([index, before]) => {
                const count = window.jupyterapp.shell.currentWidget.content.widgets[index].model.executionCount;
                return count !== null && count !== before;
            }""",
            [index, before],
            within,
        )

    def wait_idle(self, within: float = 60.0) -> None:
        """Wait until the kernel has nothing to do."""
        self._wait(
            "() => window.jupyterapp.shell.currentWidget.sessionContext.kernelDisplayStatus === 'idle'", 0, within
        )

    def output(self, index: int) -> Any:
        """Playwright's locator of a cell's output area."""
        return self.page.locator(".jp-Notebook .jp-Cell").nth(index).locator(".jp-Cell-outputArea")

    def theme(self, name: str) -> None:
        """Change to ``"JupyterLab Light"`` or ``"JupyterLab Dark"``, and wait until it shows."""
        self._do("name => window.jupyterapp.commands.execute('apputils:change-theme', {theme: name})", name)
        light = "true" if "Light" in name else "false"
        self._wait("light => document.body.dataset.jpThemeLight === light", light, 20.0)
        self.page.wait_for_timeout(400)  # its style sheet arrives after the attribute

    def save(self) -> dict[str, Any]:
        """Save, and return the file's content."""
        self._do("() => window.jupyterapp.commands.execute('docmanager:save')", None)
        saved: dict[str, Any] = json.loads(self.path.read_text())
        return saved

    def shot(self, path: Path, index: int | None = None) -> Path:
        """Take a picture of the page, or of one cell's output."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if index is None:
            self.page.screenshot(path=path)
        else:
            self.output(index).screenshot(path=path)
        return path

    def _count(self, index: int) -> int | None:
        count: int | None = self.page.evaluate(
            "index => window.jupyterapp.shell.currentWidget.content.widgets[index].model.executionCount", index
        )
        return count

    def _do(self, script: str, argument: Any) -> None:
        self.page.evaluate(script, argument)

    def _wait(self, script: str, argument: Any, within: float) -> None:
        self.page.wait_for_function(script, arg=argument, timeout=within * 1000, polling=50)


class Lab:
    """A JupyterLab server and a browser, for as long as the ``with`` block lasts.

    Parameters
    ----------
    directory : Path
        An empty directory; notebooks, settings and the server's log go below it.
    environment : mapping of str to str, optional
        Added to the kernels' environment.
    size : tuple of int
        Width and height of the window, in pixels.
    """

    def __init__(
        self, directory: Path, environment: dict[str, str] | None = None, size: tuple[int, int] = (1400, 1000)
    ) -> None:
        self.directory = directory
        self.notebooks = directory / "notebooks"
        self.token = secrets.token_hex(16)
        self.size = size
        self._environment = environment or {}
        self._exit = contextlib.ExitStack()
        self._opened = 0

    def __enter__(self) -> Lab:
        with contextlib.ExitStack() as undo:
            self.notebooks.mkdir(parents=True, exist_ok=True)
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.port = probe.getsockname()[1]
            self._server = self._start_server()
            undo.callback(self._stop_server)
            self._wait_for_server()
            playwright = undo.enter_context(sync_playwright())
            self.browser = chromium(playwright)
            undo.callback(self.browser.close)
            self._exit = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.close()

    def open(self, cells: Sequence[str] | Path) -> Notebook:
        """Open a new notebook with these cells, or a copy of an existing one, and wait until its kernel is ready."""
        self._opened += 1
        path = self.notebooks / f"test_{self._opened}.ipynb"
        path.write_text(cells.read_text() if isinstance(cells, Path) else json.dumps(_notebook(cells)))
        page = self.browser.new_page(viewport={"width": self.size[0], "height": self.size[1]})
        notebook = Notebook(page, path)
        page.goto(f"http://127.0.0.1:{self.port}/lab/tree/{path.name}?token={self.token}&reset")
        page.wait_for_function(
            "() => window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel", timeout=_UP_WITHIN * 1000
        )
        notebook.wait_idle(_UP_WITHIN)
        return notebook

    def _start_server(self) -> subprocess.Popen[bytes]:
        private = {
            "JUPYTER_CONFIG_DIR": "config",
            "JUPYTER_DATA_DIR": "data",
            "JUPYTER_RUNTIME_DIR": "runtime",
            "JUPYTERLAB_SETTINGS_DIR": "settings",
            "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
            "IPYTHONDIR": "ipython",
        }
        environment = {**os.environ, **self._environment}
        environment.update({name: str(self.directory / folder) for name, folder in private.items()})
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1"]
        command += [
            f"--ServerApp.port={self.port}",
            "--ServerApp.port_retries=0",
            f"--IdentityProvider.token={self.token}",
        ]
        command += [f"--ServerApp.root_dir={self.notebooks}", "--LabApp.expose_app_in_browser=True"]
        quiet = self.directory / "settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings"
        quiet.parent.mkdir(parents=True)
        quiet.write_text('{"fetchNews": "false", "checkForUpdates": false}')
        with open(self.directory / "server.log", "wb") as log:
            # A session of its own, so that kernels go with it.
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def _wait_for_server(self) -> None:
        deadline = time.monotonic() + _UP_WITHIN
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/api/status", headers={"Authorization": f"token {self.token}"}
        )
        while time.monotonic() < deadline and self._server.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=5):
                return
            time.sleep(0.1)
        log = (self.directory / "server.log").read_text(errors="replace")
        raise RuntimeError(f"JupyterLab did not come up within {_UP_WITHIN:.0f} s:\n{log[-3000:]}")

    def _stop_server(self) -> None:
        self._server.terminate()  # it shuts its kernels down
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._server.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait(10)


def _notebook(cells: Sequence[str]) -> dict[str, Any]:
    return {
        "cells": [
            {
                "cell_type": "code",
                "id": f"cell{i}",
                "execution_count": None,
                "metadata": {},
                "outputs": [],
                "source": source,
            }
            for i, source in enumerate(cells)
        ],
        "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }

"""A real JupyterLab in a real Chromium, driven from a test.

The server gets a free port, a token, and directories of its own for settings, workspaces and runtime files, so that
nothing of the user's is read or written. Cells are run through JupyterLab's own commands (``expose_app_in_browser``),
not by clicking menus: what is tested is what a cell shows, not where Lab keeps its buttons.

::

    with Lab(tmp_path, browser) as lab:
        notebook = lab.open(["import nbstate"])
        notebook.run()
        notebook.put("nbstate.notebook_launcher(train, num_processes=2)")
        notebook.start()
        seconds = notebook.press("Stop")
        notebook.close()
"""

from __future__ import annotations

import base64
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
from typing import Any, Final, Literal

from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, Playwright

__all__ = ["SCREENSHOTS", "Lab", "Notebook", "chromium"]

SCREENSHOTS: Final = Path(__file__).parents[2] / "screenshots"  # git ignores it

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
_SETTINGS: Final = {
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}
_KERNEL: Final = "tested"
_CELL: Final = "window.jupyterapp.shell.currentWidget.content.widgets[index]"


def chromium(playwright: Playwright) -> Browser:
    """Start Chromium: ``NBSTATE_CHROMIUM``, else the system's, else the one that playwright brought."""
    path = os.environ.get("NBSTATE_CHROMIUM", "/usr/bin/chromium")
    return playwright.chromium.launch(executable_path=path if os.path.exists(path) else None, args=list(_ARGUMENTS))


class Notebook:
    """One notebook, open in a page. Cells are counted from 0.

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
        page.on("console", self._listen)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def put(self, source: str) -> None:
        """Let the notebook consist of this one cell. What the kernel knows stays."""
        self.page.evaluate(
            """source => {
                const shared = window.jupyterapp.shell.currentWidget.content.model.sharedModel;
                shared.transact(() => {
                    shared.deleteCellRange(0, shared.cells.length);
                    shared.insertCell(0, {cell_type: "code", source});
                });
            }""",
            source,
        )

    def start(self, index: int = 0) -> None:
        """Run a cell, and return at once."""
        self.page.evaluate(
            """index => {
                const content = window.jupyterapp.shell.currentWidget.content;
                content.activeCellIndex = index;
                window.jupyterapp.commands.execute("notebook:run-cell");
            }""",
            index,
        )

    def run(self, index: int = 0, within: float = 60.0) -> None:
        """Run a cell and wait for its end."""
        self.start(index)
        self.wait(index, within)

    def wait(self, index: int = 0, within: float = 60.0) -> None:
        """Wait until a cell that was started has ended."""
        script = f"index => {_CELL}.model.executionCount !== null && {_CELL}.model.executionState === 'idle'"
        self.page.wait_for_function(script, arg=index, timeout=within * 1000, polling=50)

    def busy(self, index: int = 0) -> bool:
        """Whether a cell still runs."""
        return bool(self.page.evaluate(f"index => {_CELL}.model.executionState === 'running'", index))

    def press(self, button: str, index: int = 0) -> float:
        """Click a button of the dashboard of a busy cell.

        Returns
        -------
        float
            Seconds from the click to the end of the cell, both by the page's clock.
        """
        self.page.evaluate(
            f"""index => {{
                const model = {_CELL}.model;
                document.addEventListener("click", () => {{ window.clicked = performance.now(); }},
                                          {{once: true, capture: true}});
                window.ended = new Promise((resolve, reject) => {{
                    setTimeout(() => reject(new Error("the cell has not ended within 30 s")), 30000);
                    model.stateChanged.connect(function look() {{
                        if (model.executionState !== "idle") return;
                        model.stateChanged.disconnect(look);
                        resolve(performance.now());
                    }});
                }});
            }}""",
            index,
        )
        self.page.get_by_role("button", name=button, exact=True).click()
        seconds: float = self.page.evaluate("async () => ((await window.ended) - window.clicked) / 1000")
        return seconds

    def show(self, index: int) -> None:
        """Scroll to a cell: those far from the visible part are not in the page at all."""
        self.page.evaluate(
            """async index => {
                const content = window.jupyterapp.shell.currentWidget.content;
                content.activeCellIndex = index;
                await content.scrollToItem(index, "start");
            }""",
            index,
        )

    def cell(self, index: int = 0) -> Locator:
        """A cell, if it is in the page."""
        return self.page.locator(f'.jp-Notebook .jp-Cell[data-windowed-list-index="{index}"]')

    def dashboard(self, index: int = 0) -> Locator:
        """The dashboard in a cell's output."""
        return self.cell(index).locator(".nbs")

    def picture(self, index: int = 0) -> Locator:
        """The picture that takes the dashboard's place when the launch has ended."""
        return self.cell(index).locator(".nbs-picture")

    def watch(self, index: int = 0) -> None:
        """From now on, keep what the dashboard of a cell shows, each time it changes; ``seen`` returns it."""
        self.page.evaluate(
            f"""index => {{
                const texts = (root, which) => [...root.querySelectorAll(which)].map((node) => node.textContent);
                window.seen = [];
                window.broken = [];
                window.watching?.disconnect();
                window.watching = new MutationObserver(() => {{
                    const cell = document.querySelector(`.jp-Cell[data-windowed-list-index="${{index}}"]`);
                    const said = cell?.querySelector(".jp-OutputArea")?.textContent ?? "";
                    if (/not found|error/i.test(said)) window.broken.push(said);
                    const root = cell?.querySelector(".nbs");
                    if (!root) return;
                    const now = {{
                        busy: {_CELL}.model.executionState === "running",
                        step: texts(root, "tbody .nbs-c-step"),
                        gradients: texts(root, "tbody .nbs-c-sync"),
                        count: texts(root, ".nbs-count strong").join(""),
                        barrier: texts(root, ".nbs-info").join(""),
                        verdict: texts(root, ".nbs-sentence").join(""),
                    }};
                    const last = window.seen.at(-1);
                    if (JSON.stringify(now) !== JSON.stringify(last)) window.seen.push(now);
                }});
                window.watching.observe(document.body, {{subtree: true, childList: true, characterData: true}});
            }}""",
            index,
        )

    def seen(self) -> list[dict[str, Any]]:
        """What ``watch`` has kept, oldest first: busy, step, gradients, count, barrier, verdict."""
        kept: list[dict[str, Any]] = self.page.evaluate("window.seen")
        return kept

    def broken(self) -> list[str]:
        """What the output of the watched cell said while an error or a lost widget was in it, however shortly."""
        kept: list[str] = self.page.evaluate("window.broken")
        return kept

    def wait_idle(self, within: float = 60.0) -> None:
        """Wait until the kernel has nothing to do."""
        script = "() => window.jupyterapp.shell.currentWidget.sessionContext.kernelDisplayStatus === 'idle'"
        self.page.wait_for_function(script, timeout=within * 1000, polling=50)

    def theme(self, name: str) -> None:
        """Change to ``"Light"`` or ``"Dark"``, and wait until it shows."""
        script = "name => window.jupyterapp.commands.execute('apputils:change-theme', {theme: name})"
        self.page.evaluate(script, f"JupyterLab {name}")
        light = "true" if name == "Light" else "false"
        self.page.wait_for_function("light => document.body.dataset.jpThemeLight === light", arg=light, timeout=20_000)
        self.page.wait_for_timeout(400)  # its style sheet arrives after the attribute

    def save(self) -> dict[str, Any]:
        """Save, and return the file's content."""
        self.page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
        saved: dict[str, Any] = json.loads(self.path.read_text())
        return saved

    def shot(self, name: str, index: int = 0, scale: int = 1) -> Path:
        """Photograph the dashboard in a cell, or its picture, with ``scale`` pixels where there is one."""
        path = SCREENSHOTS / f"{name}.png"
        path.parent.mkdir(exist_ok=True)
        dashboard = self.dashboard(index).or_(self.picture(index))
        dashboard.scroll_into_view_if_needed()
        if scale == 1:
            dashboard.screenshot(path=path)
            return path
        devtools = self.page.context.new_cdp_session(self.page)
        clip = {**(dashboard.bounding_box() or {}), "scale": scale}
        picture = devtools.send("Page.captureScreenshot", {"format": "png", "clip": clip})
        devtools.detach()
        path.write_bytes(base64.b64decode(picture["data"]))
        return path

    def reopen(self, path: Path | None = None) -> None:
        """End the kernel, close the document, and open it again, or another one, in the same page."""
        self.path = path or self.path
        self.page.evaluate(
            """async name => {
                const panel = window.jupyterapp.shell.currentWidget;
                await panel.sessionContext.shutdown();
                panel.dispose();
                const opened = await window.jupyterapp.commands.execute("docmanager:open", {path: name});
                await opened.context.ready;
                await opened.revealed;
            }""",
            self.path.name,
        )
        # Without a kernel yet; the page would otherwise be closed while one is on its way.
        self.page.wait_for_function(
            "() => window.jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel", timeout=_UP_WITHIN * 1000
        )

    def close(self) -> None:
        """End the kernel, and close the page."""
        self.page.evaluate("() => window.jupyterapp.shell.currentWidget?.sessionContext.shutdown()")
        self.page.close()

    def _listen(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.complaints.append(f"{message.text} ({message.location.get('url', '')})")


class Lab:
    """A JupyterLab or Notebook 7 server, for as long as the ``with`` block lasts.

    Parameters
    ----------
    directory : Path
        An empty directory; notebooks, settings and the server's log go below it.
    browser : Browser
        Where notebooks are opened.
    size : tuple of int
        Width and height of the window, in pixels.
    app : {"lab", "notebook"}
        Which of both front ends.
    packages : Path, optional
        A directory that comes first on the kernels' path, such as one with another ipykernel.
    """

    def __init__(
        self,
        directory: Path,
        browser: Browser,
        size: tuple[int, int] = (1400, 1000),
        app: Literal["lab", "notebook"] = "lab",
        packages: Path | None = None,
    ) -> None:
        self.directory = directory
        self._app = app
        self._packages = packages
        self.notebooks = directory / "notebooks"
        self.token = secrets.token_hex(16)
        self._browser = browser
        self._size = size
        self._exit = contextlib.ExitStack()
        self._opened = 0

    def __enter__(self) -> Lab:
        with contextlib.ExitStack() as undo:
            self.notebooks.mkdir(parents=True)
            self._describe_kernel()
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.port = probe.getsockname()[1]
            self._server = self._start_server()
            undo.callback(self._stop_server)
            # One context: what the first page has loaded, the next ones have in their cache.
            width, height = self._size
            self._context = self._browser.new_context(viewport={"width": width, "height": height})
            undo.callback(self._context.close)
            self._wait_for_server()
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
        page = self._context.new_page()
        notebook = Notebook(page, path)
        place = {"lab": "lab/tree", "notebook": "notebooks"}[self._app]
        page.goto(f"http://127.0.0.1:{self.port}/{place}/{path.name}?token={self.token}&reset")
        page.wait_for_function(
            "() => window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel", timeout=_UP_WITHIN * 1000
        )
        notebook.wait_idle(_UP_WITHIN)
        return notebook

    def _describe_kernel(self) -> None:
        """The kernel of our notebooks: this interpreter, with ``packages`` before everything else on its path."""
        path = os.pathsep.join(filter(None, [str(self._packages or ""), os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-Xfrozen_modules=off", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        described = {"argv": command, "display_name": "Tested", "language": "python", "metadata": {"debugger": False}}
        file = self.directory / "data/kernels" / _KERNEL / "kernel.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps({**described, "env": {"PYTHONPATH": path} if path else {}}))

    def _start_server(self) -> subprocess.Popen[bytes]:
        private = {
            "JUPYTER_CONFIG_DIR": "config",
            "JUPYTER_DATA_DIR": "data",
            "JUPYTER_RUNTIME_DIR": "runtime",
            "JUPYTERLAB_SETTINGS_DIR": "settings",
            "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
            "IPYTHONDIR": "ipython",
        }
        environment = {**os.environ, **{name: str(self.directory / folder) for name, folder in private.items()}}
        module = {"lab": "jupyterlab", "notebook": "notebook"}[self._app]
        command = [sys.executable, "-m", module, "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1"]
        command += [f"--ServerApp.port={self.port}", "--ServerApp.port_retries=0"]
        command += [f"--IdentityProvider.token={self.token}", f"--ServerApp.root_dir={self.notebooks}"]
        command += ["--LabApp.expose_app_in_browser=True", "--JupyterNotebookApp.expose_app_in_browser=True"]
        for name, values in _SETTINGS.items():
            file = self.directory / f"settings/{name}.jupyterlab-settings"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(values))
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
        "metadata": {"kernelspec": {"name": _KERNEL, "display_name": "Tested", "language": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }

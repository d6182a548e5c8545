"""What a launch needs to know of the notebook around it: is there one, its cells' names, and a way into one cell."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from types import FrameType
from typing import Any, Final, Protocol

from nbstate.launch.output import Rich

__all__ = [
    "Writer",
    "cell_names",
    "cell_writer",
    "current_cell",
    "goes_to_front_end",
    "in_kernel",
    "shell",
    "write_plain",
]


def shell() -> Any | None:
    """The running IPython shell, or None outside IPython."""
    module = sys.modules.get("IPython")
    return None if module is None else module.get_ipython()


def in_kernel() -> bool:
    """Whether this process is a Jupyter kernel."""
    return getattr(shell(), "kernel", None) is not None


def cell_names() -> dict[str, str]:
    """File names of the code objects of this notebook's cells, each with what the notebook calls it: ``"In[5]"``."""
    compiler = getattr(shell(), "compile", None)
    numbers = getattr(compiler, "_filename_map", None) or {}
    return {str(filename): f"In[{number}]" for filename, number in numbers.items()}


def current_cell() -> str:
    """``"In[5]"`` when called from cell 5, however deep; empty if no cell is among the callers.

    The shell's ``execution_count`` would not do: it is raised before the cell runs or after, by version.
    """
    cells = cell_names()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        shown = cells.get(frame.f_code.co_filename)
        if shown:
            return shown
        frame = frame.f_back
    return ""


class Writer(Protocol):
    """A way into a cell."""

    def __call__(self, stream: str, text: str) -> None:
        """Write text to ``stdout`` or ``stderr``."""

    def display(self, rich: Rich) -> None:
        """Show what a rank has displayed, under the rank's heading."""


def cell_writer() -> Writer:
    """A ``Writer`` whose text and displays go to the cell that runs NOW, from any thread, at any time.

    ipykernel sends what a thread prints to whichever cell was executed last. So in a kernel the messages are sent with
    the parent header of this cell. On the main thread of a blocking launch, and outside a kernel, ``write_plain`` is
    right, and honours whatever stands in ``sys.stdout`` and takes displays (``%%capture``, ``redirect_stdout``).
    """
    kernel = getattr(shell(), "kernel", None)
    return write_plain if kernel is None else _CellWriter(kernel)


def goes_to_front_end(writer: Writer) -> bool:
    """Whether what is written goes straight to a page: in a kernel, and nobody captures it on the way."""
    if isinstance(writer, _CellWriter):
        return True
    return in_kernel() and type(sys.stdout).__module__.startswith("ipykernel")


class _CellWriter:
    """Messages to one cell of a kernel."""

    def __init__(self, kernel: Any) -> None:
        self._parent = kernel.get_parent("shell")
        self._session, self._socket = kernel.session, kernel.iopub_socket
        self._ident = f"kernel.{kernel.ident}"
        self._lock = threading.Lock()

    def __call__(self, stream: str, text: str) -> None:
        self._send("stream", {"name": stream, "text": text})

    def display(self, rich: Rich) -> None:
        if rich.heading:
            self._send("display_data", _heading(rich.rank))
        self._send("update_display_data" if rich.update else "display_data", rich.content)

    def _send(self, kind: str, content: Mapping[str, Any]) -> None:
        topic = f"{self._ident}.{kind}".encode()
        with self._lock:
            self._session.send(self._socket, kind, content, parent=self._parent, ident=topic)


class _PlainWriter:
    """``sys.stdout``, ``sys.stderr`` and the shell's display publisher as they are at each moment."""

    def __call__(self, stream: str, text: str) -> None:
        target = sys.stderr if stream == "stderr" else sys.stdout
        target.write(text)
        target.flush()

    def display(self, rich: Rich) -> None:
        if not in_kernel():
            self("stdout", rich.text)
            return
        running = shell()
        assert running is not None
        publish = running.display_pub.publish
        if rich.heading:
            publish(**_heading(rich.rank))
        publish(**rich.content, update=rich.update)


write_plain: Final[Writer] = _PlainWriter()


def _heading(rank: int) -> dict[str, Any]:
    data = {"text/plain": f"rank {rank}", "text/html": f"<b>rank {rank}</b>"}
    return {"data": data, "metadata": {}, "transient": {}}

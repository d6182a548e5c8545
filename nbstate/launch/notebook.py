"""What a launch needs to know of the notebook around it: is there one, its cells' names, and a way into one cell."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["cell_names", "cell_writer", "current_cell", "in_kernel", "shell"]


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


Writer = Callable[[str, str], None]


def cell_writer() -> Writer:
    """A function ``write(stream, text)`` whose text goes to the cell that runs NOW, from any thread, at any time.

    ipykernel sends what a thread prints to whichever cell was executed last. So in a kernel the stream message is
    sent with the parent header of this cell. On the main thread of a blocking launch, and outside a kernel, a plain
    write to ``sys.stdout`` is right, and honours whatever stands there (``%%capture``, ``redirect_stdout``).
    """
    running = shell()
    kernel = getattr(running, "kernel", None)
    if kernel is None:
        return write_plain
    parent = kernel.get_parent("shell")
    session, socket = kernel.session, kernel.iopub_socket
    ident = f"kernel.{kernel.ident}.stream".encode()
    lock = threading.Lock()

    def write(stream: str, text: str) -> None:
        with lock:
            session.send(socket, "stream", {"name": stream, "text": text}, parent=parent, ident=ident)

    return write


def write_plain(stream: str, text: str) -> None:
    """Write to ``sys.stdout`` or ``sys.stderr`` as they are now."""
    target = sys.stderr if stream == "stderr" else sys.stdout
    target.write(text)
    target.flush()

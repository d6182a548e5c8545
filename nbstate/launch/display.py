"""display() in a rank: what IPython's formatters make of an object there is shown in the launch's own cell.

The problem: IPython displays through its shell, and a rank has none. Under fork the kernel's shell was copied, but its
publisher writes to a socket that is the kernel's; it is taken away. Under forkserver and spawn there never was one.
Without a shell ``display`` prints. A shell made up for the rank would not do: libraries ask ``get_ipython()`` whether
they may draw widgets and open comms, and must be told that they may not.

What does: ``display`` and its siblings get other code. Not other names: under fork the notebook's globals hold the
functions themselves, and so do libraries, so the functions stay and what they run is exchanged. IPython is imported by
none of this. If it comes later, the exchange is made when it comes.

Only a bundle of MIME types and data leaves the rank, as JSON text; the kernel never unpickles what was displayed. The
rank waits until the kernel has taken it (about 1 ms), so that it stands between the lines printed before and after.
"""

from __future__ import annotations

import base64
import builtins
import contextlib
import importlib.util
import io
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any, Final

__all__ = ["inherit_formatter", "install"]

_MODULE: Final = "IPython.core.display_functions"

Send = Callable[[str, bool], None]


class _Hook:
    """What the exchanged functions need to know; one per process."""

    def __init__(self) -> None:
        self.send: Send | None = None
        self.pid = 0
        self.scope = ""
        self.formatter: Any = None
        self.ids: set[str] = set()


_hook: Final = _Hook()


def install(send: Send, scope: str) -> None:
    """Let ``display`` in this rank show in the launch's cell.

    Parameters
    ----------
    send : callable
        ``send(content, update)``: takes the content of a ``display_data`` message as JSON to the kernel. Called in a
        thread of its own.
    scope : str
        Put before every display id that this rank makes, since all ranks show in one cell and may choose the same.
    """
    _hook.send, _hook.pid, _hook.scope = send, os.getpid(), scope
    builtins.display = _lazy_display  # type: ignore[attr-defined]  # as in a notebook: there without an import
    module = sys.modules.get(_MODULE)
    if module is not None:
        _exchange(module)
    else:
        sys.meta_path.insert(0, _ExchangeOnImport())


def inherit_formatter(formatter: Any) -> None:
    """Under fork: format as the kernel's shell does, with all that the notebook has registered there."""
    _hook.formatter = formatter


class _ExchangeOnImport:
    """An import hook that waits for IPython's display functions, and takes itself away when they come."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The usual spec, whose loader exchanges the functions once they are there."""
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_exchange(module: ModuleType) -> None:
                execute(module)
                _exchange(module)

            spec.loader.exec_module = execute_and_exchange  # type: ignore[method-assign]
        return spec


def _exchange(module: ModuleType) -> None:
    for name, replacement in _REPLACEMENTS.items():
        function = getattr(module, name, None)
        if isinstance(function, FunctionType) and not function.__closure__:
            function.__code__ = replacement.__code__
            function.__defaults__, function.__kwdefaults__ = None, None


# What follows runs with the globals of IPython's module, so each function imports what it needs.


def _display_code(*objects, **options):  # type: ignore[no-untyped-def]
    from nbstate.launch import display

    return display.show(*objects, **options)


def _publish_code(data, metadata=None, **options):  # type: ignore[no-untyped-def]
    from nbstate.launch import display

    display.publish(data, metadata or {}, options.get("transient") or {}, bool(options.get("update")))


def _clear_code(wait=False):  # type: ignore[no-untyped-def]
    """Nothing: the cell is every rank's, and holds the dashboard."""


_REPLACEMENTS: Final = {
    "display": _display_code,
    "publish_display_data": _publish_code,
    "clear_output": _clear_code,
}


def _lazy_display(*objects: Any, **options: Any) -> Any:
    """The ``display`` of a notebook, for a rank that has not imported it."""
    from IPython.core.display_functions import display

    return display(*objects, **options)


def show(
    *objects: Any,
    include: Any = None,
    exclude: Any = None,
    metadata: dict[str, Any] | None = None,
    transient: dict[str, Any] | None = None,
    display_id: str | bool | None = None,
    raw: bool = False,
    update: bool = False,
    **_: Any,
) -> Any:
    """Display objects as IPython's ``display`` does; its arguments mean what they mean there. ``clear`` is ignored."""
    from IPython.core.display_functions import DisplayHandle

    handle = None
    carried = dict(transient or {})
    if display_id:
        handle = DisplayHandle(None if display_id is True else display_id)
        carried["display_id"] = handle.display_id
    if update and "display_id" not in carried:
        raise TypeError("display_id required for update_display")
    if not objects and handle is not None:
        publish({}, metadata or {}, carried, update)
    for one in objects:
        if raw:
            publish(one, metadata or {}, carried, update)
            continue
        data, described = _formatter().format(one, include=include, exclude=exclude)
        if data:  # an object with _ipython_display_ has displayed itself
            publish(data, _merged(described, metadata or {}), carried, update)
    return handle


def publish(data: dict[str, Any], metadata: dict[str, Any], transient: dict[str, Any], update: bool) -> None:
    """Send one MIME bundle to the launch's cell. In a process that the rank has forked: print its plain text."""
    if not isinstance(data, dict) or not isinstance(metadata, dict):
        raise TypeError(f"data and metadata of a display must be dicts, not {type(data).__name__}, {type(metadata)}")
    if _hook.send is None or _hook.pid != os.getpid():
        print(data.get("text/plain", ""))
        return
    carried = dict(transient)
    chosen = carried.get("display_id")
    if chosen is not None:
        if not update:
            _hook.ids.add(chosen)
        if chosen in _hook.ids:  # else it is the notebook's own: a handle that was made in the kernel
            carried["display_id"] = f"{_hook.scope}{chosen}"
    content = json.dumps({"data": data, "metadata": metadata, "transient": carried}, default=_plain)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # An interrupt is raised on the main thread and could tear a message in the middle; a thread's is sent whole.
    sender = threading.Thread(target=_hook.send, args=(content, update), name="nbstate-display", daemon=True)
    sender.start()
    sender.join()


def _merged(described: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Metadata of the object and of the caller, whose word counts more."""
    merged = dict(described)
    for name, value in given.items():
        both = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = _merged(merged[name], value) if both else value
    return merged


def _plain(value: Any) -> Any:
    """What JSON has no word for: bytes as base64, as Jupyter has images; numbers of numpy; the rest as text."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return base64.b64encode(value).decode("ascii")
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "size", 0) == 1:
        return item()
    return str(value)


def _formatter() -> Any:
    if _hook.formatter is None:
        from IPython.core.formatters import DisplayFormatter

        _hook.formatter = DisplayFormatter()
    _learn_figures(_hook.formatter.formatters)
    return _hook.formatter


def _learn_figures(formatters: Mapping[str, Any]) -> None:
    """Let figures of matplotlib be pictures; a kernel learns it when pyplot is first imported there."""
    for kind in ("image/png", "image/svg+xml", "image/jpeg", "application/pdf"):
        with contextlib.suppress(KeyError):
            formatters[kind].lookup_by_type("matplotlib.figure.Figure")
            return
    formatters["image/png"].for_type_by_name("matplotlib.figure", "Figure", _figure_as_png)


def _figure_as_png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", bbox_inches="tight")
    return buffer.getvalue()

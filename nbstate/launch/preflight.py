"""May this kernel fork? And if so, which start method does a launch take?

A fork copies one thread of a process and all its memory. What the other threads were doing at that moment, a lock
they held, a device context they had opened, is copied half-done. So:

* an accelerator that was touched here can never be used in a fork ("Cannot re-initialize CUDA");
* a Python thread of the user's that may be computing makes every fork a gamble (12 of 12 hung when measured).

Threads that belong to the kernel and to its libraries wait most of the time and are copied safely; a libgomp pool
that the main thread has started is avoided by forking from a fresh thread (see ``supervisor``).

With the extension loaded, a reason names the cell or the import that it goes back to (see ``witness``).
"""

from __future__ import annotations

import queue
import selectors
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import thread as executor
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

from nbstate.errors import ForkUnsafeError, ShippingError
from nbstate.launch import witness
from nbstate.launch.engines.local import available_start_methods
from nbstate.launch.notebook import cell_names
from nbstate.launch.plan import Payload
from nbstate.launch.shipping import pack

__all__ = ["Choice", "busy_threads", "choose_start_method", "first_choice", "why_not_fork"]

_HARMLESS_MODULES: Final = ("ipykernel", "IPython", "zmq", "tornado", "nbstate")
_WAITING_IN: Final = tuple(
    module.__file__ for module in (threading, queue, selectors, socket, socketserver, subprocess) if module.__file__
)
_EXECUTOR_WAITS: Final = executor._worker.__code__
_CALLS_THE_TARGET: Final = threading.Thread.run.__code__


@dataclass(frozen=True)
class Choice:
    """What ``choose_start_method`` decided: the method, what travels (None: nothing, under fork), and why."""

    start_method: str
    payload: Payload | None
    note: str = ""


def why_not_fork() -> tuple[str, ...]:
    """Reasons why a fork of this process is unsafe; empty if none is known."""
    reasons = []
    if "fork" not in available_start_methods():
        return (f"this system ({sys.platform}) has no fork",)
    for kind in witness.kinds_in_use():
        origin = witness.origin(kind)
        by = f", {origin}" if origin else ""
        reasons.append(f"{kind} was already used in this process{by}, and no fork of it can use {kind} again")
    reasons += [f"{text} may be computing at the moment of the fork" for text in busy_threads()]
    return tuple(reasons)


def busy_threads() -> tuple[str, ...]:
    """The Python threads that may be computing, each with the cell it comes from where that is known."""
    return tuple(_described(thread) for thread in _busy_looking_threads())


def _described(thread: threading.Thread) -> str:
    cells = cell_names()
    frame = sys._current_frames().get(thread.ident or 0) if cells else None
    while frame is not None:
        cell = cells.get(frame.f_code.co_filename)
        if cell:
            return f"thread {thread.name!r} (now at {cell}, line {frame.f_lineno})"
        frame = frame.f_back
    started = witness.started_in(thread)
    return f"thread {thread.name!r}" + (f" (started in {started})" if started else "")


def _busy_looking_threads() -> list[threading.Thread]:
    """Python threads that neither wait nor belong to the kernel and its libraries."""
    frames = sys._current_frames()
    here = (threading.current_thread(), threading.main_thread())
    return [
        thread
        for thread in threading.enumerate()
        if thread not in here and not _is_the_kernels(thread) and not _waits(frames.get(thread.ident or 0))
    ]


def _waits(frame: FrameType | None) -> bool:
    """Whether a thread's innermost line is one of the standard library's waits.

    A thread that is in C shows the line of Python that called it: its target, if that is a C function, was called by
    ``Thread.run``, which itself never waits. An idle thread of an executor waits in ``_worker``.
    """
    if frame is None or frame.f_code is _EXECUTOR_WAITS:
        return True
    return frame.f_code.co_filename in _WAITING_IN and frame.f_code is not _CALLS_THE_TARGET


def _is_the_kernels(thread: threading.Thread) -> bool:
    target = getattr(thread, "_target", None)
    owner = getattr(target, "__self__", None)
    modules = {type(thread).__module__, getattr(target, "__module__", None), owner and type(owner).__module__}
    named = [module.split(".")[0] for module in modules if module and module != "threading"]
    return bool(named) and all(name in _HARMLESS_MODULES for name in named)


def first_choice() -> str:
    """What ``auto`` takes for a call that can travel."""
    return "forkserver" if "forkserver" in available_start_methods() else "spawn"


def choose_start_method(
    asked: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Choice:
    """Settle the start method, and pack what has to travel.

    ``auto`` takes forkserver, whose ranks come from a clean process; fork if the call cannot travel and this kernel can
    fork safely; spawn where there is neither. A large call stays with forkserver: its tensors are shared anyway, and a
    fork, which would share the rest too, is the riskier start. The note names what else makes the call large.

    Raises
    ------
    ShippingError
        The call cannot travel, and a fork is not possible or was not asked for.
    ForkUnsafeError
        ``fork`` was asked for and is unsafe here.
    """
    if asked == "fork":
        reasons = why_not_fork()
        if reasons:
            raise ForkUnsafeError(
                f"start_method='fork' would not be safe: {'; '.join(reasons)}. "
                "start_method='auto' or 'forkserver' works: its ranks come from a clean process"
            )
        return Choice("fork", None)
    if asked != "auto":
        _refuse_missing(asked)
        payload = pack(function, args, kwargs)
        return Choice(asked, payload, payload.warning)
    first = first_choice()
    try:
        payload = pack(function, args, kwargs)
    except ShippingError as error:
        reasons = why_not_fork()
        if reasons:
            raise ShippingError(f"{error} A fork would carry it, but is not safe: {'; '.join(reasons)}.") from error
        return Choice("fork", None, f"start method fork, since {str(error).split(' cannot travel')[0]} cannot travel")
    return Choice(first, payload, payload.warning)


def _refuse_missing(asked: str) -> None:
    available = available_start_methods()
    if asked not in available:
        raise ForkUnsafeError(f"start_method={asked!r}: this system has {', '.join(available)} only")

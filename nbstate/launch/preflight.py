"""May this kernel fork? And if so, which start method does a launch take?

A fork copies one thread of a process and all its memory. What the other threads were doing at that moment, a lock
they held, a device context they had opened, is copied half-done. So:

* an accelerator that was touched here can never be used in a fork ("Cannot re-initialize CUDA");
* a Python thread of the user's that may be computing makes every fork a gamble (12 of 12 hung when measured).

Threads that belong to the kernel and to its libraries wait most of the time and are copied safely; a libgomp pool
that the main thread has started is avoided by forking from a fresh thread (see ``supervisor``).
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
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

import torch

from nbstate.errors import ForkUnsafeError, ShippingError
from nbstate.launch.engines.local import available_start_methods
from nbstate.launch.plan import Payload
from nbstate.launch.shipping import LARGE_PAYLOAD, pack

__all__ = ["Choice", "choose_start_method", "why_not_fork"]

_ACCELERATORS: Final = ("cuda", "xpu", "npu", "mlu", "musa", "hpu")
_HARMLESS_MODULES: Final = ("ipykernel", "IPython", "zmq", "tornado", "nbstate")
_WAITING_IN: Final = tuple(
    module.__file__ for module in (threading, queue, selectors, socket, socketserver, subprocess) if module.__file__
)


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
    for name in _ACCELERATORS:
        module = getattr(torch, name, None)
        if module is not None and getattr(module, "is_initialized", lambda: False)():
            reasons.append(f"{name} was already used in this process, and no fork of it can use {name} again")
    reasons += [
        f"thread {thread.name!r} may be computing at the moment of the fork" for thread in _busy_looking_threads()
    ]
    return tuple(reasons)


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
    """Whether a thread's innermost line is one of the standard library's waits."""
    return frame is None or frame.f_code.co_filename in _WAITING_IN


def _is_the_kernels(thread: threading.Thread) -> bool:
    target = getattr(thread, "_target", None)
    owner = getattr(target, "__self__", None)
    modules = {type(thread).__module__, getattr(target, "__module__", None), owner and type(owner).__module__}
    named = [module.split(".")[0] for module in modules if module and module != "threading"]
    return bool(named) and all(name in _HARMLESS_MODULES for name in named)


def choose_start_method(
    asked: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Choice:
    """Settle the start method, and pack what has to travel.

    ``auto`` takes forkserver, whose ranks come from a clean process; fork if the call cannot travel or is larger than
    64 MB and this kernel can fork safely; spawn where there is neither.

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
        return Choice(asked, pack(function, args, kwargs))
    first = "forkserver" if "forkserver" in available_start_methods() else "spawn"
    try:
        payload = pack(function, args, kwargs)
    except ShippingError as error:
        reasons = why_not_fork()
        if reasons:
            raise ShippingError(f"{error} A fork would carry it, but is not safe: {'; '.join(reasons)}.") from error
        return Choice("fork", None, f"start method fork, since {str(error).split(' cannot travel')[0]} cannot travel")
    size = len(payload.data)
    if size > LARGE_PAYLOAD and not why_not_fork():
        return Choice("fork", None, f"start method fork, since the call carries {size / 2**20:.0f} MB")
    return Choice(first, payload)


def _refuse_missing(asked: str) -> None:
    available = available_start_methods()
    if asked not in available:
        raise ForkUnsafeError(f"start_method={asked!r}: this system has {', '.join(available)} only")

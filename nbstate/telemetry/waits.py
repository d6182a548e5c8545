"""The wait for a handle seen by the probe.

The class of all handles, ``dist.Work``, is given other methods, so that handles stay what torch made of them: a proxy
in their place would have to pass for one in C++ as well. Inside a collective these methods only pass on; that is where
torch's own waits are, those of a collective without ``async_op`` among them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from nbstate.telemetry import probe

__all__ = ["install"]


def install() -> Callable[[], None]:
    """Put the methods in place. Returns what puts the bare ones back."""
    methods = {"wait": _wrap_wait, "is_completed": _wrap_is_completed, "get_future": _wrap_get_future}
    bare = {name: getattr(dist.Work, name) for name in methods}
    wrappers = {name: make(bare[name]) for name, make in methods.items()}
    for name, wrapper in wrappers.items():
        setattr(dist.Work, name, wrapper)

    def undo() -> None:
        for name, wrapper in wrappers.items():
            if getattr(dist.Work, name) is wrapper:
                setattr(dist.Work, name, bare[name])

    return undo


def _wrap_wait(bare: Callable[..., Any]) -> Callable[..., Any]:
    enter_wait, leave, forget = probe.enter_wait, probe.leave, probe.forget
    compiling = torch.compiler.is_dynamo_compiling
    no_timeout = object()  # torch's own default is its own affair

    @functools.wraps(bare)
    def wait(self: Any, timeout: Any = no_timeout) -> Any:
        if compiling() or not enter_wait(self):
            return bare(self) if timeout is no_timeout else bare(self, timeout)
        try:
            result = bare(self) if timeout is no_timeout else bare(self, timeout)
        except BaseException:
            leave(False)
            raise
        leave()
        forget(self)
        return result

    return wait


def _wrap_is_completed(bare: Callable[..., Any]) -> Callable[..., Any]:
    """Who is told that the operation is over need not wait for it."""

    @functools.wraps(bare)
    def is_completed(self: Any) -> Any:
        done = bare(self)
        if done:
            probe.forget(self)
        return done

    return is_completed


def _wrap_get_future(bare: Callable[..., Any]) -> Callable[..., Any]:
    """Who takes the future will wait for that, if at all, and not for the handle."""

    @functools.wraps(bare)
    def get_future(self: Any) -> Any:
        probe.forget(self)
        return bare(self)

    return get_future

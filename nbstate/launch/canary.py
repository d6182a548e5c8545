"""A canary: one forked child that shows, within a deadline, whether a fork of this kernel works.

Every other check infers. A lock that some library holds, or a thread pool that is gone, shows only in a child. So fork
one the way ranks are forked, from a fresh thread, let it do what ranks do first, which is where bad forks hang (print,
compute on several threads, ask for the device), and kill it at the deadline. It has its own pipe, for the kernel's
``sys.stdout`` belongs to a thread that is not there, and leaves with ``os._exit``: with anything else IPython would go
on in it as a second kernel.

A child that comes through is no proof for a kernel with a busy thread: that one may hold its lock at the next fork.
"""

from __future__ import annotations

import gc
import io
import os
import select
import signal
import sys
import threading
import time
import warnings
from dataclasses import dataclass
from typing import Final, NoReturn

import torch

from nbstate.launch.engines.local import available_start_methods
from nbstate.launch.lifeline import die_with_parent
from nbstate.state import DEVICE_KINDS

__all__ = ["Canary", "send_canary"]

_DONE: Final = "done"
_SPOILT: Final = "spoilt:"
_STEPS: Final = ("print", "compute", "ask for the devices")
_ENOUGH_FOR_MANY_THREADS: Final = 1 << 20


@dataclass(frozen=True)
class Canary:
    """What became of the forked child.

    Attributes
    ----------
    alive : bool
        Whether it did all it had to do.
    text : str
        What happened, in a few words.
    seconds : float
        From the fork to the child's end.
    """

    alive: bool
    text: str
    seconds: float = 0.0


def send_canary(deadline: float = 5.0) -> Canary:
    """Fork a child of this process, and see whether it can print and compute.

    Parameters
    ----------
    deadline : float
        Seconds that the child may take; then it is killed.

    Returns
    -------
    Canary
        Whether it came through. The child is gone in any case.

    Examples
    --------
    >>> send_canary().alive
    True
    """
    if "fork" not in available_start_methods():
        return Canary(False, f"not sent: this system ({sys.platform}) has no fork")
    found: list[Canary] = []

    def fork() -> None:
        found.append(_fork_and_watch(deadline))

    thread = threading.Thread(target=fork, name="nbstate-canary", daemon=True)
    thread.start()
    thread.join()
    return found[0] if found else Canary(False, "the fork itself failed")


def _fork_and_watch(deadline: float) -> Canary:
    # an interrupt of the kernel reaches its whole group; it must not end the child half-way and look like a bad fork
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    read, write = os.pipe()
    parent, began = os.getpid(), time.monotonic()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: "multi-threaded, fork may deadlock"
            pid = os.fork()
    except OSError as error:
        os.close(read)
        os.close(write)
        return Canary(False, f"the fork itself failed: {error}")
    if pid == 0:
        _be_the_canary(parent, write)
    os.close(write)
    said, ended = _read(read, began + deadline)
    os.close(read)
    if not ended:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return _judge(said, ended, code, time.monotonic() - began)


def _read(fd: int, until: float) -> tuple[str, bool]:
    """What the child says, and whether it ended by itself: only its end closes the pipe."""
    said = b""
    while (left := until - time.monotonic()) > 0:
        if select.select([fd], [], [], left)[0]:
            piece = os.read(fd, 1 << 16)
            if not piece:
                return said.decode(errors="replace"), True
            said += piece
    return said.decode(errors="replace"), False


def _judge(said: str, ended: bool, code: int, seconds: float) -> Canary:
    lines = said.split()
    if not ended:
        stuck = _STEPS[min(len(lines), len(_STEPS) - 1)]
        return Canary(
            False, f"a forked child hung when it was to {stuck}, and was killed after {seconds:.1f} s", seconds
        )
    spoilt = [line.removeprefix(_SPOILT) for line in lines if line.startswith(_SPOILT)]
    if spoilt:
        return Canary(False, f"in a forked child torch refuses to use {', '.join(spoilt)}", seconds)
    if code != 0 or _DONE not in lines:
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return Canary(False, f"a forked child {how}", seconds)
    return Canary(True, f"a forked child printed and computed, and was gone after {1000 * seconds:.0f} ms", seconds)


def _be_the_canary(parent: int, pipe: int) -> NoReturn:
    code = 1
    try:
        gc.disable()  # a finalizer of the kernel's would act on the kernel's things
        die_with_parent(parent)
        os.dup2(pipe, 1)
        os.dup2(pipe, 2)
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
        print("printed")
        a = torch.ones(64, 64)
        assert float((a @ a).sum()) == 64.0**3
        assert float(torch.ones(_ENOUGH_FOR_MANY_THREADS).sum()) == _ENOUGH_FOR_MANY_THREADS
        print("computed")
        for name in DEVICE_KINDS:
            if getattr(vars(torch).get(name), "_is_in_bad_fork", bool)():
                print(f"{_SPOILT}{name}")
        print(_DONE)
        code = 0
    finally:
        os._exit(code)

"""A rank's first and last lines.

The problem: a rank begins as a copy of another process. Under fork that is the kernel, with its 70 descriptors, its
``sys.stdout`` that talks to a socket through a thread that does not exist here, its signal handlers and atexit
callbacks, and a libgomp pool whose threads are gone. Under forkserver and spawn it is a clean process, but with the
environment, directory and path of another moment.

What does not work: to print through the inherited ``sys.stdout`` (136 of 150 children hung), to leave with
``SystemExit`` (IPython swallows it and the child becomes a second kernel), to run inherited atexit callbacks.

What does, in this order:

1. ``lifeline``: the rank dies with its parent (in ``bootstrap``, before torch is even imported);
2. own pipes on descriptors 1 and 2, the null device on 0 and on every inherited socket and pipe, new ``sys.stdout``
   and ``sys.stderr``;
3. signals as a fresh process has them; SIGINT becomes one KeyboardInterrupt, not a storm. Until here it was blocked.
   From here on the rank answers when it is asked for its stacks (see ``dumps``);
4. environment, directory, path and torch threads as the kernel had them at the launch;
5. the board, the probe, fresh singletons, and on rank 0 the store where ranks find each other;
6. the function, unpacked and called;
7. its result or error on the control channel, and ``os._exit``, always.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import io
import logging
import os
import signal
import socket
import stat
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

import torch
import torch.distributed as dist

from nbstate.launch import display, rendezvous, scratch
from nbstate.launch.dumps import answer_with
from nbstate.launch.lifeline import forks_die_with_this_process
from nbstate.launch.messages import Error, Interrupted, Message, Outbox, Result, Unsendable
from nbstate.launch.output import flush_c_streams
from nbstate.launch.plan import RankPlan
from nbstate.launch.report import describe
from nbstate.launch.shipping import pack_result, unpack
from nbstate.state import reset_inherited
from nbstate.telemetry import collectives, probe
from nbstate.telemetry.board import Board, Phase

__all__ = ["live"]

_INTERRUPT_AGAIN_AFTER: Final = 1.0  # seconds in which a second SIGINT is taken for an echo of the first
_SOON: Final = 1.0  # seconds that a rank gives the others to be done, before it closes its connections


# Kept, since to free what was inherited would copy every page that it lies on.
_inherited_finalizers: object = None


def live(plan: RankPlan) -> NoReturn:
    """Be a rank, from the first line to the last. Never returns."""
    code = 1
    control = -1
    try:
        control = _own_descriptors(plan)
        code = _live(plan, control)
    except KeyboardInterrupt:  # between two lines of our own, before the function or after it
        with contextlib.suppress(BaseException):
            Outbox(control).say(Interrupted())
    except BaseException as error:
        # Only our own code can fail here. Say so on the channel if it still stands.
        with contextlib.suppress(BaseException):
            Outbox(control).say(Error(describe(error)))
    finally:
        os._exit(code)


def _live(plan: RankPlan, control: int) -> int:
    with contextlib.suppress(OSError):  # another session's group cannot be joined
        os.setpgid(0, plan.group)
    _fresh_signals()
    answer_with(plan.dump.fd)
    _settle(plan)
    slot = Board.attach(plan.board.fd, plan.world_size).slot(plan.rank)
    slot.write(pid=os.getpid())
    probe.attach(slot)
    probe.phase(Phase.STARTING)
    rendezvous.join(plan.rank, plan.world_size, plan.listener.fd if plan.listener else None)
    collectives.install()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    outbox = Outbox(control)
    display.install(outbox.show, f"nbstate-{plan.env['NBSTATE_LAUNCH']}-{plan.rank}-")
    message = _run(plan)
    return _leave(message, outbox, control)


def _own_descriptors(plan: RankPlan) -> int:
    control = plan.control.fd
    keep = {control, plan.board.fd, plan.dump.fd}
    if plan.listener:
        keep.add(plan.listener.fd)
    os.dup2(plan.stdout.fd, 1)
    os.dup2(plan.stderr.fd, 2)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    if plan.forked_from_kernel:
        _blank_all_but(keep)
        _forget_the_kernel()
        _forget_helpers("multiprocessing")
    else:
        for fd in (plan.stdout.fd, plan.stderr.fd, null):
            if fd > 2:
                os.close(fd)
    _forget_helpers("multiprocess")
    sys.stdin = io.TextIOWrapper(io.FileIO(0, "r", closefd=False))
    for fd, name in ((1, "stdout"), (2, "stderr")):
        _replace_stream(fd, name)
    return control


def _replace_stream(fd: int, name: str) -> None:
    """Put a new stream where the old one stood, in ``sys`` and in every log handler that was made before."""
    stream = io.TextIOWrapper(
        io.FileIO(fd, "w", closefd=False), encoding="utf-8", errors="backslashreplace", write_through=True
    )
    old = {id(getattr(sys, name)), id(getattr(sys, f"__{name}__"))}
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)
    for reference in logging._handlerList:  # type: ignore[attr-defined]
        handler = reference()
        if isinstance(handler, logging.StreamHandler) and id(handler.stream) in old:
            handler.stream = stream


def _blank_all_but(keep: set[int]) -> None:
    """Put the null device on every inherited socket, pipe and event descriptor, which closes what was there.

    To close them would free their numbers for this rank's own sockets, and objects that came with the fork still own
    the numbers: a log handler that is closed at the end would close a connection of gloo's. Files and devices stay: a
    file that the notebook opened works in the rank as well.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"):
        fd = int(name)
        if fd <= 2 or fd == null or fd in keep:
            continue
        with contextlib.suppress(OSError):  # the listing's own
            kind = stat.S_IFMT(os.fstat(fd).st_mode)
            if kind not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFCHR, stat.S_IFBLK):
                os.dup2(null, fd, inheritable=False)
    os.close(null)


def _forget_the_kernel() -> None:
    """Undo what a fork copied from the kernel and must not be used here."""
    gc.freeze()  # nothing of the kernel's is ever collected here: its finalizers would act on the kernel's things
    gc.enable()  # the engine has disabled it for the fork
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    if "IPython" in sys.modules:
        from IPython.core.interactiveshell import InteractiveShell

        # Its display publisher would write to the kernel's socket; see ``display`` for what takes its place.
        if InteractiveShell.initialized():
            display.inherit_formatter(InteractiveShell.instance().display_formatter)
        InteractiveShell.clear_instance()


def _forget_helpers(package: str) -> None:
    """The kernel's fork server and resource tracker are not ours: a rank that needs one starts its own."""
    server = sys.modules.get(f"{package}.forkserver")
    if server is not None:
        server._forkserver.__init__()
    tracker = sys.modules.get(f"{package}.resource_tracker")
    if tracker is not None:
        tracker._resource_tracker._fd = None
        tracker._resource_tracker._pid = None


def _fresh_signals() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    faulthandler.enable(file=2)
    last = [0.0]

    def once(number: int, frame: object) -> None:
        # An interrupted kernel interrupts its whole group and we interrupt each rank again: one is enough.
        now = time.monotonic()
        if now - last[0] > _INTERRUPT_AGAIN_AFTER:
            last[0] = now
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, once)


def _settle(plan: RankPlan) -> None:
    for name in os.environ.keys() - plan.env.keys():
        del os.environ[name]
    for name, value in plan.env.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    with contextlib.suppress(OSError):
        os.chdir(plan.directory)
    sys.path[:] = plan.path
    sys.argv[:] = plan.argv
    torch.set_num_threads(plan.threads)
    reset_inherited()
    forks_die_with_this_process()
    scratch.install()
    # Only what the user's code registers from here on is run at the rank's end. What was registered before belongs
    # to the process that this one came from, or to libraries that clean up what os._exit leaves to the system.
    atexit._clear()
    global _inherited_finalizers
    _inherited_finalizers = weakref.finalize._registry  # type: ignore[attr-defined]
    weakref.finalize._registry = {}  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    atexit.register(logging.shutdown)


def _run(plan: RankPlan) -> Message:
    try:
        function, args, kwargs = _call_of(plan)
        probe.phase(Phase.RUNNING)
        result = _returned(function, args, kwargs)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        probe.phase(Phase.STOPPED)
        return Interrupted()
    except BaseException as error:
        probe.phase(Phase.FAILED)
        return Error(describe(error))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    probe.phase(Phase.RETURNING)
    try:
        return Result(pack_result(result))
    except BaseException as error:  # a user's __reduce__ may raise anything
        return Unsendable(type(result).__name__, describe(error))


def _call_of(plan: RankPlan) -> tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]:
    if plan.direct is not None:
        return plan.direct
    assert plan.payload is not None
    return unpack(plan.payload)


def _returned(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What the function returns; ``sys.exit()`` and ``sys.exit(0)`` count as a plain return."""
    try:
        return function(*args, **kwargs)
    except SystemExit as error:
        if error.code in (None, 0):
            return None
        raise


def _leave(message: Message, outbox: Outbox, control: int) -> int:
    _flush()
    outbox.say(message)
    if not isinstance(message, Result):
        logging.shutdown()
        return 1
    probe.phase(Phase.FINISHED)
    atexit._run_exitfuncs()
    _wait_for_permission(control)
    return 0


def _flush() -> None:
    """Let everything that was printed or logged be on its way before the last word is."""
    streams = [sys.stdout, sys.stderr, *(reference() for reference in logging._handlerList)]  # type: ignore[attr-defined]
    for stream in streams:
        with contextlib.suppress(Exception):
            stream.flush()
    flush_c_streams()


def _wait_for_permission(control: int) -> None:
    """Stay until all ranks are done, which the kernel says; if that takes long, close this rank's connections first.

    Another rank may still need this one: rank 0 hosts the store, and a peer whose ``init_process_group`` has not quite
    returned fails if a rank that it has just connected to is gone by then. On the other hand a rank may wait in a
    collective for this one, which will never come, and can only learn of that from a closed connection.

    In the usual case nobody tears its process group down: the end of a process closes its connections at once, while
    a tear-down of gloo takes 10 ms a rank, one after another.
    """
    channel = socket.socket(fileno=os.dup(control))
    channel.settimeout(_SOON)
    with channel, contextlib.suppress(OSError):
        try:
            channel.recv(1)
        except TimeoutError:
            if dist.is_initialized():
                with contextlib.suppress(Exception):
                    dist.destroy_process_group()
            channel.settimeout(None)
            channel.recv(1)

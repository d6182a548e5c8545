"""Ranks on this machine, through ``multiprocess`` contexts: fork, forkserver or spawn."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import multiprocess

from nbstate.errors import LaunchError
from nbstate.launch import bootstrap
from nbstate.launch.engines.base import RankHandle
from nbstate.launch.plan import Fd, RankPlan

__all__ = ["LocalEngine", "available_start_methods", "warm_forkserver"]

_PRELOAD: Final = ["nbstate.launch.preload"]
_MAIN: Final = frozenset({"init_main_from_name", "init_main_from_path"})
_SETTLED_BY_THE_RANK: Final = frozenset({"sys_path", "sys_argv", "orig_dir", "dir", "start_method"})
_starting = threading.Lock()


def available_start_methods() -> tuple[str, ...]:
    """The start methods that this system has."""
    return tuple(multiprocess.get_all_start_methods())


def warm_forkserver() -> None:
    """Start the fork server if it does not run yet. Returns at once: it imports torch by itself, about 1 s.

    The server lives as long as the thread that starts it (see ``lifeline``), so off the main thread a thread that
    never ends does it.
    """
    if "forkserver" not in available_start_methods():
        return
    from multiprocess import forkserver

    with _starting:
        forkserver.set_forkserver_preload(_PRELOAD)
        if threading.current_thread() is threading.main_thread():
            _ensure_running()
            return
        if _server_runs():
            return
        done = threading.Event()
        thread = threading.Thread(target=_start_and_stay, args=(done,), name="nbstate-forkserver", daemon=True)
        thread.start()
        done.wait()


def _server_runs() -> bool:
    from multiprocess.forkserver import _forkserver

    pid = _forkserver._forkserver_pid
    if pid is None:
        return False
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def _start_and_stay(done: threading.Event) -> None:
    try:
        _ensure_running()
    finally:
        done.set()
    threading.Event().wait()


def _ensure_running() -> None:
    from multiprocess import forkserver

    # The server, and through it every rank, inherits this mask: no interrupt before a rank is ready for one.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with _without_tracker():
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class LocalRank:
    """A rank's process and the kernel's ends of its pipes."""

    def __init__(self, rank: int, process: Any, control: int, stdout: int, stderr: int) -> None:
        self.rank = rank
        self.control = control
        self.stdout = stdout
        self.stderr = stderr
        self.ended = -1
        self._process = process
        with contextlib.suppress(AttributeError, OSError):
            self.ended = os.pidfd_open(process.pid)

    @property
    def pid(self) -> int:
        """The rank's process."""
        return int(self._process.pid)

    def poll(self) -> int | None:
        """Exit code (negative: the signal that ended it), or None while it lives."""
        code = self._process.exitcode
        return None if code is None else int(code)

    def send_signal(self, number: signal.Signals) -> None:
        """Signal the rank; nothing happens if it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def close(self) -> None:
        """Close the descriptors and forget the process. Only for a rank that has ended."""
        for fd in (self.control, self.stdout, self.stderr, self.ended):
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)
        self._process.close()


class LocalEngine:
    """Makes ranks on this machine.

    Parameters
    ----------
    start_method : {"fork", "forkserver", "spawn"}
        How a rank's process comes to be.
    """

    name = "local"

    def __init__(self, start_method: str) -> None:
        self.start_method = start_method
        if start_method == "fork":
            import nbstate.launch.rank  # noqa: F401 - once here, instead of in every rank
        self._context = multiprocess.get_context(start_method)

    def start(self, plans: Sequence[RankPlan]) -> list[RankHandle]:
        """Start one rank per plan; see ``Engine.start``."""
        if self.start_method == "forkserver":
            warm_forkserver()
        started: list[RankHandle] = []
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with _no_collection(self.start_method):
                started.extend(self._start_one(plan) for plan in plans)
        except BaseException:
            for handle in started:
                handle.send_signal(signal.SIGKILL)
                while handle.poll() is None:
                    os.sched_yield()
                handle.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return started

    def _start_one(self, plan: RankPlan) -> LocalRank:
        ours, theirs = socket.socketpair()
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        process = self._context.Process(
            target=bootstrap.enter,
            args=(replace(plan, control=Fd(theirs.fileno()), stdout=Fd(out_write), stderr=Fd(err_write)),),
            name=f"nbstate-rank-{plan.rank}",
            daemon=False,
        )
        try:
            with _lean_start(self.start_method), _without_tracker():
                process.start()
        except BaseException as error:
            os.close(out_read)
            os.close(err_read)
            ours.close()
            if not isinstance(error, (EOFError, OSError)):
                raise
            raise LaunchError(
                f"rank {plan.rank} could not be started by {self.start_method}: {type(error).__name__}: {error}"
            ) from error
        finally:
            os.close(out_write)
            os.close(err_write)
            theirs.close()
        for fd in (out_read, err_read):
            os.set_blocking(fd, False)
        ours.setblocking(False)
        return LocalRank(plan.rank, process, ours.detach(), out_read, err_read)


@contextlib.contextmanager
def _no_collection(start_method: str) -> Iterator[None]:
    """Under fork, collect no garbage until the child has set the kernel's objects aside.

    A collection in the child touches, and so copies, every page that holds an object: about 10 ms a rank.
    """
    collects = start_method == "fork" and gc.isenabled()
    if collects:
        gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def _lean_start(start_method: str) -> Iterator[None]:
    """Keep ``multiprocess`` from two things that it does whenever it starts a process.

    It would import the user's main script anew in each rank: that runs a script's top level once per rank, and a script
    without ``if __name__ == "__main__"`` would launch from inside its own launch. Functions travel by value here.

    And it would flush ``sys.stdout`` on this thread, once per rank. In a kernel each flush waits for another thread and
    opens a socket for this one; the launcher has flushed once, on the thread of the cell.
    """
    from multiprocess import spawn, util

    with _starting:
        prepare, flush = spawn.get_preparation_data, util._flush_std_streams

        def lean(name: str) -> dict[str, Any]:
            # path and directory are in the plan, too; but a spawned rank needs the path to find the plan's class
            left_out = _MAIN if start_method == "spawn" else _MAIN | _SETTLED_BY_THE_RANK
            return {key: value for key, value in prepare(name).items() if key not in left_out}

        spawn.get_preparation_data, util._flush_std_streams = lean, lambda: None
        try:
            yield
        finally:
            spawn.get_preparation_data, util._flush_std_streams = prepare, flush


@contextlib.contextmanager
def _without_tracker() -> Iterator[None]:
    """Keep ``multiprocess`` from starting its resource tracker in the kernel.

    The tracker unlinks named semaphores that crashed processes leave; a launch makes none, and a rank that needs a
    tracker starts its own. In a kernel it does harm: it ignores SIGTERM, and ipykernel waits for it at every restart.
    """
    from multiprocess import resource_tracker

    getfd, ensure_running = resource_tracker.getfd, resource_tracker.ensure_running
    null = os.open(os.devnull, os.O_WRONLY)
    resource_tracker.getfd, resource_tracker.ensure_running = lambda: null, lambda: None
    try:
        yield
    finally:
        resource_tracker.getfd, resource_tracker.ensure_running = getfd, ensure_running
        os.close(null)

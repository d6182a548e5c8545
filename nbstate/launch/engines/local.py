"""Ranks on this machine, through ``multiprocess`` contexts: fork, forkserver or spawn."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import multiprocess
import multiprocess.util

from nbstate.errors import LaunchError
from nbstate.launch import bootstrap, environ
from nbstate.launch.engines import forkserver
from nbstate.launch.engines.base import RankHandle
from nbstate.launch.engines.forkserver import warm_forkserver
from nbstate.launch.plan import Fd, RankPlan

__all__ = ["LocalEngine", "available_start_methods", "warm_forkserver"]

_MAIN: Final = frozenset({"init_main_from_name", "init_main_from_path"})
_SERVER_IS_GONE: Final = 255  # what multiprocess says of a rank when nobody is left to tell how it ended
_LOOKS, _BETWEEN_LOOKS = 5, 0.01  # a server's connections end a moment before it does
_SETTLED_BY_THE_RANK: Final = frozenset({"sys_path", "sys_argv", "orig_dir", "dir", "start_method"})


def available_start_methods() -> tuple[str, ...]:
    """The start methods that this system has."""
    return tuple(multiprocess.get_all_start_methods())


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
        self._server = 0

    def ready(self) -> bool:
        """Whether ``start`` would start ranks at once; see ``Engine.ready``."""
        return self.start_method != "forkserver" or forkserver.is_ready()

    def why_gone(self, exitcode: int) -> str:
        """Whether a rank ended because the fork server did; see ``Engine.why_gone``."""
        if exitcode != _SERVER_IS_GONE or not self._server:
            return ""
        for _ in range(_LOOKS):
            fate = forkserver.fate(self._server)
            if fate:
                return (
                    f"the fork server ended (process {self._server}, {fate}), and its ranks with it. "
                    "The next launch starts a new one"
                )
            time.sleep(_BETWEEN_LOOKS)
        return ""

    def start(self, plans: Sequence[RankPlan]) -> list[RankHandle]:
        """Start one rank per plan; see ``Engine.start``."""
        if self.start_method == "forkserver":
            warm_forkserver()
            self._server = forkserver.server_pid()
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
        parent = self._server or os.getpid()
        control, stdout, stderr = Fd(theirs.fileno()), Fd(out_write), Fd(err_write)
        process = self._context.Process(
            target=bootstrap.enter,
            args=(replace(plan, parent=parent, control=control, stdout=stdout, stderr=stderr),),
            name=f"nbstate-rank-{plan.rank}",
            daemon=False,
        )
        try:
            with _lean_start(self.start_method), forkserver.without_tracker():
                process.start()
        except BaseException as error:
            os.close(out_read)
            os.close(err_read)
            ours.close()
            if not isinstance(error, (EOFError, OSError)):
                raise
            reason = self.why_gone(_SERVER_IS_GONE) or f"{type(error).__name__}: {error}"
            raise LaunchError(f"rank {plan.rank} could not be started by {self.start_method}: {reason}") from error
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
    """Keep ``multiprocess`` from three things that it does whenever it starts a process.

    It would import the user's main script anew in each rank: that runs a script's top level once per rank, and a script
    without ``if __name__ == "__main__"`` would launch from inside its own launch. Functions travel by value here.

    And it would flush ``sys.stdout`` on this thread, once per rank. In a kernel each flush waits for another thread and
    opens a socket for this one; the launcher has flushed once, on the thread of the cell.

    And it would replace a fork server that has just ended, on this thread, whose end would be the new one's.

    And a spawned rank would find an environment in pieces where a thread of the kernel changes it (see ``environ``).
    """
    from multiprocess import spawn, util
    from multiprocess.forkserver import _forkserver

    with forkserver.starting:
        prepare, flush, start = spawn.get_preparation_data, util._flush_std_streams, util.spawnv_passfds

        def lean(name: str) -> dict[str, Any]:
            # path and directory are in the plan, too; but a spawned rank needs the path to find the plan's class
            left_out = _MAIN if start_method == "spawn" else _MAIN | _SETTLED_BY_THE_RANK
            return {key: value for key, value in prepare(name).items() if key not in left_out}

        spawn.get_preparation_data, util._flush_std_streams = lean, lambda: None
        util.spawnv_passfds = environ.spawn
        _forkserver.ensure_running = lambda: None
        try:
            yield
        finally:
            spawn.get_preparation_data, util._flush_std_streams = prepare, flush
            util.spawnv_passfds = start
            del _forkserver.ensure_running

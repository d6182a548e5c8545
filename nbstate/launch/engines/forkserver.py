"""The fork server: started once per kernel, watched, replaced when it has ended.

``multiprocess`` runs it, but leaves four things to be desired, which are mended here:

* Its socket stays in ``/tmp`` when the kernel is killed. Here the socket loses its name as soon as the server listens:
  the kernel holds a descriptor of it and connects through ``/proc/self/fd``.
* Whether it has come up, which takes a second or more, can only be learnt by waiting for the first rank. Here it says
  so on a pipe, so that a launch can be interrupted meanwhile.
* It is replaced on whichever thread finds that it has ended. Its life is tied to the thread that starts it (see
  ``lifeline``), so here it is always one that stays.
* It starts a resource tracker in the kernel, which ignores SIGTERM, and ipykernel waits for it at every restart. The
  tracker unlinks named semaphores that crashed processes leave; a launch makes none.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any, Final

from nbstate.errors import LaunchError
from nbstate.launch import environ
from nbstate.launch.rundir import RunDirectory

__all__ = ["fate", "is_ready", "server_pid", "starting", "warm_forkserver", "without_tracker"]

_PRELOAD: Final = ["nbstate.launch.preload"]

starting: Final = threading.RLock()
"""Held while anything of ``multiprocess`` is replaced for a moment."""

_fates: dict[int, str] = {}
_ready: dict[int, int] = {}  # a server's pid, and the pipe on which it says that it has come up
_socket = -1


def warm_forkserver() -> None:
    """Start the fork server if it does not run. Returns at once: it imports torch by itself, about 1 s.

    The server lives as long as the thread that starts it, so off the main thread a thread that never ends does it.
    """
    import multiprocess

    if "forkserver" not in multiprocess.get_all_start_methods():
        return
    with starting:
        _notice_end()
        if server_pid():
            return
        if threading.current_thread() is threading.main_thread():
            _start()
            return
        errors: list[BaseException] = []
        done = threading.Event()
        threading.Thread(target=_start_and_stay, args=(done, errors), name="nbstate-forkserver", daemon=True).start()
        done.wait()
        if errors:
            raise errors[0]


def is_ready() -> bool:
    """Start the fork server if it does not run, and say whether it can fork a rank at once.

    Raises
    ------
    LaunchError
        It has ended while it was coming up.
    """
    warm_forkserver()
    with starting:
        pid = server_pid()
        pipe = _ready.get(pid)
        if pipe is None:
            return True
        try:
            said = os.read(pipe, 1)
        except BlockingIOError:
            return False
        os.close(_ready.pop(pid))
    if said:
        return True
    raise LaunchError(f"the fork server ended while it was starting ({fate(pid) or 'its output says why'})")


def server_pid() -> int:
    """The fork server's process, 0 if there is none."""
    return int(_state()._forkserver_pid or 0)


def fate(pid: int) -> str:
    """How a fork server ended, as ``"ended by SIGKILL"``; empty while it runs."""
    with starting:
        _notice_end()
        if pid in _fates or pid == server_pid():
            return _fates.get(pid, "")
    return "it is gone"


def _state() -> Any:
    from multiprocess.forkserver import _forkserver

    return _forkserver


def _notice_end() -> None:
    """If the server has ended, note how, and let ``multiprocess`` forget it."""
    pid = server_pid()
    if not pid:
        return
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:  # somebody else has waited for it
        ended, status = pid, None
    if not ended:
        return
    _fates[pid] = "it is gone" if status is None else _how(os.waitstatus_to_exitcode(status))
    state = _state()
    os.close(state._forkserver_alive_fd)
    state._forkserver_pid = state._forkserver_alive_fd = state._forkserver_address = None


def _how(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"


def _start_and_stay(done: threading.Event, errors: list[BaseException]) -> None:
    try:
        _start()
    except BaseException as error:
        errors.append(error)
        return
    finally:
        done.set()
    threading.Event().wait()


def _start() -> None:
    from multiprocess import connection, forkserver, util

    global _socket
    forkserver.set_forkserver_preload(_PRELOAD)
    directory = RunDirectory()
    path = os.path.join(directory.path, "socket")
    said, say = os.pipe()
    address, start = connection.arbitrary_address, util.spawnv_passfds

    def spawn_with_pipe(exe: str, args: list[str], fds: list[int]) -> Any:
        return environ.spawn(exe, [*args, str(say)], [*fds, say])  # preload finds its number in sys.argv

    connection.arbitrary_address, util.spawnv_passfds = lambda family: path, spawn_with_pipe
    # The server, and through it every rank, inherits this mask: no interrupt before a rank is ready for one.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with without_tracker():
            forkserver.ensure_running()
    except BaseException:
        os.close(said)
        directory.remove()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        connection.arbitrary_address, util.spawnv_passfds = address, start
        os.close(say)
    os.set_blocking(said, False)
    _ready[server_pid()] = said
    if _socket >= 0:
        os.close(_socket)
        _socket = -1
    if sys.platform.startswith("linux"):
        _socket = os.open(path, os.O_PATH)
        _state()._forkserver_address = f"/proc/self/fd/{_socket}"
        directory.remove()
    else:  # pragma: no cover - not on Linux
        util.Finalize(None, directory.remove, exitpriority=0)


@contextlib.contextmanager
def without_tracker() -> Iterator[None]:
    """Keep ``multiprocess`` from starting its resource tracker in the kernel; a rank that needs one starts its own."""
    from multiprocess import resource_tracker

    getfd, ensure_running = resource_tracker.getfd, resource_tracker.ensure_running
    null = os.open(os.devnull, os.O_WRONLY)
    resource_tracker.getfd, resource_tracker.ensure_running = lambda: null, lambda: None
    try:
        yield
    finally:
        resource_tracker.getfd, resource_tracker.ensure_running = getfd, ensure_running
        os.close(null)

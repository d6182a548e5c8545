"""How a rank is asked for its Python stacks while it is stuck in C++, or waits for the GIL.

What does not work: a thread in the rank that listens for the question. It needs the GIL, which a rank that is stuck in
C++ may hold. What does: a C signal handler, Python's own ``faulthandler``, which walks the threads without the GIL and
writes what it finds to a descriptor. It costs nothing until it is used.

Where it writes to is a file without a name, one per rank, made by the kernel and inherited like the board. Kernel and
rank share its one open description, so the kernel empties the file and sets the place where the rank writes next.

The signal is a real-time one: SIGUSR1 belongs to the user (a cluster's warning before it takes a machine away, a
trainer that saves on it). It goes to the main thread alone, so a library's C++ threads never see it. It interrupts no
call of Python's for good, since that takes up a sleep where it was, and of C's only those that no handler lets restart
(``nanosleep``, ``poll``), whose callers have to look for EINTR anyway.

Linux tells in ``/proc/PID/status`` whether a signal is caught, so a process that has no handler yet, or no more, is
never sent one that would end it; and whether the handler has come back, so a dump is never taken for whole too early.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from nbstate.launch.plan import OwnedFd

__all__ = ["ENDED", "SIGNAL", "STARTING", "Answer", "Dumps", "answer_with"]

SIGNAL: Final[int] = int(getattr(signal, "SIGRTMAX", signal.SIGUSR1)) - (7 if hasattr(signal, "SIGRTMAX") else 0)
"""What asks a rank for its stacks. Far from both ends of the real-time signals, where others look first."""

_LINUX: Final = sys.platform.startswith("linux")
_BIT: Final = 1 << (SIGNAL - 1)
_tgkill: Final = getattr(ctypes.CDLL(None), "tgkill", None) if _LINUX else None  # glibc has it since 2.30
_LOOK_AGAIN: Final = 0.002  # seconds
_NOTHING_WRITTEN: Final = 0.25  # seconds after which a signal that was taken and brought no dump was another handler's
_AT_REST: Final = 0.03  # seconds without a change, where the system does not tell that the handler has come back

ENDED: Final = "ended"
STOPPED: Final = "stopped by a signal, such as SIGSTOP"
STARTING: Final = "still starting"
_BLOCKED: Final = f"the main thread blocks signal {SIGNAL}, which asks for stacks"
_TAKEN: Final = f"no answer, since code in it handles signal {SIGNAL}, which asks for stacks, itself"


@dataclass(frozen=True)
class Answer:
    """What came of one question: the dump as ``faulthandler`` writes it, or why there is none."""

    text: str = ""
    silence: str = ""


@dataclass(frozen=True)
class _Status:
    """What the system says of a process and its main thread: ``R``, ``S``, ``T`` ..., and the signal's standing."""

    state: str
    caught: bool
    blocked: bool
    pending: bool


def answer_with(fd: int) -> None:
    """Let this process, a rank, answer from now on, with dumps to ``fd``."""
    faulthandler.register(SIGNAL, file=fd, all_threads=True, chain=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {SIGNAL})


class Dumps:
    """The files for the dumps of one launch's ranks, and the asking. Any thread may ask; one asks at a time.

    Attributes
    ----------
    fds : tuple of OwnedFd
        One descriptor per rank, for its plan.
    """

    def __init__(self, world_size: int) -> None:
        self.fds = tuple(OwnedFd(_nameless_file()) for _ in range(world_size))
        self._lock = threading.Lock()
        self._closed = False

    def ask(self, pids: Mapping[int, int], timeout: float = 2.0) -> dict[int, Answer]:
        """Ask ranks for their stacks, all at once, and wait until each has answered or is known not to.

        Parameters
        ----------
        pids : mapping of int to int
            Ranks and their processes; 0 for a rank that has not started, negative for one that has ended.
        timeout : float
            Seconds to wait at most.

        Returns
        -------
        dict
            Rank to what came of it.
        """
        with self._lock:
            if self._closed:
                return {rank: Answer(silence=ENDED) for rank in pids}
            answers: dict[int, Answer] = {}
            waiting: dict[int, _Question] = {}
            for rank, pid in pids.items():
                question = _Question(pid, self.fds[rank].fd)
                silence = question.put()
                if silence:
                    answers[rank] = Answer(silence=silence)
                else:
                    waiting[rank] = question
            deadline = time.monotonic() + timeout
            while waiting:
                late = time.monotonic() > deadline
                for rank, question in list(waiting.items()):
                    answer = question.hear() or (question.give_up(timeout) if late else None)
                    if answer is not None:
                        answers[rank] = answer
                        del waiting[rank]
                if waiting:
                    time.sleep(_LOOK_AGAIN)
            return dict(sorted(answers.items()))

    def close(self) -> None:
        """Close the files. Safe to call twice."""
        with self._lock:
            self._closed = True
            for fd in self.fds:
                fd.close()


class _Question:
    """One rank that is being asked."""

    def __init__(self, pid: int, fd: int) -> None:
        self._pid, self._fd = pid, fd
        self._asked = 0.0
        self._size, self._since = 0, 0.0

    def put(self) -> str:
        """Send the signal, if that is safe and of use; returns why not."""
        if not self._pid:
            return STARTING
        status = _status(self._pid) if self._pid > 0 else None
        if status is None:
            return ENDED
        why = _why_silent(status)
        if why:
            return why
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)
        self._asked = self._since = time.monotonic()
        if not status.pending:  # else an earlier question is still on its way, and its answer will do
            try:
                _send(self._pid)
            except ProcessLookupError:
                return ENDED
        return ""

    def hear(self) -> Answer | None:
        """The answer, if it is complete or will not come; None if it is to be waited for."""
        begun = self._measure()  # first the file: a handler that has begun and shows no more has come back
        status = _status(self._pid)
        if status is None:
            return Answer(silence=ENDED)
        if status.state == "T":
            return Answer(silence=STOPPED)
        if status.pending or status.blocked:
            return None
        rested = time.monotonic() - self._since
        if begun:
            return Answer(self._read()) if _LINUX or rested > _AT_REST else None
        return Answer(silence=_TAKEN) if rested > _NOTHING_WRITTEN else None

    def _measure(self) -> int:
        size = os.fstat(self._fd).st_size
        if size != self._size:
            self._size, self._since = size, time.monotonic()
        return size

    def give_up(self, timeout: float) -> Answer:
        """What can be said once the time is over."""
        status = _status(self._pid)
        if status is None:
            return Answer(silence=ENDED)
        why = "; the process waits for a disk or a device" if status.state == "D" else ""
        return Answer(silence=f"no answer within {timeout:g} s{why}")

    def _read(self) -> str:
        return os.pread(self._fd, os.fstat(self._fd).st_size, 0).decode("ascii", "replace")


def _why_silent(status: _Status) -> str:
    if status.state == "T":
        return STOPPED
    if not status.caught:
        return STARTING
    return _BLOCKED if status.blocked else ""


def _status(pid: int) -> _Status | None:
    """How a process stands; None if it has ended."""
    if not _LINUX:  # pragma: no cover - not on Linux
        try:
            os.kill(pid, 0)
        except OSError:
            return None
        return _Status("", caught=True, blocked=False, pending=False)
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            rows = dict(line.split(b":", 1) for line in file.read().splitlines() if b":" in line)
    except (FileNotFoundError, ProcessLookupError):
        return None
    state = rows[b"State"].split()[0].decode()
    if state in "ZX" or b"SigCgt" not in rows:
        return None

    def has(*names: bytes) -> bool:
        return any(int(rows[name], 16) & _BIT for name in names)

    return _Status(state, caught=has(b"SigCgt"), blocked=has(b"SigBlk"), pending=has(b"SigPnd", b"ShdPnd"))


def _send(pid: int) -> None:
    """Signal a process's main thread, whose number is the process's; the whole process where that cannot be done."""
    if _tgkill is None or _tgkill(pid, pid, SIGNAL) != 0:
        os.kill(pid, SIGNAL)


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("nbstate-stacks", os.MFD_CLOEXEC)
    fd, path = tempfile.mkstemp(prefix="nbstate-stacks-")  # pragma: no cover - not on Linux
    os.unlink(path)  # pragma: no cover
    return fd  # pragma: no cover

"""What owns the pipes, exits and deadlines of one attempt of a launch, on one thread.

The problem: N ranks end in any order and in any way, print all the while, and a person may interrupt at any moment.
What does not work is to wait for one rank after another (the second one's failure goes unseen while the first waits
for it), to trust a pipe's end for a process's end (a data loader's worker holds the pipe open), or to do any of it on
the kernel's main thread (an interrupt would tear it in the middle).

What does: one selector over every rank's channel, output pipes and pidfd, on a thread that also makes the ranks. It is
fresh, so a fork from it inherits no libgomp pool, and it outlives them, so they die if and only if it does. SIGINT is
blocked on it. Everything others may ask of it goes through ``interrupt`` and ``stop``, which only leave a note: even a
signal's handler may call them. ``attempts`` starts the thread, and a new supervisor on it after a failure.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from nbstate.errors import LaunchError
from nbstate.launch.engines.base import Engine, RankHandle
from nbstate.launch.messages import Display, Error, Inbox, Interrupted, Message, Result, Unsendable
from nbstate.launch.outcome import Ending, first_cause, patience
from nbstate.launch.output import Output
from nbstate.launch.plan import RankPlan
from nbstate.launch.report import Blame

__all__ = ["RankState", "Supervisor"]

_CHUNK: Final = 1 << 16
_TICK: Final = 0.1
_LEAVING: Final = 5.0
_LOOK_AGAIN: Final = 0.01

Ladder = Sequence[tuple[float, signal.Signals]]
INTERRUPT: Final[Ladder] = ((0.0, signal.SIGINT), (2.0, signal.SIGTERM), (2.5, signal.SIGKILL))
HURRY: Final[Ladder] = ((0.0, signal.SIGTERM), (0.2, signal.SIGKILL))


@dataclass
class RankState:
    """What the kernel knows of one rank."""

    handle: RankHandle
    inbox: Inbox = field(default_factory=Inbox)
    message: Message | None = None
    exitcode: int | None = None
    ended: bool = False

    @property
    def done(self) -> bool:
        """Whether nothing more can come of it: it has said its last word, or it is gone."""
        return self.message is not None or self.ended


class Supervisor:
    """Watches over the ranks of one attempt of a launch, from their start to their end.

    Parameters
    ----------
    engine : Engine
        Makes the ranks.
    plans : sequence of RankPlan
        One per rank.
    output : Output
        Where lines go.
    deadline : float
        ``time.monotonic()`` of the moment at which the launch has taken too long; infinity if it may take for ever.
    on_tick : callable
        Called about every 0.1 s, on this thread.
    on_output : callable
        Called when lines are complete, and at the very end, on this thread.
    on_failure : callable
        Called once, when the cause is known and before the other ranks are ended, on this thread.
    """

    def __init__(
        self,
        engine: Engine,
        plans: Sequence[RankPlan],
        output: Output,
        deadline: float,
        on_tick: Callable[[], None],
        on_output: Callable[[], None],
        on_failure: Callable[[Ending | None], None],
    ) -> None:
        self.ranks: list[RankState] = []
        self.endings: list[Ending] = []
        self.cause: Ending | None = None
        self.start_error: BaseException | None = None
        self.stopped_by = ""
        self.late_deaths: list[tuple[int, int]] = []
        self._engine = engine
        self._plans = plans
        self._output = output
        self._deadline = deadline
        self._on_tick, self._on_output, self._on_failure = on_tick, on_output, on_failure
        self._orders: deque[tuple[str, Ladder]] = deque()
        self._ladder: deque[tuple[float, signal.Signals]] = deque()
        self._all_said_at: float | None = None
        self._decided = False
        self.failing: Callable[[], Mapping[int, float]] = dict  # ranks that have raised, by the board; see ``patience``
        self._wake_lock = threading.RLock()  # a signal's handler may come again while it is in here
        self._wake_read = self._wake_write = -1

    def interrupt(self) -> None:
        """KeyboardInterrupt in every rank; one that does not answer within 2 s is ended. Again: ended at once."""
        self._order("interrupted", HURRY if self.stopped_by or self._orders else INTERRUPT)

    def stop(self, grace: float) -> None:
        """KeyboardInterrupt in every rank; one that has not unwound within ``grace`` seconds is ended."""
        self._order("stopped", ((0.0, signal.SIGINT), (grace, signal.SIGTERM), (grace + 0.2, signal.SIGKILL)))

    def _order(self, why: str, ladder: Ladder) -> None:
        with self._wake_lock:
            self._orders.append((why, ladder))
            if self._wake_write >= 0:
                os.write(self._wake_write, b".")

    def run(self) -> None:
        """Live from the first rank's start to the last one's end."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        with self._wake_lock:
            self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        self._selector = selectors.DefaultSelector()
        try:
            self._selector.register(self._wake_read, selectors.EVENT_READ, self._on_wake)
            if self._wait_for_engine():
                self._start_ranks()
            while not all(state.ended for state in self.ranks):
                self._turn()
        except BaseException as error:  # ours; the ranks must not outlive it
            self.start_error = self.start_error or error
            self._kill_all()
        finally:
            self._close()

    def _wait_for_engine(self) -> bool:
        """Wait until ranks can be started at once; False if the launch was ended first."""
        while True:
            ready = self._engine.ready()
            self._take_orders()
            if ready or self.stopped_by:
                return not self.stopped_by
            for key, _ in self._selector.select(_LOOK_AGAIN):
                key.data()
            self._on_tick()

    def _start_ranks(self) -> None:
        handles = self._engine.start(self._plans)
        for handle in handles:
            state = RankState(handle)
            self.ranks.append(state)
            self._register(handle.control, partial(self._read_control, state))
            self._register(handle.stdout, partial(self._read_output, state, "stdout"))
            self._register(handle.stderr, partial(self._read_output, state, "stderr"))
            if handle.ended >= 0:
                self._register(handle.ended, partial(self._collect, state))

    def _register(self, fd: int, react: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, react)

    def _turn(self) -> None:
        """One round: what has arrived, what has ended, what is due."""
        for key, _ in self._selector.select(self._patience()):
            key.data()
        for state in self.ranks:
            if not state.ended and state.handle.ended < 0:
                self._collect(state)
        self._take_orders()
        self._decide()
        self._permit_to_leave()
        self._hurry_leavers()
        self._climb()
        self._on_tick()

    def _patience(self) -> float:
        due = [_TICK]
        now = time.monotonic()
        if self._ladder:
            due.append(self._ladder[0][0] - now)
        if self.endings and not self._decided:
            due.append(0.02)
        return max(0.0, min(due))

    def _on_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, _CHUNK)

    def _read_control(self, state: RankState) -> None:
        while True:
            try:
                piece = os.read(state.handle.control, _CHUNK)
            except BlockingIOError:
                return
            except OSError:
                piece = b""
            if not piece:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(state.handle.control)
                return
            for message in state.inbox.feed(piece):
                self._heard(state, message)

    def _heard(self, state: RankState, message: Message | Display) -> None:
        if isinstance(message, Display):
            self._queue_display(state, message)
            return
        state.message = message
        if self._ladder_in_use():
            return
        rank, now = state.handle.rank, time.monotonic()
        if isinstance(message, Error):
            self.endings.append(Ending(rank, message.report.blame, now, report=message.report))
        elif isinstance(message, Interrupted):
            self.endings.append(Ending(rank, Blame.INTERRUPTED, now))

    def _queue_display(self, state: RankState, message: Display) -> None:
        """Queue what a rank displayed behind what it has printed before; it waits for the answer to go on."""
        self._read_output(state, "stdout")  # one chunk is all that a pipe holds
        self._read_output(state, "stderr")
        self._output.show(state.handle.rank, json.loads(message.content), message.update)
        self._on_output()
        if state.message is None:
            with contextlib.suppress(OSError):
                os.write(state.handle.control, b".")

    def _ladder_in_use(self) -> bool:
        """Whether ranks are being ended on purpose, so that what they say now is noise."""
        return bool(self.stopped_by) or self._decided

    def _read_output(self, state: RankState, stream: str) -> None:
        """One chunk a turn, so that a rank that prints without end cannot keep the others waiting."""
        fd = state.handle.stdout if stream == "stdout" else state.handle.stderr
        try:
            piece = os.read(fd, _CHUNK)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if not piece:
            with contextlib.suppress(KeyError):
                self._selector.unregister(fd)
        if self._output.feed(state.handle.rank, stream, piece, final=not piece):
            self._on_output()

    def _collect(self, state: RankState) -> None:
        """A rank's process has ended: read what it left behind and note how it went."""
        code = state.handle.poll()
        if code is None:
            return
        self._read_control(state)
        for stream, fd in (("stdout", state.handle.stdout), ("stderr", state.handle.stderr)):
            self._drain(state, stream, fd)
        for fd in (state.handle.control, state.handle.stdout, state.handle.stderr, state.handle.ended):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(fd)
        state.exitcode, state.ended = code, True
        rank = state.handle.rank
        if state.message is None and not self._ladder_in_use() and not self._engine_is_gone(code):
            self.endings.append(Ending(rank, Blame.DIED, time.monotonic(), exitcode=code))
        elif isinstance(state.message, Result) and code != 0 and not self._ladder_in_use():
            self.late_deaths.append((rank, code))

    def _engine_is_gone(self, code: int) -> bool:
        """Whether a rank was ended by the end of what made it; then that is the error, and no rank is to blame."""
        why = self._engine.why_gone(code)
        if not why:
            return False
        self.start_error = LaunchError(why)
        self._decided = True
        self._set_ladder(HURRY)
        return True

    def _drain(self, state: RankState, stream: str, fd: int) -> None:
        complete = False
        while True:
            try:
                piece = os.read(fd, _CHUNK)
            except OSError:
                piece = b""
            complete |= self._output.feed(state.handle.rank, stream, piece, final=not piece)
            if not piece:
                break
        if complete:
            self._on_output()

    def _take_orders(self) -> None:
        while self._orders:
            why, ladder = self._orders.popleft()
            self.stopped_by = self.stopped_by or why
            self._set_ladder(ladder)
        if time.monotonic() > self._deadline and not self._ladder_in_use():
            if self._all_said_at is None:  # otherwise every result is here, and only the leaving takes too long
                self.stopped_by = "timeout"
                self._on_failure(None)
            self._deadline = math.inf
            self._set_ladder(HURRY)

    def _set_ladder(self, ladder: Ladder) -> None:
        now = time.monotonic()
        self._ladder = deque((now + after, number) for after, number in ladder)

    def _decide(self) -> None:
        """Settle on the cause, once it can be known, and end the others."""
        if self._decided or self.stopped_by or not self.endings:
            return
        cause = first_cause(self.endings)
        assert cause is not None
        waited = time.monotonic() - min(ending.at for ending in self.endings)
        everyone_done = all(state.done for state in self.ranks)
        if not everyone_done and waited < patience(self.endings, self.failing()):
            return
        if cause.blame is Blame.INTERRUPTED and len(self.endings) == len(self.ranks):
            self.stopped_by = "interrupted"  # the whole process group was, as by a front end's Interrupt
            return
        self.cause, self._decided = cause, True
        self._on_failure(cause)
        self._set_ladder(HURRY)

    def _permit_to_leave(self) -> None:
        """Let the ranks go once nobody can need another any more."""
        if self._all_said_at is not None or not self.ranks or not all(state.done for state in self.ranks):
            return
        self._all_said_at = time.monotonic()
        for state in self.ranks:
            if not state.ended:
                with contextlib.suppress(OSError):
                    os.write(state.handle.control, b".")

    def _hurry_leavers(self) -> None:
        """A rank that has said its last word but does not leave is ended."""
        if self._all_said_at is None or self._ladder or time.monotonic() - self._all_said_at < _LEAVING:
            return
        self._set_ladder(HURRY)

    def _climb(self) -> None:
        while self._ladder and self._ladder[0][0] <= time.monotonic():
            _, number = self._ladder.popleft()
            for state in self.ranks:
                spared = number == signal.SIGINT and state.message is not None
                if not state.ended and not spared:
                    state.handle.send_signal(number)

    def _kill_all(self) -> None:
        for state in self.ranks:
            with contextlib.suppress(Exception):
                state.handle.send_signal(signal.SIGKILL)
        give_up = time.monotonic() + _LEAVING
        for state in self.ranks:
            while state.handle.poll() is None and time.monotonic() < give_up:
                time.sleep(0.005)
            state.ended = True

    def _close(self) -> None:
        self._selector.close()
        with self._wake_lock:
            os.close(self._wake_read)
            os.close(self._wake_write)
            self._wake_write = -1
        for state in self.ranks:
            with contextlib.suppress(Exception):
                state.handle.close()

    @property
    def unsendable(self) -> list[tuple[int, Unsendable]]:
        """Ranks whose result could not be pickled."""
        return [(s.handle.rank, s.message) for s in self.ranks if isinstance(s.message, Unsendable)]

"""Launch: one run of a function on N ranks, seen from the kernel."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from nbstate.dashboard import LiveDashboard, TerminalDashboard
from nbstate.errors import (
    LaunchStoppedError,
    LaunchTimeoutError,
    RankError,
)
from nbstate.launch import notebook
from nbstate.launch.attempts import Attempts, Hooks
from nbstate.launch.engines import LocalEngine
from nbstate.launch.interrupts import Interrupts, run_torn
from nbstate.launch.messages import Result
from nbstate.launch.outcome import Ending, doing, exit_name, headline, rank_error, unsendable_error
from nbstate.launch.output import Output
from nbstate.launch.plan import Fd, RankPlan
from nbstate.launch.planning import make_plans
from nbstate.launch.preflight import Choice
from nbstate.launch.shipping import unpack_result
from nbstate.launch.showing import BETWEEN_POURS, Showing
from nbstate.launch.spec import LaunchSpec
from nbstate.launch.supervisor import Supervisor
from nbstate.telemetry.board import RankSnapshot
from nbstate.telemetry.diagnosis import diagnose

__all__ = ["Launch", "RankInfo", "last_launch", "stop_all"]

_TICK: Final = 0.1
_TAIL: Final = 300  # lines of the guilty rank's output to find its last words in, before Python's dump of a crash
_numbers = itertools.count(1)
_live: weakref.WeakSet[Launch] = weakref.WeakSet()
_last: list[Launch] = []


@dataclass(frozen=True)
class RankInfo:
    """One rank of a launch, as ``Launch.ranks`` lists it.

    Attributes
    ----------
    rank, pid : int
        Its number and its process.
    alive : bool
        Whether the process runs.
    exitcode : int or None
        Negative: the signal that ended it.
    board : RankSnapshot
        What it last wrote on the board.
    """

    rank: int
    pid: int
    alive: bool
    exitcode: int | None
    board: RankSnapshot


class Launch:
    """One run of a function on N ranks. ``notebook_launcher(..., block=False)`` returns it.

    Its methods may be called from any thread, while the ranks run and after they ended.

    Examples
    --------
    >>> import nbstate
    >>> launch = nbstate.notebook_launcher(lambda: 1 + 1, num_processes=2, block=False, dashboard=False)
    >>> launch.wait()
    True
    >>> launch.results()
    [2, 2]
    """

    def __init__(self, spec: LaunchSpec, choice: Choice) -> None:
        self.spec = spec
        self.start_method = choice.start_method
        self._id = f"{os.getpid()}-{next(_numbers)}"
        self._output = Output(spec.num_processes, spec.prefix)
        self._showing = Showing(spec, self.start_method, self._output, self._look)
        self._arrived = threading.Event()
        self._error: BaseException | None = None
        self._results: dict[int, Any] = {}
        self._settled = threading.Lock()
        self._is_settled = False
        self._said_failure = ""
        self._close_payload = choice.payload.close if choice.payload else _nothing
        with contextlib.ExitStack() as undo:
            undo.callback(self._close_payload)
            hooks = Hooks(
                tick=self._showing.tick, output=self._arrived.set, failure=self._failed, restart=self._announce_restart
            )

            def plans(port: int, listener: Fd, board: Fd) -> list[RankPlan]:
                return make_plans(spec, choice, self._id, port, listener, board)

            self._attempts = Attempts(spec, LocalEngine(choice.start_method), plans, self._output, hooks)
            undo.pop_all()
        _live.add(self)
        _last[:] = [self]

    def begin(self) -> None:
        """Show the dashboard and start the ranks. Called once, by the launcher, on the thread of the cell."""
        try:
            self._showing.begin(self)
            self._attempts.begin()
        except BaseException:
            if not self._attempts.begun:
                self._attempts.current.close()
                self._close_payload()
                _live.discard(self)
            raise

    @property
    def dashboard(self) -> LiveDashboard | TerminalDashboard | None:
        """What is drawn of it, if anything is."""
        return self._showing.dashboard

    @property
    def cells(self) -> dict[str, str]:
        """File name of each cell's code, and what the notebook calls the cell."""
        return self._showing.cells

    @property
    def begun(self) -> bool:
        """Whether there are ranks, or have been."""
        return self._attempts.begun

    @property
    def port(self) -> int:
        """Where rank 0 hosts the store."""
        return self._attempts.current.port

    @property
    def attempt(self) -> int:
        """How many attempts there were before the one that runs or ran last."""
        return self._attempts.current.number

    @property
    def _supervisor(self) -> Supervisor:
        return self._attempts.current.supervisor

    def _look(self) -> tuple[list[RankSnapshot], int]:
        return self._attempts.current.look()

    def _failed(self, cause: Ending | None) -> None:
        """Keep the board as it was when the launch failed, before the other ranks are ended."""
        snapshots, now = self._attempts.current.keep()
        if cause is None:
            said = diagnose(snapshots, now, self.cells).sentence
            shown = "".join(f"\n  rank {s.rank} {doing(s, now, self.cells)}" for s in snapshots)
            timeout = f"the launch took longer than its timeout of {self.spec.timeout:g} s"
            self._said_failure = f"{timeout}: {said}\n\nWhen it was ended:{shown}"
        else:
            self._said_failure = headline(cause, snapshots, now, self.cells)

    def _announce_restart(self, attempts: int) -> None:
        world, total = self.spec.num_processes, self.spec.max_restarts + 1
        again = "restarting it" if world == 1 else f"restarting all {world} ranks"
        self._output.say(f"nbstate: {self._said_failure}; {again} (attempt {attempts + 1} of {total})")
        self._said_failure = ""
        self._arrived.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until every rank has ended.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait at most; no limit if left out.

        Returns
        -------
        bool
            Whether they have.
        """
        until = None if timeout is None else time.monotonic() + timeout
        on_main = threading.current_thread() is threading.main_thread()
        write = notebook.write_plain if on_main and self.spec.block else None
        while True:
            left = _TICK if until is None else min(_TICK, until - time.monotonic())
            if self._attempts.finished.is_set() or left <= 0:
                break
            if not self.spec.block:
                self._attempts.finished.wait(left)
            elif self._arrived.wait(left):
                self._arrived.clear()
                if self._showing.pour(write):
                    self._arrived.set()
                self._attempts.finished.wait(BETWEEN_POURS)
        ended = self._attempts.finished.is_set()
        if ended:
            with Interrupts() as interrupts:
                self._settle(write, lambda: interrupts.count > 0)
            if interrupts.count:
                raise KeyboardInterrupt
        return ended

    def results(self) -> list[Any]:
        """Wait for the ranks and return what each returned, in rank order.

        Raises
        ------
        RankError
            A rank failed.
        LaunchTimeoutError, LaunchStoppedError, ShippingError
            There are no results for another reason.
        KeyboardInterrupt
            The launch was interrupted.
        """
        self.wait()
        if self._error is not None:
            raise self._error
        return [self._results[rank] for rank in range(self.spec.num_processes)]

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in every rank. One that does not unwind within 2 s is ended; twice: at once."""
        self._attempts.interrupt()

    def stop(self, grace: float = 0.3) -> None:
        """End the launch.

        Parameters
        ----------
        grace : float
            Seconds that ranks have to unwind (``finally`` blocks, context managers) before they are ended.
        """
        self._attempts.stop(grace)

    @property
    def ranks(self) -> list[RankInfo]:
        """Every rank: its process, and what it last wrote on the board."""
        snapshots, _ = self._look()
        states = list(self._supervisor.ranks)
        return [
            RankInfo(s.rank, s.pid, s.rank < len(states) and not states[s.rank].ended, _exitcode(states, s.rank), s)
            for s in snapshots
        ]

    @property
    def done(self) -> bool:
        """Whether every rank has ended."""
        return self._attempts.finished.is_set()

    def logs(self, rank: int) -> str:
        """All that a rank has printed, both streams, in the order in which it arrived; of displays their plain text.

        Raises
        ------
        IndexError
            There is no such rank.
        """
        if not 0 <= rank < self.spec.num_processes:
            raise IndexError(f"rank {rank}: this launch has ranks 0 to {self.spec.num_processes - 1}")
        return self._output.logs(rank)

    def __repr__(self) -> str:
        state = "running"
        if self.done:
            state = "finished" if self._error is None else f"ended by {type(self._error).__name__}"
        ranks = "1 rank" if self.spec.num_processes == 1 else f"{self.spec.num_processes} ranks"
        return f"<Launch of {self.spec.title} on {ranks}, {self.start_method}, {state}>"

    def _settle(self, write: notebook.Writer | None, hurried: Callable[[], bool]) -> None:
        """Once all ranks have ended: the results or the error, the last output, the last picture. Done once."""
        with self._settled:
            if self._is_settled:
                return
            self._attempts.join()
            self._showing.pour_the_rest(write, hurried)
            unpacked = run_torn(self._unpack_results)
            self._error = self._find_error() if unpacked else KeyboardInterrupt()
            self._warn_of_late_deaths(write)
            self._attempts.current.close()
            self._close_payload()
            _live.discard(self)
            self._show_ending()
            self._is_settled = True

    def _unpack_results(self) -> None:
        for state in self._supervisor.ranks:
            if not isinstance(state.message, Result):
                continue
            rank = state.handle.rank
            try:
                self._results[rank] = unpack_result(state.message.data)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # a user's __setstate__ may raise anything
                self._error = unsendable_error(rank, "result", f"{type(error).__name__}: {error}", {})

    def _find_error(self) -> BaseException | None:
        supervisor = self._supervisor
        broken = self._attempts.error or supervisor.start_error
        if broken is not None:
            return broken
        if supervisor.cause is not None:
            snapshots, now = self._look()
            error = rank_error(
                supervisor.cause,
                snapshots,
                now,
                self.cells,
                self._output.tail(supervisor.cause.rank, _TAIL),
                self._results,
                supervisor.endings,
            )
            if self.attempt:
                error.args = (f"{error}\n\nThis ended attempt {self.attempt + 1} of {self.spec.max_restarts + 1}.",)
            return error
        if supervisor.stopped_by == "timeout":
            return LaunchTimeoutError(self._said_failure)
        if supervisor.stopped_by == "interrupted":
            return KeyboardInterrupt()
        if supervisor.stopped_by == "stopped":
            return LaunchStoppedError("the launch was stopped on request before its ranks were done")
        for rank, message in supervisor.unsendable:
            return unsendable_error(
                rank, message.type_name, f"{message.report.type_name}: {message.report.message}", self._results
            )
        if self._error is not None:
            self._error.results = dict(self._results)  # type: ignore[attr-defined]
        return self._error

    def _warn_of_late_deaths(self, write: notebook.Writer | None) -> None:
        for rank, code in self._supervisor.late_deaths:
            self._showing.say(
                f"nbstate: rank {rank} was ended by {exit_name(code)} after its result had arrived", write
            )

    def _show_ending(self) -> None:
        error = self._error
        guilty: tuple[int, ...] = ()
        state, message = "failed", self._said_failure
        if error is None:
            state = "finished"
        elif isinstance(error, KeyboardInterrupt):
            state = "interrupted"
        elif isinstance(error, LaunchStoppedError):
            state = "stopped"
        else:
            message = message or f"{type(error).__name__}: {error}"
            guilty = (error.rank,) if isinstance(error, RankError) else ()
        self._showing.finish(state, message, guilty)


def _nothing() -> None:
    """Stand in for a clean-up where there is nothing to clean up."""


def _exitcode(states: list[Any], rank: int) -> int | None:
    return states[rank].exitcode if rank < len(states) else None


def last_launch() -> Launch | None:
    """The newest launch of this kernel, or None."""
    return _last[0] if _last else None


def stop_all() -> None:
    """End every launch that still runs; for the kernel's own end."""
    for launch in list(_live):
        launch.stop(grace=0.0)
    for launch in list(_live):
        launch.wait(timeout=5.0)

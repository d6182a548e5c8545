"""Launch: one run of a function on N ranks, seen from the kernel."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from nbstate.dashboard import LiveDashboard, TerminalDashboard
from nbstate.dashboard.report import Report
from nbstate.launch import notebook
from nbstate.launch.attempts import Attempts, Hooks
from nbstate.launch.conclusion import Conclusion
from nbstate.launch.controls import LaunchControls
from nbstate.launch.engines import LocalEngine
from nbstate.launch.examining import SHORT, Examiner
from nbstate.launch.interrupts import Interrupts
from nbstate.launch.observing import Finding
from nbstate.launch.outcome import Ending
from nbstate.launch.output import Output
from nbstate.launch.plan import Fd, RankPlan
from nbstate.launch.planning import make_plans
from nbstate.launch.preflight import Choice
from nbstate.launch.showing import BETWEEN_POURS, Showing
from nbstate.launch.spec import LaunchSpec
from nbstate.launch.stacks import Stacks
from nbstate.launch.supervisor import Supervisor
from nbstate.launch.timeline import Event
from nbstate.telemetry.board import RankSnapshot
from nbstate.telemetry.diagnosis import Verdict

__all__ = ["Launch", "RankInfo", "last_launch", "stop_all", "unlisted"]

_TICK: Final = 0.1
_numbers = itertools.count(1)
_live: weakref.WeakSet[Launch] = weakref.WeakSet()
_last: list[Launch] = []
_unlisted: ContextVar[bool] = ContextVar("unlisted", default=False)


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
        self._showing = Showing(spec, self.start_method, self._output, self._look, lambda: self.alarm)
        self._arrived = threading.Event()
        self._conclusion = Conclusion(spec, self._output, self.cells)
        self._settled = threading.Lock()
        self._is_settled = False
        self._close_payload = choice.payload.close if choice.payload else _nothing
        with contextlib.ExitStack() as undo:
            undo.callback(self._close_payload)
            self._examiner = Examiner(spec.num_processes, self._look, self._ended, self.cells, self._say)
            undo.callback(self._examiner.close)
            hooks = Hooks(
                tick=self._tick, output=self._arrived.set, failure=self._failed, restart=self._announce_restart
            )

            def plans(port: int, listener: Fd, board: Fd) -> list[RankPlan]:
                return make_plans(spec, choice, self._id, port, listener, board, self._examiner.dumps.fds)

            self._attempts = Attempts(spec, LocalEngine(choice.start_method), plans, self._output, hooks)
            undo.pop_all()
        _live.add(self)
        if not _unlisted.get():
            _last[:] = [self]

    def begin(self) -> None:
        """Show the dashboard and start the ranks. Called once, by the launcher, on the thread of the cell."""
        try:
            self._showing.begin(LaunchControls(self))
            self._attempts.begin()
        except BaseException:
            if not self._attempts.begun:
                self._attempts.current.close()
                self._examiner.close()
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

    def _ended(self) -> frozenset[int]:
        """The ranks whose processes have ended."""
        if self.done:
            return frozenset(range(self.spec.num_processes))
        return frozenset(state.handle.rank for state in list(self._supervisor.ranks) if state.ended)

    def _tick(self) -> None:
        supervisor = self._supervisor
        self._examiner.watch.tick(active=not supervisor.stopped_by and supervisor.cause is None)
        self._showing.tick()

    def _say(self, text: str) -> None:
        """Put text of nbstate's own into the cell, in its place among the ranks' lines."""
        self._output.say(text)
        self._arrived.set()

    def _failed(self, cause: Ending | None) -> None:
        """Keep the board as it was when the launch failed, before the other ranks are ended."""
        snapshots, now = self._attempts.current.keep()
        if cause is None:
            self._conclusion.note_timeout(self._examiner.examine(SHORT), snapshots, now)
        else:
            places = self._examiner.find_places() if cause.hearsay else {}
            self._conclusion.note_failure(cause, snapshots, now, places)

    def _announce_restart(self, attempts: int) -> None:
        self._examiner.watch.rest()  # no thread of ours is in the middle of anything when ranks are forked
        self._say(self._conclusion.take_restart(attempts))

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
        if self._conclusion.error is not None:
            raise self._conclusion.error
        return [self._conclusion.results[rank] for rank in range(self.spec.num_processes)]

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

    def timeline(self) -> list[Event]:
        """What has happened so far, event by event; ``Event`` says what is exact and what is sampled.

        Examples
        --------
        ``pandas.DataFrame(launch.timeline())`` is a table of them.
        """
        return self._showing.events()

    def report(self, path: str | os.PathLike[str] | None = None) -> Report:
        """A page about the launch, for a notebook to show, to be kept or to be mailed.

        Parameters
        ----------
        path : str or PathLike, optional
            Where to write it as well.
        """
        report = self._showing.report(self._conclusion.error)
        if path is not None:
            report.save(path)
        return report

    def stacks(self, native: bool = False) -> Stacks:
        """Python stacks of every thread of every rank, also of ranks that are stuck in C++.

        Parameters
        ----------
        native : bool
            Show the C and C++ frames between the Python ones too, through ``py-spy``.

        Returns
        -------
        Stacks
            Ranks whose stacks are equal are shown together, and why a rank has none.

        Raises
        ------
        LaunchError
            ``native`` was asked for where ``py-spy`` is not installed, or may not look into the ranks.
        """
        return self._examiner.stacks(native)

    def diagnose(self) -> Verdict:
        """Say what is wrong, if anything is, by the board and by what the ranks' processes and stacks show."""
        return self.examine().verdict

    @property
    def alarm(self) -> Verdict | None:
        """What was found when the launch had come to a stand; None while it goes on, or if nothing is wrong."""
        return self._examiner.watch.verdict

    def examine(self) -> Finding:
        """The same with what was seen of each rank, as text for a person."""
        return self._examiner.examine()

    def __repr__(self) -> str:
        state = "running"
        if self.done:
            error = self._conclusion.error
            state = "finished" if error is None else f"ended by {type(error).__name__}"
        ranks = "1 rank" if self.spec.num_processes == 1 else f"{self.spec.num_processes} ranks"
        return f"<Launch of {self.spec.title} on {ranks}, {self.start_method}, {state}>"

    def _settle(self, write: notebook.Writer | None, hurried: Callable[[], bool]) -> None:
        """Once all ranks have ended: the results or the error, the last output, the last picture. Done once."""
        with self._settled:
            if self._is_settled:
                return
            self._attempts.join()
            self._examiner.close()
            self._showing.pour_the_rest(write, hurried)
            self._conclusion.draw(self._attempts)
            for line in self._conclusion.late_deaths(self._supervisor):
                self._showing.say(line, write)
            self._attempts.current.close()
            self._close_payload()
            _live.discard(self)
            self._conclusion.show(self._showing.finish)
            self._is_settled = True


def _nothing() -> None:
    """Stand in for a clean-up where there is nothing to clean up."""


def _exitcode(states: list[Any], rank: int) -> int | None:
    return states[rank].exitcode if rank < len(states) else None


def last_launch() -> Launch | None:
    """The newest launch of this kernel, or None."""
    return _last[0] if _last else None


@contextlib.contextmanager
def unlisted() -> Iterator[None]:
    """Keep the launches that are begun within, on this thread, from becoming the ``last_launch``."""
    token = _unlisted.set(True)
    try:
        yield
    finally:
        _unlisted.reset(token)


def stop_all() -> None:
    """End every launch that still runs; for the kernel's own end."""
    for launch in list(_live):
        launch.stop(grace=0.0)
    for launch in list(_live):
        launch.wait(timeout=5.0)


# At its own end a process waits for the children that multiprocess has made, but not before this, which came later.
atexit.register(stop_all)

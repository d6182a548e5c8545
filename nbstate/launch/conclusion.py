"""What a launch comes to: its results in rank order, or the one error that says why there are none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from nbstate.errors import LaunchStoppedError, LaunchTimeoutError, RankError
from nbstate.launch.attempts import Attempts
from nbstate.launch.interrupts import run_torn
from nbstate.launch.messages import Result
from nbstate.launch.observing import Finding
from nbstate.launch.outcome import Ending, doing, exit_name, headline, rank_error, unsendable_error
from nbstate.launch.output import Output
from nbstate.launch.shipping import unpack_result
from nbstate.launch.spec import LaunchSpec
from nbstate.launch.supervisor import Supervisor
from nbstate.telemetry.board import RankSnapshot

__all__ = ["Conclusion"]

_TAIL: Final = 300  # lines of the guilty rank's output to find its last words in, before Python's dump of a crash


class Conclusion:
    """Of one launch; it is drawn when all ranks are gone, from what was noted when the launch failed.

    Parameters
    ----------
    spec : LaunchSpec
        What was asked for.
    output : Output
        What the ranks have printed.
    cells : mapping of str to str
        File names of cells to what the notebook calls them.

    Attributes
    ----------
    results : dict of int to object
        What ranks have returned.
    error : BaseException or None
        Why the launch has no results, if it has none.
    """

    def __init__(self, spec: LaunchSpec, output: Output, cells: Mapping[str, str]) -> None:
        self.results: dict[int, Any] = {}
        self.error: BaseException | None = None
        self._spec, self._output, self._cells = spec, output, cells
        self._said = ""
        self._places: Mapping[int, str] = {}

    def note_failure(
        self, cause: Ending, snapshots: Sequence[RankSnapshot], now: int, places: Mapping[int, str]
    ) -> None:
        """Note why an attempt failed, before its other ranks are ended.

        Parameters
        ----------
        cause : Ending
            The rank that is the cause.
        snapshots, now
            The board at that moment.
        places : mapping of int to str
            Where ranks were in code of their own, as far as that is known.
        """
        self._said, self._places = headline(cause, snapshots, now, self._cells), places

    def note_timeout(self, finding: Finding, snapshots: Sequence[RankSnapshot], now: int) -> None:
        """Note that the launch took too long, and what was found; otherwise as ``note_failure``."""
        first, *rest = finding.lines
        evidence = "".join(f"\n  {line}" for line in rest)
        shown = "".join(f"\n  rank {s.rank} {doing(s, now, self._cells, finding.place(s.rank))}" for s in snapshots)
        timeout = f"the launch took longer than its timeout of {self._spec.timeout:g} s"
        self._said = f"{timeout}: {first}{evidence}\n\nWhen it was ended:{shown}"

    def take_restart(self, attempts: int) -> str:
        """What to say of a failure that leads to another attempt; it is forgotten then."""
        world, total = self._spec.num_processes, self._spec.max_restarts + 1
        again = "restarting it" if world == 1 else f"restarting all {world} ranks"
        said, self._said, self._places = self._said, "", {}
        return f"nbstate: {said}; {again} (attempt {attempts + 1} of {total})"

    def draw(self, attempts: Attempts) -> None:
        """Unpack the results, or find the error. On the main thread an interrupt may tear the unpacking."""
        unpacked = run_torn(lambda: self._unpack(attempts.current.supervisor))
        self.error = self._find_error(attempts) if unpacked else KeyboardInterrupt()

    def show(self, finish: Callable[[str, str, tuple[int, ...]], None]) -> None:
        """Give the dashboard its last state, its sentence, and the guilty ranks."""
        error, said = self.error, self._said
        if error is None:
            finish("finished", said, ())
        elif isinstance(error, KeyboardInterrupt):
            finish("interrupted", said, ())
        elif isinstance(error, LaunchStoppedError):
            finish("stopped", said, ())
        else:
            guilty = (error.rank,) if isinstance(error, RankError) else ()
            finish("failed", said or f"{type(error).__name__}: {error}", guilty)

    @staticmethod
    def late_deaths(supervisor: Supervisor) -> list[str]:
        """A line on each rank that was ended once its result had arrived."""
        return [
            f"nbstate: rank {rank} was ended by {exit_name(code)} after its result had arrived"
            for rank, code in supervisor.late_deaths
        ]

    def _unpack(self, supervisor: Supervisor) -> None:
        for state in supervisor.ranks:
            if not isinstance(state.message, Result):
                continue
            rank = state.handle.rank
            try:
                self.results[rank] = unpack_result(state.message.data)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # a user's __setstate__ may raise anything
                self.error = unsendable_error(rank, "result", f"{type(error).__name__}: {error}", {})

    def _find_error(self, attempts: Attempts) -> BaseException | None:
        supervisor = attempts.current.supervisor
        broken = attempts.error or supervisor.start_error
        if broken is not None:
            return broken
        if supervisor.cause is not None:
            return self._rank_error(supervisor.cause, attempts)
        if supervisor.stopped_by == "timeout":
            return LaunchTimeoutError(self._said)
        if supervisor.stopped_by == "interrupted":
            return KeyboardInterrupt()
        if supervisor.stopped_by == "stopped":
            return LaunchStoppedError("the launch was stopped on request before its ranks were done")
        for rank, message in supervisor.unsendable:
            return unsendable_error(
                rank, message.type_name, f"{message.report.type_name}: {message.report.message}", self.results
            )
        if self.error is not None:
            self.error.results = dict(self.results)  # type: ignore[attr-defined]
        return self.error

    def _rank_error(self, cause: Ending, attempts: Attempts) -> RankError:
        snapshots, now = attempts.current.look()
        error = rank_error(
            cause,
            snapshots,
            now,
            self._cells,
            self._output.tail(cause.rank, _TAIL),
            self.results,
            attempts.current.supervisor.endings,
            self._places,
        )
        number = attempts.current.number
        if number:
            error.args = (f"{error}\n\nThis ended attempt {number + 1} of {self._spec.max_restarts + 1}.",)
        return error

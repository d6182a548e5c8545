"""How each rank ended, which of them is the cause, and the one error that says so.

When rank 1 raises, rank 0's collective fails with "connection closed by peer". The cause is the first by this order:
an exception of the user's, a death (signal, ``os._exit``), a lost connection, a time-out; among equals, who came first.
"""

from __future__ import annotations

import pickle
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nbstate.errors import RankError, ShippingError
from nbstate.launch.report import Blame, ErrorReport, name_cells
from nbstate.telemetry.board import Phase, RankSnapshot
from nbstate.telemetry.source import show_line

__all__ = ["Ending", "doing", "exit_name", "first_cause", "rank_error", "unsendable_error"]


@dataclass(frozen=True)
class Ending:
    """How one rank failed. ``at`` is ``time.monotonic()`` of the moment the kernel learnt of it."""

    rank: int
    blame: Blame
    at: float
    report: ErrorReport | None = None
    exitcode: int | None = None

    @property
    def name(self) -> str:
        """The exception's class, the signal, or the exit code."""
        if self.report is not None:
            return self.report.type_name
        if self.blame is Blame.INTERRUPTED:
            return "KeyboardInterrupt"
        return exit_name(self.exitcode)


def exit_name(code: int | None) -> str:
    """``"SIGKILL"`` for -9, ``"exit code 3"`` for 3."""
    if code is None:
        return "no exit code"
    if code < 0:
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"
    return f"exit code {code}"


def first_cause(endings: Sequence[Ending]) -> Ending | None:
    """The failure that brought about the others."""
    return min(endings, key=lambda ending: (ending.blame, ending.at), default=None)


def doing(snapshot: RankSnapshot, now: int, cells: Mapping[str, str]) -> str:
    """What a rank is doing, for a sentence that begins with its number.

    Parameters
    ----------
    snapshot : RankSnapshot
        What the board says of it.
    now : int
        ``time.monotonic_ns()``.
    cells : mapping of str to str
        File names of cells to what the notebook calls them.
    """
    step = f", step {snapshot.step}" if snapshot.step else ""
    if snapshot.in_barrier:
        where = show_line(snapshot.barrier_file, snapshot.barrier_line, cells)
        return f"waited in barrier #{snapshot.barrier} at {where} for {_seconds(now - snapshot.barrier_entered)}"
    if snapshot.in_collective:
        where = show_line(snapshot.collective_file, snapshot.collective_line, cells)
        since = _seconds(now - snapshot.collective_entered)
        return f"was in {snapshot.collective_name} #{snapshot.collective} at {where} for {since}"
    words = {
        Phase.ABSENT: "had not started",
        Phase.STARTING: "was starting",
        Phase.LOADER: f"waited for its data loader{step}",
        Phase.RETURNING: "was returning its result",
        Phase.FINISHED: "had finished",
        Phase.FAILED: "had failed too",
        Phase.STOPPED: "had been interrupted",
    }
    return words.get(snapshot.phase, f"ran its own code{step}")


def _seconds(nanoseconds: int) -> str:
    return f"{max(0, nanoseconds) / 1e9:.1f} s"


def rank_error(
    cause: Ending,
    snapshots: Sequence[RankSnapshot],
    now: int,
    cells: Mapping[str, str],
    tail: Sequence[str],
    results: Mapping[int, Any],
    endings: Sequence[Ending],
) -> RankError:
    """Build the one error of a launch."""
    others = {s.rank: doing(s, now, cells) for s in snapshots if s.rank != cause.rank}
    for ending in endings:
        if ending.rank in others and ending.report is not None and ending.blame > Blame.USER:
            others[ending.rank] += f" ({ending.name})" if "waited" in others[ending.rank] else f", then {ending.name}"
    traceback = "" if cause.report is None else name_cells(cause.report.text, cells)
    parts = [headline(cause, snapshots, now, cells)]
    if traceback:
        parts += ["", traceback]
    elif tail:
        parts += ["", "Its last output:", *(f"  {line}" for line in tail)]
    if others:
        parts += ["", "Meanwhile:", *(f"  rank {rank} {text}" for rank, text in sorted(others.items()))]
    error = RankError(
        "\n".join(parts),
        rank=cause.rank,
        cause_type=cause.name,
        traceback=traceback,
        others=others,
        log_tail=tail,
        results=results,
    )
    error.__cause__ = _exception_of(cause.report)
    return error


def headline(cause: Ending, snapshots: Sequence[RankSnapshot], now: int, cells: Mapping[str, str]) -> str:
    """One sentence: who, what and where."""
    if cause.report is not None:
        where = show_line(cause.report.filename, cause.report.line, cells)
        first_line = cause.report.message.strip().split("\n", 1)[0]
        what = f"{cause.report.type_name}: {first_line}" if first_line else cause.report.type_name
        return f"rank {cause.rank} raised {what}" + (f" ({where})" if where else "")
    if cause.blame is Blame.INTERRUPTED:
        return f"rank {cause.rank} alone was interrupted; it {doing(snapshots[cause.rank], now, cells)}"
    how = "was ended by" if (cause.exitcode or 0) < 0 else "left with"
    last = doing(snapshots[cause.rank], now, cells)
    return f"rank {cause.rank} {how} {cause.name} before it had a result; it {last}"


def _exception_of(report: ErrorReport | None) -> BaseException | None:
    if report is None or not report.pickled:
        return None
    try:
        error = pickle.loads(report.pickled)
    except KeyboardInterrupt:
        raise
    except BaseException:  # the class is the user's; its text is in the traceback anyway
        return None
    if not isinstance(error, BaseException):
        return None
    return error


def unsendable_error(rank: int, type_name: str, reason: str, results: Mapping[int, Any]) -> ShippingError:
    """The error for a result that cannot come back. The other ranks' results stay reachable in ``results``."""
    error = ShippingError(
        f"rank {rank} returned a {type_name} that cannot travel back: {reason}. Return what it is made of instead "
        "(plain values, arrays, tensors, a state_dict). The other ranks' results are in this error's .results"
    )
    error.results = dict(results)  # type: ignore[attr-defined]
    return error

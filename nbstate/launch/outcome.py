"""How each rank ended, which of them is the cause, and the one error that says so.

When rank 1 raises, rank 0's collective fails with "connection closed by peer". The cause is the first by this order:
an exception of the user's, a death (signal, ``os._exit``), a lost connection, a time-out; among equals, who came first.

Where the cause is only hearsay (a connection, a time-out, an abort in C++), the error's first line is what the board
says is wrong: "rank 0 waits in barrier #7, but rank 1 has finished without it".
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from nbstate.errors import RankError, ShippingError
from nbstate.launch import notebook
from nbstate.launch.report import Blame, ErrorReport, name_cells, rebuild
from nbstate.launch.tracebacks import COLOURS, NO_COLOURS, draw
from nbstate.telemetry.board import Phase, RankSnapshot
from nbstate.telemetry.hindsight import explain
from nbstate.telemetry.source import show_line

__all__ = [
    "Ending",
    "doing",
    "exit_name",
    "failing",
    "first_cause",
    "headline",
    "patience",
    "rank_error",
    "unsendable_error",
]

_WAIT_FOR_USERS: Final = 0.05  # seconds after a death in which the exception that brought it about may still arrive
_WAIT_FOR_CAUSE: Final = 0.3  # the same after hearsay
_FAILED: Final = "had failed too"
_TAIL: Final = 10  # lines of the guilty rank's output in the text
_DUMP: Final = re.compile(
    r"Fatal Python error: |Thread 0x|Current thread 0x|Extension modules: |Stack \(most recent call"
)


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

    @property
    def happened(self) -> float:
        """When it came to be: a rank that raised has said so itself, which is before the kernel learnt of it."""
        return self.at if self.report is None or not self.report.at else min(self.at, self.report.at)

    @property
    def reaction(self) -> bool:
        """Whether it may well be what a peer's end did to this rank: an abort in C++, a handler that leaves."""
        killed = self.exitcode is not None and self.exitcode < 0 and self.exitcode != -signal.SIGABRT
        return self.blame is Blame.DIED and not killed

    @property
    def hearsay(self) -> bool:
        """Whether it says only that something is wrong elsewhere, so that the board knows better."""
        return self.blame in (Blame.CONNECTION, Blame.TIMEOUT) or self.exitcode == -signal.SIGABRT


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
    return min(endings, key=lambda ending: (ending.blame, ending.reaction, ending.happened), default=None)


def patience(endings: Sequence[Ending], raised: Mapping[int, float]) -> float:
    """Seconds, from the first ending on, for which a better cause may still arrive.

    Parameters
    ----------
    endings : sequence of Ending
        What is known; not empty.
    raised : mapping of int to float
        Ranks whose function has raised, by the board, and when (``time.monotonic()``). One that raised before the
        cause that is known, and has not been heard, is still packing what it has to say.
    """
    cause = first_cause(endings)
    assert cause is not None
    heard = {ending.rank for ending in endings}
    if any(rank not in heard and (cause.blame or at < cause.happened) for rank, at in raised.items()):
        return _WAIT_FOR_CAUSE
    if cause.blame is Blame.USER:
        return 0.0
    return _WAIT_FOR_USERS if cause.blame is Blame.DIED else _WAIT_FOR_CAUSE


def doing(snapshot: RankSnapshot, now: int, cells: Mapping[str, str], place: str = "") -> str:
    """What a rank is doing, for a sentence that begins with its number.

    Parameters
    ----------
    snapshot : RankSnapshot
        What the board says of it.
    now : int
        ``time.monotonic_ns()``.
    cells : mapping of str to str
        File names of cells to what the notebook calls them.
    place : str
        Where it is in code of its own, as ``"In[5], line 14"``; empty if that is not known.
    """
    at = f", at {place}" if place else ""
    step = f", step {snapshot.step}" if snapshot.step else ""
    if snapshot.in_barrier:
        where = show_line(snapshot.barrier_file, snapshot.barrier_line, cells)
        return f"waited in barrier #{snapshot.barrier} at {where} for {_seconds(now - snapshot.barrier_entered)}"
    if snapshot.in_collective:
        where = show_line(snapshot.collective_file, snapshot.collective_line, cells)
        since = _seconds(now - snapshot.collective_entered)
        of = f" of {snapshot.collective_shape}" if snapshot.collective_shape else ""
        return f"was in {snapshot.collective_name} #{snapshot.collective}{of} at {where} for {since}"
    words = {
        Phase.ABSENT: "had not started",
        Phase.STARTING: "was starting",
        Phase.LOADER: f"waited for its data loader{step}{at}",
        Phase.RETURNING: "was returning its result",
        Phase.FINISHED: "had finished",
        Phase.FAILED: _FAILED,
        Phase.STOPPED: "had been interrupted",
    }
    return words.get(snapshot.phase, f"ran its own code{step}{at}")


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
    places: Mapping[int, str],
) -> RankError:
    """Build the one error of a launch; ``places`` is where ranks were in code of their own, as far as is known."""
    report, tail = cause.report, _last_words(tail)
    others = _others(cause, snapshots, now, cells, endings, places)
    traceback = "" if report is None else name_cells(report.text, cells)
    first = headline(cause, snapshots, now, cells)
    ends = []
    if tail and not traceback:
        ends += ["", "Its last output:", *(f"  {line}" for line in tail)]
    if others:
        ends += ["", "Meanwhile:", *(f"  rank {rank} {text}" for rank, text in sorted(others.items()))]
    error = RankError(
        "\n".join([first, *(["", traceback] if traceback else []), *ends]),
        rank=cause.rank,
        cause_type=cause.name,
        traceback=traceback,
        others=others,
        log_tail=tail,
        results=results,
        drawing=_drawing(first, report, cells, ends),
    )
    error.__cause__ = None if report is None else rebuild(report.pickled)
    return error


def _others(
    cause: Ending,
    snapshots: Sequence[RankSnapshot],
    now: int,
    cells: Mapping[str, str],
    endings: Sequence[Ending],
    places: Mapping[int, str],
) -> dict[int, str]:
    others = {s.rank: doing(s, now, cells, places.get(s.rank, "")) for s in snapshots if s.rank != cause.rank}
    for ending in endings:
        if ending.rank not in others:
            continue
        if ending.report is not None and ending.blame is Blame.USER:
            where = show_line(ending.report.filename, ending.report.line, cells)
            others[ending.rank] = f"raised {ending.name} later" + (f" ({where})" if where else "")
        elif ending.report is not None:
            others[ending.rank] += f" ({ending.name})" if "waited" in others[ending.rank] else f", then {ending.name}"
        elif ending.blame is Blame.DIED:
            others[ending.rank] += f", then {exit_name(ending.exitcode)}"
    return others


def _drawing(first: str, report: ErrorReport | None, cells: Mapping[str, str], ends: Sequence[str]) -> list[str]:
    """What a notebook shows; nothing outside IPython, which nobody would see."""
    shell = notebook.shell()
    if shell is None:
        return []
    palette = NO_COLOURS if str(getattr(shell, "colors", "")).lower() in ("nocolor", "") else COLOURS
    lines = [f"{palette.error}RankError{palette.end}: {first}"]
    if report is not None:
        lines += ["", *(draw(report.links, cells, palette) or name_cells(report.text, cells).split("\n"))]
    return [*lines, *ends]


def failing(snapshots: Sequence[RankSnapshot]) -> dict[int, float]:
    """Ranks whose function has raised, by the board, and when (``time.monotonic()``)."""
    return {s.rank: s.phase_since / 1e9 for s in snapshots if s.phase is Phase.FAILED}


def headline(cause: Ending, snapshots: Sequence[RankSnapshot], now: int, cells: Mapping[str, str]) -> str:
    """One sentence: who, what and where."""
    if cause.hearsay:
        verdict = explain(snapshots, now, cells)
        if verdict is not None:
            return f"{verdict.sentence}; {_said_briefly(cause, cells)}"
    return _said(cause, snapshots, now, cells)


def _said_briefly(cause: Ending, cells: Mapping[str, str]) -> str:
    """The same where a verdict has said the rest."""
    if cause.report is None:
        return f"rank {cause.rank} was ended by {cause.name}"
    where = show_line(cause.report.filename, cause.report.line, cells)
    return f"rank {cause.rank} raised {cause.name}" + (f" ({where})" if where else "")


def _said(cause: Ending, snapshots: Sequence[RankSnapshot], now: int, cells: Mapping[str, str]) -> str:
    """What the rank itself has to say."""
    if cause.report is not None:
        where = show_line(cause.report.filename, cause.report.line, cells)
        first_line = cause.report.message.strip().split("\n", 1)[0]
        what = f"{cause.report.type_name}: {first_line}" if first_line else cause.report.type_name
        return f"rank {cause.rank} raised {what}" + (f" ({where})" if where else "")
    if cause.blame is Blame.INTERRUPTED:
        return f"rank {cause.rank} alone was interrupted; it {doing(snapshots[cause.rank], now, cells)}"
    how = "was ended by" if (cause.exitcode or 0) < 0 else "left with"
    last = doing(snapshots[cause.rank], now, cells)
    if last == _FAILED:
        last = "had raised an exception and did not get to tell it"
    return f"rank {cause.rank} {how} {cause.name} before it had a result; it {last}"


def _last_words(tail: Sequence[str]) -> tuple[str, ...]:
    """The last lines of output, without Python's own dump of the stack of a rank that crashed."""
    lines = list(tail)
    dump = next((i for i, line in enumerate(lines) if _DUMP.match(line)), None)
    if dump is not None:
        lines = lines[:dump]
    return tuple(lines[-_TAIL:])


def unsendable_error(rank: int, type_name: str, reason: str, results: Mapping[int, Any]) -> ShippingError:
    """The error for a result that cannot come back. The other ranks' results stay reachable in ``results``."""
    error = ShippingError(
        f"rank {rank} returned a {type_name} that cannot travel back: {reason}. Return what it is made of instead "
        "(plain values, arrays, tensors, a state_dict). The other ranks' results are in this error's .results"
    )
    error.results = dict(results)  # type: ignore[attr-defined]
    return error

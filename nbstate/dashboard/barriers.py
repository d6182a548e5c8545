"""Barriers as a frame shows them: the newest one with who is missing, and the last ones with who was last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, TypedDict

from nbstate.telemetry.board import HISTORY, Barrier, RankSnapshot, missing_from_barrier
from nbstate.telemetry.diagnosis import name_ranks
from nbstate.telemetry.source import show_line

__all__ = ["Meeting", "OpenBarrier", "Straggler", "history", "newest_barrier", "straggler"]

SHOWN: Final = 6  # meetings in the history
_ENOUGH: Final = 4  # fewer meetings than this say nothing about who is slow
_WORTH_A_WORD: Final = 0.001  # seconds of spread: below, who came last is chance, and costs nobody anything


class OpenBarrier(TypedDict):
    """The newest barrier.

    ``open`` until every rank has come; then ``spread`` (seconds between first and last arrival) and ``last`` (the rank
    that came last) are known and ``missing`` is empty. ``missing_text``: the missing as people say them. ``since``:
    seconds from the start of the launch to the first arrival.
    """

    number: int
    open: bool
    arrived: int
    missing: list[int]
    missing_text: str
    since: float
    where: str
    spread: float | None
    last: int | None


class Meeting(TypedDict):
    """A barrier to which every rank has come. ``spread``: seconds between first and last arrival."""

    number: int
    where: str
    spread: float
    last: int


class Straggler(TypedDict):
    """A rank that came last more often than chance would have it."""

    rank: int
    times: int
    of: int


def newest_barrier(snapshots: Sequence[RankSnapshot], started: int, cells: Mapping[str, str]) -> OpenBarrier | None:
    """The barrier that is open now, or else the last one. None before the first.

    Parameters
    ----------
    snapshots : sequence of RankSnapshot
        The board, in rank order.
    started : int
        ``monotonic_ns`` of the start of the launch.
    cells : mapping of str to str
        File name of a cell to what the notebook calls it.
    """
    number, arrived, missing = missing_from_barrier(snapshots)
    if not missing:
        number = max((s.barrier for s in snapshots), default=0)
        if number == 0:
            return None
        # Numbers can differ without an open barrier: a rank that returned early and will never come.
        arrived = tuple(s.rank for s in snapshots if s.barrier >= number)
        missing = tuple(s.rank for s in snapshots if s.barrier < number)
    entries = [(s, entry) for s in snapshots if (entry := _entry(s, number)) is not None]
    if not entries:
        return None
    first_in, first = min(entries, key=lambda pair: pair[1].entered)
    last_in, last = max(entries, key=lambda pair: pair[1].entered)
    complete = not missing
    return OpenBarrier(
        number=number,
        open=not complete,
        arrived=len(arrived),
        missing=list(missing),
        missing_text=name_ranks(missing) if missing else "",
        since=max(0.0, round((first.entered - started) / 1e9, 3)),
        where=_where(first_in, first, cells),
        spread=_seconds(last.entered - first.entered) if complete else None,
        last=last_in.rank if complete else None,
    )


def history(snapshots: Sequence[RankSnapshot], cells: Mapping[str, str], shown: int = SHOWN) -> list[Meeting]:
    """The last barriers to which every rank came, newest last.

    Each slot keeps its last ``HISTORY`` barriers, so ranks may be that far apart and still be compared.
    """
    if not snapshots:
        return []
    latest = min(s.barrier for s in snapshots)
    meetings = []
    for number in range(max(1, latest - shown + 1), latest + 1):
        entries = [(s, entry) for s in snapshots if (entry := _entry(s, number)) is not None]
        if len(entries) < len(snapshots):
            continue
        _, first = min(entries, key=lambda pair: pair[1].entered)
        last_in, last = max(entries, key=lambda pair: pair[1].entered)
        meetings.append(
            Meeting(
                number=number,
                where=_where(last_in, last, cells),
                spread=_seconds(last.entered - first.entered),
                last=last_in.rank,
            )
        )
    return meetings


def straggler(meetings: Sequence[Meeting], world_size: int) -> Straggler | None:
    """The rank with a habit of coming last, if there is one and the meetings are enough to tell.

    By chance each rank is last in one of ``world_size``. A habit begins halfway between that and always. How long the
    others waited weighs nothing: one long wait is in the table, a habit is what this line is for.
    """
    late = Counter(meeting["last"] for meeting in meetings if meeting["spread"] >= _WORTH_A_WORD)
    if len(meetings) < _ENOUGH or not late:
        return None
    ((rank, times),) = late.most_common(1)
    habit = len(meetings) * (1 + 1 / world_size) / 2
    return Straggler(rank=rank, times=times, of=len(meetings)) if times >= habit else None


def _entry(snapshot: RankSnapshot, number: int) -> Barrier | None:
    """A rank's own record of one barrier. The ring is in order and without gaps: its last entry says where to look."""
    ring = snapshot.barriers
    if not ring or snapshot.barrier - number >= HISTORY:
        return None
    at = number - ring[0].number
    if 0 <= at < len(ring) and ring[at].number == number:
        return ring[at]
    return next((entry for entry in ring if entry.number == number), None)


def _where(snapshot: RankSnapshot, entry: Barrier, cells: Mapping[str, str]) -> str:
    """The line of a barrier. A slot forgets the files of old barriers: such a line stands alone."""
    file = entry.file
    if not file and (entry.number == snapshot.barrier or entry.line == snapshot.barrier_line):
        file = snapshot.barrier_file
    if file:
        return show_line(file, entry.line, cells)
    return f"line {entry.line}" if entry.line else ""


def _seconds(nanoseconds: int) -> float:
    """Nanoseconds as seconds, to the tenth of a millisecond."""
    return round(nanoseconds / 1e9, 4)

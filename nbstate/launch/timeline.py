"""What happened in a launch, and when: events put together from looks at the board.

The board holds the present. A ``Timeline`` compares each look with the one before and writes down what has changed, so
that there is a past to tell of once the ranks are gone. It only reads snapshots, so it costs the ranks nothing.

How a launch uses it, on the thread of its attempts::

    timeline = Timeline(spec.num_processes, started)                  # started: monotonic_ns of the launch
    if timeline.is_due(time.monotonic_ns()):                          # on every tick
        timeline.record(*look())                                      # snapshots, now
    timeline.record(*look(), last=True)                               # once all ranks have ended
    timeline.events(cells)                                            # Launch.timeline(); from any thread

What is exact: when a phase that a look has found began, and every barrier (see ``meetings``). What is sampled: whatever
began and ended between two looks, a tenth of a second apart, is not in it. In a loop that changes its phase a thousand
times a second, the phases found are a fair sample of where the time went.

Memory is bounded. When there are too many events the timeline thins out: of what was sampled it keeps every second
look, then every fourth, and looks as seldom from there on. A launch of ten hours is told as well as one of a minute, in
coarser steps, and an event of kind ``"note"`` says so.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypedDict

from nbstate.launch.meetings import Ledger, Meeting
from nbstate.telemetry.board import Flag, Phase, RankSnapshot
from nbstate.telemetry.source import show_line

__all__ = ["EVERY", "Event", "Timeline"]

EVERY: Final = 100_000_000
"""Nanoseconds between two looks."""
_MOST: Final = 20_000  # sampled events that are kept,
_MOST_PER_RANK: Final = 200  # or this many times the ranks if that is more
_STRIP: Final = 64  # steps whose flags the board keeps
_NOBODY: Final = -1
# Never thinned out: they are few, and the story does not hold together without them.
_WEIGHTY: Final = frozenset({Phase.STARTING, Phase.RETURNING, Phase.FINISHED, Phase.FAILED, Phase.STOPPED})


class Event(TypedDict):
    """One thing that happened. ``pandas.DataFrame(launch.timeline())`` makes a table of them.

    ``time`` and ``seconds`` are in seconds, the former from the start of the launch. ``seconds`` is how long it took,
    None if that is not known or it was not over. ``where`` is the user's line as people call it, ``line`` its number.
    ``rank`` is -1 for what concerns them all; ``attempt`` counts restarts, from 0.

    ============ ==================================== ================================== ============================
    ``kind``     ``name``                             ``number``                         ``seconds``
    ============ ==================================== ================================== ============================
    phase        the phase, as ``"running"``                                             until the next one
    step         flags of the steps since the last    steps so far                       since the last such event
                 such event: 1 synchronised, 0 not
    epoch                                             the epoch, from 0
    skipped                                           optimizer steps skipped so far
    collective   the operation                        its own, 0 for part of the world   in it
    barrier                                           its own                            in it
    restart                                           the attempt that begins
    waited                                            barriers that the rank has left    in all of them
    last                                              barriers to which it came last     held up the others, in all
    note         a sentence                           how many it is about
    ============ ==================================== ================================== ============================

    ``waited`` and ``last`` come at the end, one of each per rank, and count what was seen, kept or not.
    """

    time: float
    rank: int
    attempt: int
    kind: str
    name: str
    number: int
    where: str
    line: int
    seconds: float | None


@dataclass(slots=True)
class _Row:
    """A sampled event as it is kept. Times in nanoseconds; ``took`` is -1 if unknown."""

    look: int
    time: int
    rank: int
    attempt: int
    kind: str
    name: str = ""
    number: int = 0
    file: str = ""
    line: int = 0
    took: int = -1
    weighty: bool = False


class Timeline:
    """Writes down what changes on the board.

    Parameters
    ----------
    world_size : int
        Number of ranks.
    started : int
        ``time.monotonic_ns()`` of the start of the launch: the zero of every time that is told.

    Examples
    --------
    >>> from nbstate.telemetry.board import Board, Phase
    >>> board = Board.create(1)
    >>> timeline = Timeline(1, started=0)
    >>> board.slot(0).write_phase(Phase.RUNNING, 2_000_000_000)
    >>> timeline.record(board.snapshot(), now=2_050_000_000)
    >>> [(event["time"], event["name"]) for event in timeline.events() if event["kind"] == "phase"]
    [(2.0, 'running')]
    >>> board.close()
    """

    def __init__(self, world_size: int, started: int) -> None:
        self._started = started
        self._most = max(_MOST, _MOST_PER_RANK * world_size)
        self._ledger = Ledger(world_size)
        self._lock = threading.Lock()
        self._rows: list[_Row] = []
        self._before: list[RankSnapshot | None] = [None] * world_size
        self._open: list[_Row | None] = [None] * world_size  # the collective of each rank that was newest
        self._stepped = [0] * world_size  # when each rank's newest step event was
        self._look = 0
        self._stride = 1
        self._thinned = 0
        self._next = 0
        self._attempt = 0
        self._ended = 0

    def is_due(self, now: int) -> bool:
        """Whether it is time for another look: saves the cost of one that would not be taken in."""
        return now >= self._next

    def record(self, snapshots: Sequence[RankSnapshot], now: int, last: bool = False) -> None:
        """Take in one look at the board. More than ten a second are not taken in.

        Parameters
        ----------
        snapshots : sequence of RankSnapshot
            The board, in rank order.
        now : int
            ``time.monotonic_ns()`` of the look.
        last : bool
            Whether there will be no other, so that this one counts however early it comes.
        """
        with self._lock:
            if not last and now < self._next:
                return
            self._next = now + EVERY
            self._look += 1
            if snapshots and snapshots[0].attempt != self._attempt:
                self._start_anew(snapshots[0].attempt, now)
            # Barriers are read each time: a slot keeps only the last few.
            sampled = last or self._look % self._stride == 0
            for snapshot in snapshots:
                before = self._before[snapshot.rank]
                if snapshot is before:
                    continue  # a slot that was not written gives the same object
                self._ledger.add(snapshot)
                if sampled or snapshot.phase in _WEIGHTY:
                    self._compare(before, snapshot, now)
                    self._before[snapshot.rank] = snapshot
            if last:
                self._ended = now
            if len(self._rows) > self._most:
                self._thin_out()

    def events(self, cells: Mapping[str, str] | None = None) -> list[Event]:
        """Everything that is known so far, in the order in which it happened.

        Parameters
        ----------
        cells : mapping of str to str, optional
            File name of a cell to what the notebook calls it (``"In[5]"``).
        """
        with self._lock:  # only for a copy: the ranks' own thread must not wait while all is told
            rows, meetings = list(self._rows), list(self._ledger)
            at = self._ended or max(self._started, self._next - EVERY)
            summary = [*self._tell_tallies(at), *self._tell_notes(at)] if self._look else []
        told = [*self._tell_rows(rows, cells), *self._tell_meetings(meetings, cells)]
        told.sort(key=lambda event: (event["time"], event["rank"]))
        return [*told, *summary]

    def _start_anew(self, attempt: int, now: int) -> None:
        self._attempt = attempt
        self._ledger.start_anew()
        self._before = [None] * len(self._before)
        self._open = [None] * len(self._open)
        self._stepped = [0] * len(self._stepped)
        self._rows.append(_Row(self._look, now, _NOBODY, attempt, "restart", number=attempt, weighty=True))

    def _compare(self, before: RankSnapshot | None, new: RankSnapshot, now: int) -> None:
        """Write down in what a rank differs from the last look."""
        phase = Phase.ABSENT if before is None else before.phase
        if new.phase is not phase:
            since = new.phase_since or now
            self._add(new, since, "phase", name=new.phase.name.lower(), weighty=new.phase in _WEIGHTY)
        self._compare_collective(new)
        steps = new.step - (before.step if before else 0)
        if steps > 0:
            took = now - self._stepped[new.rank] if self._stepped[new.rank] else -1
            self._stepped[new.rank] = now
            self._add(new, now, "step", name=_flags(new, steps), number=new.step, took=took)
        if new.flag(Flag.KNOWN) and new.epoch != (before.epoch if before and before.flag(Flag.KNOWN) else 0):
            self._add(new, now, "epoch", number=new.epoch)
        if new.skipped_steps > (before.skipped_steps if before else 0):
            self._add(new, now, "skipped", number=new.skipped_steps)

    def _compare_collective(self, new: RankSnapshot) -> None:
        entered, row = new.collective_entered, self._open[new.rank]
        if not entered:
            return
        if row is None or row.time != entered:
            number = 0 if new.collective_partial else new.collective
            row = self._add(
                new, entered, "collective", new.collective_name, number, new.collective_file, new.collective_line
            )
            self._open[new.rank] = row
        if not new.in_collective:
            row.took = new.collective_left - entered

    def _add(
        self,
        snapshot: RankSnapshot,
        time: int,
        kind: str,
        name: str = "",
        number: int = 0,
        file: str = "",
        line: int = 0,
        took: int = -1,
        weighty: bool = False,
    ) -> _Row:
        row = _Row(self._look, time, snapshot.rank, self._attempt, kind, name, number, file, line, took, weighty)
        self._rows.append(row)
        return row

    def _thin_out(self) -> None:
        """Keep what would have been found by half as many looks."""
        self._stride *= 2
        kept: list[_Row] = []
        newest: dict[tuple[int, str, int, int], _Row] = {}
        for row in reversed(self._rows):
            # Of what changed between two looks of the new kind the later one would find the last.
            key = row.rank, row.kind, row.attempt, -(-row.look // self._stride)
            later = newest.get(key)
            if later is None or row.weighty:
                newest[key] = row
                kept.append(row)
            elif row.kind == "step":
                later.name = (row.name + later.name)[-_STRIP:]
                later.took = row.took + later.took if row.took >= 0 else -1
        kept.reverse()
        if len(kept) > 3 * self._most // 4:  # mostly weighty ones, of restarts without end: let the middle go
            kept = kept[: self._most // 4] + kept[-self._most // 4 :]
        self._thinned += len(self._rows) - len(kept)
        self._rows = kept

    def _tell_rows(self, rows: Sequence[_Row], cells: Mapping[str, str] | None) -> Iterator[Event]:
        phases: dict[int, list[_Row]] = {}
        for row in rows:
            if row.kind == "phase":
                mine = phases.setdefault(row.rank, [])
                # What stood between two alike was thinned out.
                if not mine or (mine[-1].name, mine[-1].attempt) != (row.name, row.attempt):
                    mine.append(row)
            else:
                yield self._tell_row(row, row.took, cells)
        for mine in phases.values():
            for row, after in zip(mine, [*mine[1:], None], strict=True):
                until = after.time if after else self._ended
                yield self._tell_row(row, max(0, until - row.time) if until else -1, cells)

    def _tell_row(self, row: _Row, took: int, cells: Mapping[str, str] | None) -> Event:
        where = show_line(row.file, row.line, cells)
        return self._event(row.time, row.rank, row.attempt, row.kind, row.name, row.number, where, row.line, took)

    def _tell_meetings(self, meetings: Sequence[Meeting], cells: Mapping[str, str] | None) -> Iterator[Event]:
        for meeting in meetings:
            where = show_line(meeting.file, meeting.line, cells)
            for rank, entered in enumerate(meeting.entered):
                if entered:
                    took = meeting.left[rank] - entered if meeting.left[rank] else -1
                    yield self._event(
                        entered, rank, meeting.attempt, "barrier", "", meeting.number, where, meeting.line, took
                    )

    def _tell_tallies(self, at: int) -> Iterator[Event]:
        for rank, tally in enumerate(self._ledger.tallies):
            yield self._event(at, rank, self._attempt, "waited", number=tally.passed, took=tally.waited)
            yield self._event(at, rank, self._attempt, "last", number=tally.last, took=tally.held_up)

    def _tell_notes(self, at: int) -> Iterator[Event]:
        apart = f"{self._stride * EVERY / 1e9:g} s"
        notes = (
            (self._thinned, f"a long launch: phases, steps and collectives are told by looks {apart} apart"),
            (self._ledger.left_out, "barriers left out: kept are the first, the newest and those of the widest spread"),
            (self._ledger.unseen, "entries into barriers went by between two looks, and are not counted"),
        )
        for count, sentence in notes:
            if count:
                yield self._event(at, _NOBODY, self._attempt, "note", sentence, count)

    def _event(
        self,
        time: int,
        rank: int,
        attempt: int,
        kind: str,
        name: str = "",
        number: int = 0,
        where: str = "",
        line: int = 0,
        took: int = -1,
    ) -> Event:
        return Event(
            time=max(0.0, (time - self._started) / 1e9),
            rank=rank,
            attempt=attempt,
            kind=kind,
            name=name,
            number=number,
            where=where,
            line=line,
            seconds=None if took < 0 else took / 1e9,
        )


def _flags(snapshot: RankSnapshot, steps: int) -> str:
    """Whether each of the last steps synchronised its gradients, oldest first."""
    shown = min(steps, _STRIP)
    return format(snapshot.sync_history & ((1 << shown) - 1), f"0{shown}b")

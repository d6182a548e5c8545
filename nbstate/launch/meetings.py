"""Every barrier of a launch, put together from what each rank's slot keeps of its last ones.

A slot keeps ``HISTORY`` barriers, and a look at the board comes every tenth of a second. So as long as a rank passes
no more than that between two looks, each of its barriers is known to the nanosecond; those that went by unseen are
counted. Memory is bounded: of a long run the first barriers stay, the newest, and of those between them the ones that
ranks came to furthest apart. What is added up (``Tally``) is of all that were seen, kept or not.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from nbstate.telemetry.board import Barrier, RankSnapshot

__all__ = ["WORTH_COUNTING", "Ledger", "Meeting", "Tally"]

WORTH_COUNTING: Final = 1_000_000
"""Nanoseconds between first and last arrival. Below, who came last is chance, and costs nobody anything."""
_ENTRIES: Final = 32_768  # of all ranks together; 16 bytes each
_FEWEST: Final = 64  # barriers that are kept in a world of any size


@dataclass
class Tally:
    """What one rank's barriers come to. Times in nanoseconds.

    Attributes
    ----------
    passed, waited : int
        Barriers that it has left, and the time it spent in them.
    last, held_up : int
        Barriers to which it came last by more than ``WORTH_COUNTING``, and by how much, after the first, in all.
    """

    passed: int = 0
    waited: int = 0
    last: int = 0
    held_up: int = 0


@dataclass
class Meeting:
    """One barrier of all ranks. ``entered`` and ``left`` have a place for each rank, 0 for what has not been seen."""

    attempt: int
    number: int
    file: str
    line: int
    entered: array[int]
    left: array[int]
    arrived: int = 0

    @property
    def complete(self) -> bool:
        """Whether every rank has been seen to come."""
        return self.arrived == len(self.entered)

    @property
    def spread(self) -> int:
        """Nanoseconds between the first and the last arrival so far."""
        came = [moment for moment in self.entered if moment]
        return max(came) - min(came) if came else 0


@dataclass
class Ledger:
    """Takes in snapshots, and keeps the barriers.

    Parameters
    ----------
    world_size : int
        Number of ranks.

    Attributes
    ----------
    left_out, unseen : int
        Barriers that were let go to bound the memory, and entries of single ranks that went by between two looks.
    tallies : list of Tally
        One per rank, over all attempts.
    """

    world_size: int
    left_out: int = 0
    unseen: int = 0
    tallies: list[Tally] = field(init=False)

    def __post_init__(self) -> None:
        self.tallies = [Tally() for _ in range(self.world_size)]
        self._limit = max(_FEWEST, _ENTRIES // self.world_size)
        self._kept: list[Meeting] = []
        self.start_anew()

    def start_anew(self) -> None:
        """Another attempt begins: its barriers are numbered from 1 again."""
        self._by_number: dict[int, Meeting] = {}
        self._done = [0] * self.world_size  # the newest barrier of each rank of which no more can be learnt

    def __iter__(self) -> Iterator[Meeting]:
        return iter(self._kept)

    def add(self, snapshot: RankSnapshot) -> None:
        """Take in what one rank's slot keeps."""
        rank, done = snapshot.rank, self._done[snapshot.rank]
        new = _newer(snapshot.barriers, done)
        if not new:
            return
        self.unseen += max(0, new[0].number - done - 1)
        for entry in new:
            self._note(snapshot, rank, entry)
            # One that was entered later shows that an earlier one is over, whether it was left or raised.
            if entry.left or entry is not new[-1]:
                self._done[rank] = entry.number
        if len(self._kept) > self._limit:
            self._let_go()

    def _note(self, snapshot: RankSnapshot, rank: int, entry: Barrier) -> None:
        meeting = self._by_number.get(entry.number)
        if meeting is None:
            meeting = self._open(snapshot, entry)
        if not meeting.entered[rank]:
            meeting.entered[rank] = entry.entered
            meeting.arrived += 1
            if meeting.complete:
                self._count_last(meeting)
        if entry.left and not meeting.left[rank]:
            meeting.left[rank] = entry.left
            self.tallies[rank].passed += 1
            self.tallies[rank].waited += entry.left - entry.entered

    def _open(self, snapshot: RankSnapshot, entry: Barrier) -> Meeting:
        blank = bytes(8 * self.world_size)
        meeting = Meeting(snapshot.attempt, entry.number, entry.file, entry.line, array("q", blank), array("q", blank))
        self._by_number[entry.number] = meeting
        self._kept.append(meeting)
        return meeting

    def _count_last(self, meeting: Meeting) -> None:
        spread = meeting.spread
        if self.world_size > 1 and spread >= WORTH_COUNTING:
            tally = self.tallies[meeting.entered.index(max(meeting.entered))]
            tally.last += 1
            tally.held_up += spread

    def _let_go(self) -> None:
        """Drop those of the middle to which the ranks came closest together."""
        first, newest = self._limit // 4, len(self._kept) - self._limit // 2
        middle = self._kept[first:newest]
        widest = sorted(middle, key=lambda meeting: meeting.spread, reverse=True)[: self._limit // 8]
        stay = {id(meeting) for meeting in widest}
        for meeting in middle:
            if id(meeting) not in stay:
                self.left_out += 1
                self._by_number.pop(meeting.number, None)
        self._kept[first:newest] = [meeting for meeting in middle if id(meeting) in stay]


def _newer(ring: Sequence[Barrier], done: int) -> list[Barrier]:
    """The entries of a ring after number ``done``, oldest first. Most looks find few, at its end."""
    found = []
    for entry in reversed(ring):
        if entry.number <= done:
            break
        found.append(entry)
    found.reverse()
    return found

"""What the findings of ``diagnosis`` look at: a world of snapshots, and the operations in which its ranks are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from nbstate.telemetry.board import Phase, RankSnapshot
from nbstate.telemetry.source import show_line

__all__ = ["MISMATCH_AFTER", "Operation", "World", "last_operation", "place_of"]

_SECOND: Final = 1_000_000_000
MISMATCH_AFTER: Final = _SECOND  # ns that a rank waits before its operation is compared with the others'


@dataclass(frozen=True)
class Operation:
    """The barrier or collective that a rank entered last.

    ``place`` is its number among all operations of the whole world, 0 if only a part of the world takes part.
    ``waiting`` says whether the rank is still in it; ``entered`` is in ``time.monotonic_ns()``. ``nbytes`` and
    ``shape`` are what the rank put in.
    """

    rank: int
    place: int
    name: str
    number: int
    line: str
    entered: int
    waiting: bool
    nbytes: int = 0
    shape: str = ""

    @property
    def size(self) -> tuple[int, str]:
        """What must be the same on all ranks: bytes and dtype. Another shape of the same size is no fault."""
        return self.nbytes, self.shape.rpartition(" ")[2]

    def __str__(self) -> str:
        """As people call it: ``barrier #7 (In[5], line 14)``."""
        shown = f"{self.name} #{self.number}" if self.place and self.name != "init_process_group" else self.name
        return f"{shown} ({self.line})" if self.line else shown


@dataclass(frozen=True)
class World:
    """Everything the findings look at: the snapshots in rank order, the time, and what the notebook calls its cells.

    ``mismatch_after`` is how long a rank waits, in nanoseconds, before its operation is compared with the others'.
    """

    snapshots: tuple[RankSnapshot, ...]
    now: int
    cells: Mapping[str, str]
    mismatch_after: int = MISMATCH_AFTER

    @cached_property
    def operations(self) -> Mapping[int, Operation]:
        """The last operation of each rank that has had one."""
        found = (last_operation(snapshot, self.cells) for snapshot in self.snapshots)
        return {operation.rank: operation for operation in found if operation is not None}

    @cached_property
    def open(self) -> tuple[Operation, ...]:
        """Operations of the whole world in which ranks wait now, those that came first first."""
        waiting = (op for op in self.operations.values() if op.waiting and op.place)
        return tuple(sorted(waiting, key=lambda op: (op.entered, op.rank)))

    @cached_property
    def meetings(self) -> Mapping[int, Mapping[str, Sequence[Operation]]]:
        """The last operations of all ranks, by place and then by name: more than one name at a place is a mismatch."""
        found: dict[int, dict[str, list[Operation]]] = defaultdict(lambda: defaultdict(list))
        for op in self.operations.values():
            found[op.place][op.name].append(op)
        return found

    def phased(self, *phases: Phase) -> tuple[RankSnapshot, ...]:
        """The ranks in one of these phases."""
        return tuple(snapshot for snapshot in self.snapshots if snapshot.phase in phases)

    def seconds_since(self, moment: int) -> float:
        """Seconds from a moment to now; never negative, since a rank may write after the kernel took the time."""
        return max(0, self.now - moment) / _SECOND


def last_operation(snapshot: RankSnapshot, cells: Mapping[str, str]) -> Operation | None:
    """The barrier or collective that a rank entered last, or None if it has entered none."""
    if not snapshot.barrier_entered and not snapshot.collective_entered:
        return None
    place = snapshot.barrier + snapshot.collective
    if snapshot.barrier_entered > snapshot.collective_entered:
        return Operation(
            rank=snapshot.rank,
            place=place,
            name="barrier",
            number=snapshot.barrier,
            line=show_line(snapshot.barrier_file, snapshot.barrier_line, cells),
            entered=snapshot.barrier_entered,
            waiting=snapshot.phase is Phase.BARRIER and snapshot.in_barrier,
        )
    return Operation(
        rank=snapshot.rank,
        place=0 if snapshot.collective_partial else place,
        name=snapshot.collective_name,
        number=snapshot.collective,
        line=show_line(snapshot.collective_file, snapshot.collective_line, cells),
        entered=snapshot.collective_entered,
        waiting=snapshot.phase is Phase.COLLECTIVE and snapshot.in_collective,
        nbytes=snapshot.collective_bytes,
        shape=snapshot.collective_shape,
    )


def place_of(snapshot: RankSnapshot) -> int:
    """How many operations of the whole world a rank has entered, which is its place in their common order."""
    return snapshot.barrier + snapshot.collective

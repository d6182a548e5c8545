"""What the findings of ``diagnosis`` look at: a world of snapshots, and the operations in which its ranks are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from nbstate.telemetry.board import Phase, RankSnapshot
from nbstate.telemetry.naming import name_ranks
from nbstate.telemetry.observed import Observed
from nbstate.telemetry.source import show_line

__all__ = [
    "ALIKE",
    "MISMATCH_AFTER",
    "RETURNED",
    "TOGETHER",
    "UP",
    "WAITING",
    "Operation",
    "World",
    "last_operation",
    "place_of",
]

_SECOND: Final = 1_000_000_000
MISMATCH_AFTER: Final = _SECOND  # ns that a rank waits before its operation is compared with the others'

WAITING: Final = frozenset({Phase.COLLECTIVE, Phase.BARRIER})
RETURNED: Final = frozenset({Phase.RETURNING, Phase.FINISHED})
UP: Final = frozenset({Phase.RUNNING, Phase.LOADER}) | WAITING

SENDS: Final = frozenset({"send", "isend", "send_object_list"})
RECEIVES: Final = frozenset({"recv", "irecv", "recv_object_list"})

ALIKE: Final = frozenset(
    {
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_single",
        "all_reduce",
        "broadcast",
        "gather",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
        "scatter",
    }
)
"""Operations whose parts must be of one size on all ranks."""

TOGETHER: Final = frozenset(
    {
        "barrier",
        "monitored_barrier",
        "all_reduce",
        "all_gather",
        "all_gather_coalesced",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_gather_single",
        "all_reduce_coalesced",
        "all_to_all",
        "all_to_all_single",
        "reduce_scatter",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
    }
)
"""Operations that no rank leaves before all have come."""


@dataclass(frozen=True)
class Operation:
    """The barrier or collective that a rank entered last.

    ``place`` is its number among all operations of the whole world, 0 if only a part of the world takes part. Then
    ``group`` names the part as the board does (``"0,2"``), ``sequence`` is its number there, and ``peer`` the other
    side of a send or receive. ``waiting`` says whether the rank is still in it; ``entered`` is in
    ``time.monotonic_ns()``. ``nbytes`` and ``shape`` are what the rank put in.
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
    group: str = ""
    sequence: int = 0
    peer: int = -1

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of the part of the world that takes part; empty if it is the whole world, two ranks or unknown."""
        if not self.group or self.place or self.exchanges:
            return ()
        parts = self.group.split(",")
        return tuple(map(int, parts)) if all(map(str.isdecimal, parts)) else ()

    @property
    def sends(self) -> bool:
        """Whether it is a send."""
        return self.name in SENDS

    @property
    def exchanges(self) -> bool:
        """Whether it is a send or a receive."""
        return self.name in SENDS or self.name in RECEIVES

    @property
    def size(self) -> tuple[int, str]:
        """What must be the same on all ranks: bytes and dtype. Another shape of the same size is no fault."""
        return self.nbytes, self.shape.rpartition(" ")[2]

    def __str__(self) -> str:
        """As people call it: ``barrier #7 (In[5], line 14)``."""
        shown = f"{self.name} #{self.number}" if self.place and self.name != "init_process_group" else self.name
        if self.exchanges and self.peer >= 0:
            shown += f" {'to' if self.sends else 'from'} rank {self.peer}"
        elif self.members:
            shown += f" of {name_ranks(self.members)}"
        return f"{shown} ({self.line})" if self.line else shown


@dataclass(frozen=True)
class World:
    """Everything the findings look at: the snapshots in rank order, the time, and what the notebook calls its cells.

    ``mismatch_after`` is how long a rank waits, in nanoseconds, before its operation is compared with the others'.
    ``observed`` is what was seen of the ranks' processes, for as many as were looked at.
    """

    snapshots: tuple[RankSnapshot, ...]
    now: int
    cells: Mapping[str, str]
    mismatch_after: int = MISMATCH_AFTER
    observed: Mapping[int, Observed] = field(default_factory=dict)

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

    @cached_property
    def by_rank(self) -> Mapping[int, RankSnapshot]:
        """The snapshots by rank."""
        return {snapshot.rank: snapshot for snapshot in self.snapshots}

    def stands(self, operation: Operation | None) -> bool:
        """Whether a rank has waited in an operation for long enough that others have had time to come or be seen.

        One that is stopped by a signal may have been through it, and tells nothing.
        """
        if operation is None or not operation.waiting or self.seen(operation.rank).process == "stopped":
            return False
        return self.now - operation.entered >= self.mismatch_after

    def seen(self, rank: int) -> Observed:
        """What was seen of a rank's process."""
        return self.observed.get(rank) or Observed(rank)

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
        place=0 if snapshot.collective_partial else snapshot.collective_place or place,
        name=snapshot.collective_name,
        number=snapshot.collective,
        line=show_line(snapshot.collective_file, snapshot.collective_line, cells),
        entered=snapshot.collective_entered,
        waiting=snapshot.phase is Phase.COLLECTIVE and snapshot.in_collective,
        nbytes=snapshot.collective_bytes,
        shape=snapshot.collective_shape,
        group=snapshot.collective_group,
        sequence=snapshot.collective_sequence,
        peer=snapshot.collective_peer,
    )


def place_of(snapshot: RankSnapshot) -> int:
    """How many operations of the whole world a rank has entered, which is its place in their common order."""
    return snapshot.barrier + snapshot.collective

"""Sentences about ranks: who waits where, and what those are doing who do not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from nbstate.telemetry.blocking import describe_stack, own_frame
from nbstate.telemetry.board import Phase, RankSnapshot
from nbstate.telemetry.naming import name_ranks, verb
from nbstate.telemetry.operations import Operation, World
from nbstate.telemetry.source import show_line

__all__ = [
    "all_or_some",
    "called",
    "doing",
    "doings",
    "evidence_of_lines",
    "minority",
    "places",
    "progress",
    "their_doings",
    "waiters",
]

_NAMED_DOINGS: Final = 3
_STATES: Final = {"running": "computing ", "sleeping": "blocked{} "}


def all_or_some(some: Sequence[RankSnapshot], world: World) -> str:
    """``"both ranks"``, ``"all 8 ranks"``, or the ranks by name if they are not all."""
    if len(some) < len(world.snapshots):
        return name_ranks(s.rank for s in some)
    if len(some) < 3:
        return "both ranks" if len(some) == 2 else f"rank {some[0].rank}"
    return f"all {len(some)} ranks"


def progress(up: Sequence[RankSnapshot]) -> str:
    """How far ranks are: ``"training, steps 118 to 120"``."""
    first, last = min(s.step for s in up), max(s.step for s in up)
    if not last:
        return "running"
    return f"training, step {last}" if first == last else f"training, steps {first} to {last}"


def waiters(operations: Sequence[Operation]) -> str:
    """``"ranks 0 and 2 wait in barrier #7 (In[5], line 14)"``, for the place that was reached first."""
    first = operations[0]
    ranks = [op.rank for op in operations if (op.place, op.group) == (first.place, first.group)]
    return f"{name_ranks(ranks)} {verb(ranks, 'waits', 'wait')} in {first}"


def called(group: Sequence[Operation]) -> str:
    """``"rank 1 in broadcast #3 (In[5], line 8)"``, or that it called it if it has come out again."""
    ranks = name_ranks(op.rank for op in group)
    shown = next((op for op in group if op.waiting), group[0])
    return f"{ranks} in {shown}" if any(op.waiting for op in group) else f"{ranks} called {shown}"


def minority(groups: Sequence[Sequence[Operation]]) -> tuple[int, ...]:
    """Who differs from the crowd, of groups the largest of which comes first; everyone, where there is no crowd."""
    guilty = groups if len(groups[0]) == len(groups[1]) else groups[1:]
    return tuple(sorted(op.rank for group in guilty for op in group))


def doings(snapshots: Sequence[RankSnapshot], world: World) -> str:
    """What ranks are doing, those that do the same thing together: ``"rank 0 is in step 3, rank 2 is running"``."""
    by_doing: dict[str, list[int]] = defaultdict(list)
    for snapshot in snapshots:
        by_doing[doing(snapshot, world)].append(snapshot.rank)
    said = [
        f"{name_ranks(ranks)} {verb(ranks, 'is', 'are')} {what}"
        for what, ranks in list(by_doing.items())[:_NAMED_DOINGS]
    ]
    if len(by_doing) > _NAMED_DOINGS:
        said.append("others elsewhere")
    return ", ".join(said)


def their_doings(snapshots: Sequence[RankSnapshot], world: World) -> str:
    """The same for ranks that the sentence has just named, which need no second naming if they do one thing."""
    found = {doing(snapshot, world) for snapshot in snapshots}
    if len(found) > 1:
        return doings(snapshots, world)
    return f"{verb(snapshots, 'it is', 'they are')} {found.pop()}"


def doing(snapshot: RankSnapshot, world: World) -> str:
    """What one rank is doing, as it goes after "is"."""
    operation = world.operations.get(snapshot.rank)
    if operation is not None and operation.waiting:
        return f"in {operation}"
    seen = world.seen(snapshot.rank)
    where = place_in_own_code(snapshot.rank, world)
    if seen.process == "stopped":
        return "stopped by a signal"
    if snapshot.native_name and snapshot.native_since > snapshot.phase_since:
        step = f" of step {snapshot.step}" if snapshot.step else ""
        return f"in torch's own {snapshot.native_name}{step}" + (f" ({where})" if where else "")
    if where:
        return f"{_STATES.get(seen.process, '').format(describe_stack(seen.stack))}at {where}"
    if seen.process == "sleeping" and snapshot.phase is Phase.RUNNING:
        return f"asleep in step {snapshot.step}" if snapshot.step else "asleep"
    if snapshot.phase is Phase.LOADER:
        return "waiting for the data loader"
    if snapshot.step:
        return f"in step {snapshot.step}"
    return "running"


def place_in_own_code(rank: int, world: World) -> str:
    """The user's own line that a rank's stack is in, as people call it; empty if no stack was taken."""
    frame = own_frame(world.seen(rank).stack)
    return show_line(frame.file, frame.line, world.cells) if frame else ""


def places(operations: Iterable[Operation], ranks: Iterable[int], world: World) -> tuple[str, ...]:
    """The lines of operations, then those in which ranks are in their own code; each once."""
    waiting = {rank for rank, op in world.operations.items() if op.waiting}
    own = [place_in_own_code(rank, world) for rank in ranks if rank not in waiting]
    shown = [op.line for op in operations] + own
    return tuple(dict.fromkeys(filter(None, shown)))


def evidence_of_lines(world: World) -> tuple[str, ...]:
    """The first barrier that ranks have entered from different lines: where a barrier in a branch first did harm."""
    by_number: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for snapshot in world.snapshots:
        for barrier in snapshot.barriers:
            by_number[barrier.number][show_line(barrier.file, barrier.line, world.cells)].append(snapshot.rank)
    for number in sorted(by_number):
        lines = by_number[number]
        if len(lines) > 1 and all(lines):
            said = ", ".join(f"{name_ranks(ranks)} from {line}" for line, ranks in lines.items())
            return (f"barrier #{number} was entered from different lines: {said}",)
    return ()

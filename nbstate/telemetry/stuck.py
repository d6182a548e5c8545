"""Findings about ranks that stand in each other's way, or whose process cannot go on.

Each takes the world and returns a verdict, or None if there is nothing to find.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from nbstate.telemetry.blocking import connects_to_the_store
from nbstate.telemetry.board import Phase, RankSnapshot
from nbstate.telemetry.naming import name_ranks, verb
from nbstate.telemetry.operations import ALIKE, RETURNED, TOGETHER, UP, WAITING, Operation, World
from nbstate.telemetry.verdict import Verdict
from nbstate.telemetry.waiting import find_cycle, ranks_awaited
from nbstate.telemetry.wording import evidence_of_lines, places, waiters

__all__ = [
    "find_circle",
    "find_deserted",
    "find_halted",
    "find_lost",
    "find_native_mismatch",
    "find_native_missing",
    "find_starved",
    "native_waits",
]

_AT_ONCE: Final = 100_000_000  # ns between the board's word on an operation and torch's
_LITTLE: Final = 0.01  # of the time that went by: less processor time than this is none
_LONG_ENOUGH: Final = 0.5  # seconds over which processor time must have been looked at
_UNFINISHED: Final = UP | {Phase.ABSENT, Phase.STARTING}


def find_circle(world: World) -> Verdict | None:
    """Ranks wait for each other: in groups entered in different orders, or in sends and receives."""
    cycle = find_cycle(world)
    if not cycle:
        return None
    ranks = tuple(sorted(op.rank for op in cycle))
    said = ", ".join(
        f"rank {op.rank} in {op} waits for rank {cycle[(i + 1) % len(cycle)].rank}" for i, op in enumerate(cycle)
    )
    lines = places(cycle, (), world)
    if any(op.exchanges for op in cycle):
        return Verdict("deadlock", f"{name_ranks(ranks)} wait for each other: {said}", ranks, lines=lines)
    sentence = f"{name_ranks(ranks)} enter groups in different orders and wait for each other: {said}"
    return Verdict("order", sentence, ranks, lines=lines)


def find_deserted(world: World) -> Verdict | None:
    """A rank waits, in a group or for a send or receive, for one whose function has returned, or that has died."""
    for operation in sorted(world.operations.values(), key=lambda op: (op.entered, op.rank)):
        if not world.stands(operation):
            continue
        gone = [
            world.by_rank[rank] for rank in ranks_awaited(operation, world) if _has_gone(world.by_rank[rank], world)
        ]
        if gone and all(world.now - s.phase_since >= world.mismatch_after for s in gone):
            return _deserted(operation, gone, world)
    return None


def _has_gone(snapshot: RankSnapshot, world: World) -> bool:
    return snapshot.phase in RETURNED or _has_died(snapshot, world)


def _has_died(snapshot: RankSnapshot, world: World) -> bool:
    return snapshot.phase in _UNFINISHED and world.seen(snapshot.rank).process == "gone"


def _deserted(operation: Operation, gone: Sequence[RankSnapshot], world: World) -> Verdict:
    how = "died" if any(_has_died(s, world) for s in gone) else "finished"
    ranks = tuple(s.rank for s in gone)
    sentence = f"{waiters([operation])}, but {name_ranks(ranks)} {verb(gone, 'has', 'have')} {how} without it"
    return Verdict("missing", sentence, ranks, lines=places([operation], (), world), evidence=evidence_of_lines(world))


def native_waits(world: World) -> list[RankSnapshot]:
    """The ranks that stand in an operation of the whole world by torch's own account.

    That account may be half a second old. A rank that has written on the board since it entered is left out.
    """
    return [
        s
        for s in world.snapshots
        if s.phase in UP
        and s.native_name
        and not s.native_group
        and s.heartbeat <= s.native_since + _AT_ONCE
        and world.now - s.native_since >= world.mismatch_after
    ]


def find_native_mismatch(world: World) -> Verdict | None:
    """Ranks stand in different operations that have the same number in torch's own count, DDP's among them."""
    stand = native_waits(world)
    numbers = {s.native_sequence for s in stand}
    names = {s.native_name for s in stand}
    if len(numbers) != 1 or len(names) < 2 or not names <= TOGETHER | ALIKE:
        return None
    said = []
    for snapshot in stand:
        operation = world.operations.get(snapshot.rank)
        inside = operation is not None and operation.waiting
        what = str(operation) if inside else f"torch's own {snapshot.native_name}"
        said.append(f"rank {snapshot.rank} in {what}" + (f" after {snapshot.step} steps" if snapshot.step else ""))
    steps = {s.step for s in stand}
    fewest = tuple(s.rank for s in stand if s.step == min(steps))
    ranks = tuple(s.rank for s in stand) if len(steps) == 1 else fewest
    lines = places([op for op in world.operations.values() if op.waiting], (s.rank for s in stand), world)
    sentence = f"different collectives meet: {', '.join(said)}"
    return Verdict("uneven" if len(steps) > 1 else "mismatch", sentence, ranks, lines=lines)


def find_native_missing(world: World) -> Verdict | None:
    """Ranks stand in an operation of torch's own, of the whole world, and others have finished without it."""
    stand = [s for s in native_waits(world) if s.phase not in WAITING and s.native_name in TOGETHER]
    gone = [s for s in world.phased(*RETURNED) if world.now - s.phase_since >= world.mismatch_after]
    if not stand or not gone:
        return None
    ranks = tuple(s.rank for s in gone)
    who = name_ranks(s.rank for s in stand)
    steps = max(s.step for s in stand), max(s.step for s in gone)
    sentence = (
        f"{who} {verb(stand, 'waits', 'wait')} in torch's own {stand[0].native_name}, "
        f"but {name_ranks(ranks)} {verb(gone, 'has', 'have')} finished without it"
    )
    if steps[0] <= steps[1]:
        return Verdict("missing", sentence, ranks, lines=places((), (s.rank for s in stand), world))
    sentence += f": uneven loops, {steps[1]} steps against {steps[0]}"
    return Verdict("uneven", sentence, ranks, lines=places((), (s.rank for s in stand), world))


def find_halted(world: World) -> Verdict | None:
    """A rank's process is stopped by a signal."""
    halted = [s for s in world.snapshots if s.phase in _UNFINISHED and world.seen(s.rank).process == "stopped"]
    if not halted:
        return None
    ranks = tuple(s.rank for s in halted)
    sentence = (
        f"{name_ranks(ranks)} {verb(halted, 'is', 'are')} stopped by a signal, such as SIGSTOP; SIGCONT continues"
    )
    held_up = [op for op in world.operations.values() if op.waiting and op.rank not in ranks]
    if held_up:
        sentence += f"; {waiters(sorted(held_up, key=lambda op: (op.entered, op.rank)))}"
    return Verdict("halted", sentence, ranks, lines=places(held_up, ranks, world))


def find_starved(world: World) -> Verdict | None:
    """A rank in its own code could run, and gets no processor while others wait."""
    starved = [s for s in world.snapshots if s.phase in (Phase.RUNNING, Phase.LOADER) and _gets_nothing(world, s.rank)]
    waiting = [op for op in world.operations.values() if op.waiting]
    if not starved or not any(set(ranks_awaited(op, world)) & {s.rank for s in starved} for op in waiting):
        return None
    ranks = tuple(s.rank for s in starved)
    since = max(s.heartbeat for s in starved)
    sentence = (
        f"{name_ranks(ranks)} could run but {verb(starved, 'gets', 'get')} no processor; last heard of "
        f"{world.seconds_since(since):.1f} s ago"
    )
    return Verdict("starved", sentence, ranks, since, lines=places(waiting, ranks, world))


def _gets_nothing(world: World, rank: int) -> bool:
    seen = world.seen(rank)
    looked_at = seen.process == "running" and seen.cpu_window >= _LONG_ENOUGH and seen.cpu_used >= 0
    return looked_at and seen.cpu_used < _LITTLE * seen.cpu_window


def find_lost(world: World) -> Verdict | None:
    """Ranks do not reach the store through which ranks meet, while others wait for them there."""
    meeting = [op for op in world.operations.values() if op.name == "init_process_group" and world.stands(op)]
    lost = [s.rank for s in world.snapshots if s.phase in UP and connects_to_the_store(world.seen(s.rank).stack)]
    if not meeting or not lost:
        return None
    sentence = (
        f"{name_ranks(lost)} {verb(lost, 'does', 'do')} not reach the store through which ranks meet; "
        "MASTER_ADDR and MASTER_PORT say where it is"
    )
    held_up = [op for op in meeting if op.rank not in lost]
    if held_up:
        sentence += f"; {waiters(held_up)}"
    return Verdict("lost", sentence, tuple(lost), lines=places(meeting, lost, world))

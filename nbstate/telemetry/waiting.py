"""Who waits for whom: operations of a part of the world, sends and receives.

Operations of the whole world have a place in an order that all ranks share, so a rank waits there for those whose place
is lower. The others have only a number within their group, or between two ranks, and the board shows a rank's last
operation alone. Whether another rank has been in this one before is concluded from two things: from an operation that
all leave together nobody can have gone on while a member still waits in it, and what was sent has arrived by the time
that the receiver has waited for a second. A rank with handles that it has not waited for may have issued the operation
already; of such a rank nothing is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nbstate.telemetry.board import RankSnapshot
from nbstate.telemetry.operations import TOGETHER, UP, Operation, World, place_of

__all__ = ["find_cycle", "ranks_awaited"]


def ranks_awaited(operation: Operation, world: World) -> tuple[int, ...]:
    """The ranks that have to come to an operation, as far as the board can tell, before those in it can go on."""
    if operation.place:
        return tuple(s.rank for s in world.snapshots if s.phase in UP and place_of(s) < operation.place)
    if operation.exchanges:
        peer = world.by_rank.get(operation.peer)
        return (peer.rank,) if peer is not None and not _answers(peer, operation, world) else ()
    if operation.name not in TOGETHER:
        return ()
    members = (world.by_rank[rank] for rank in operation.members if rank in world.by_rank)
    return tuple(m.rank for m in members if m.rank != operation.rank and not _has_come(m, operation, world))


def _has_come(member: RankSnapshot, operation: Operation, world: World) -> bool:
    """Whether a member may be in an operation of a group, or beyond it."""
    other = world.operations.get(member.rank)
    if _may_have_issued(member):
        return True
    return other is not None and other.group == operation.group and other.sequence >= operation.sequence


def _answers(peer: RankSnapshot, operation: Operation, world: World) -> bool:
    """Whether the other side of a send or receive may be about to take it, or to give it."""
    if _may_have_issued(peer):
        return True
    other = world.operations.get(peer.rank)
    if other is None or not other.waiting:
        return False
    if other.name == "batch_isend_irecv" or (other.exchanges and other.peer < 0):
        return True
    return other.exchanges and other.peer == operation.rank and other.sends is not operation.sends


def _may_have_issued(snapshot: RankSnapshot) -> bool:
    """Whether a rank has handles other than the one that it waits for now."""
    if not snapshot.pending_count:
        return False
    waits_for_it = snapshot.in_collective and snapshot.collective_name in ("isend", "irecv")
    return not (snapshot.pending_count == 1 and waits_for_it and snapshot.pending_name == snapshot.collective_name)


def find_cycle(world: World) -> tuple[Operation, ...]:
    """Ranks each of which waits for the next, and the last for the first, beginning with the lowest; empty if none.

    Only ranks that have stood for a while count (see ``World.stands``).
    """
    waits = {
        rank: tuple(other for other in ranks_awaited(op, world) if world.stands(world.operations.get(other)))
        for rank, op in world.operations.items()
        if world.stands(op)
    }
    for start in sorted(waits):
        for cycle in _cycles_from(start, waits):
            return tuple(world.operations[rank] for rank in cycle)
    return ()


def _cycles_from(start: int, waits: Mapping[int, tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """The shortest way from a rank back to itself, if there is one."""
    ways: list[tuple[int, ...]] = [(start,)]
    seen = {start}
    while ways:
        longer: list[tuple[int, ...]] = []
        for way in ways:
            for following in waits.get(way[-1], ()):
                if following == start:
                    yield way
                    return
                if following not in seen:
                    seen.add(following)
                    longer.append((*way, following))
        ways = longer

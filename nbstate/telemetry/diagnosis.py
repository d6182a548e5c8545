"""What a launch's ranks are doing, in one sentence: pure functions from snapshots of the board to a verdict.

How ranks are compared
----------------------
Barriers and collectives of the whole world happen in the same order on every rank. So the number of those that a
rank has entered (``barrier + collective``) is a place in that order, and two ranks at the same place are in the same
operation: if its names differ the program is wrong. Operations of a part of the world have a number within that part
only; what follows from those is in ``waiting``.

A rank that is behind may be slow and a rank that is silent may compute. Both are healthy, so neither is ever called
missing: only a rank whose function has returned is, or whose process has gone. A rank that is late is called blocked
if it was seen asleep in its own code. When nothing here explains what is seen, the verdict says so.

``FINDINGS`` is an ordered list of small functions, the gravest first. The first that finds something speaks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from nbstate.telemetry.board import Phase, RankSnapshot
from nbstate.telemetry.naming import name_ranks, verb
from nbstate.telemetry.observed import Observed
from nbstate.telemetry.operations import ALIKE, RETURNED, TOGETHER, UP, Operation, World, place_of
from nbstate.telemetry.stragglers import often_last
from nbstate.telemetry.stuck import (
    find_circle,
    find_deserted,
    find_halted,
    find_lost,
    find_native_mismatch,
    find_native_missing,
    find_starved,
    native_waits,
)
from nbstate.telemetry.verdict import ALARMS, Kind, Verdict
from nbstate.telemetry.waiting import ranks_awaited
from nbstate.telemetry.wording import (
    all_or_some,
    called,
    doings,
    evidence_of_lines,
    minority,
    place_in_own_code,
    places,
    progress,
    their_doings,
    waiters,
)

__all__ = ["ALARMS", "FINDINGS", "Kind", "Operation", "Verdict", "World", "diagnose", "name_ranks"]

_SECOND: Final = 1_000_000_000
LATE_AFTER: Final = _SECOND // 2  # ns between the first arrival and the first word about those who have not come
UNEXPLAINED_AFTER: Final = 10 * _SECOND  # ns that all ranks wait in one operation before that is called unknown


def diagnose(
    snapshots: Sequence[RankSnapshot],
    now: int,
    cells: Mapping[str, str] | None = None,
    observed: Mapping[int, Observed] | None = None,
) -> Verdict:
    """Say in one sentence how a launch is doing.

    Parameters
    ----------
    snapshots : sequence of RankSnapshot
        One per rank, as ``Board.snapshot`` returns them.
    now : int
        ``time.monotonic_ns()`` at the time of the snapshots.
    cells : mapping of str to str, optional
        File name of a cell to what the notebook calls it (``"In[5]"``).
    observed : mapping of int to Observed, optional
        What was seen of the ranks' processes from outside. Without it nobody is called blocked, halted, starved, lost
        or dead.

    Returns
    -------
    Verdict
        What the first of ``FINDINGS`` that applies says.

    Examples
    --------
    >>> import time
    >>> from nbstate.telemetry.board import Board, Phase
    >>> board = Board.create(2)
    >>> for rank in range(2):
    ...     board.slot(rank).write(phase=Phase.RUNNING, step=120)
    >>> diagnose(board.snapshot(), time.monotonic_ns()).sentence
    'both ranks training, step 120'
    >>> board.close()
    """
    world = World(tuple(snapshots), now, cells or {}, observed=observed or {})
    for finding in FINDINGS:
        verdict = finding(world)
        if verdict is not None:
            return verdict
    return Verdict("unknown", "nothing is known about the ranks")


def find_failed(world: World) -> Verdict | None:
    """A rank's function raised."""
    failed = sorted(world.phased(Phase.FAILED), key=lambda snapshot: snapshot.phase_since)
    if not failed:
        return None
    sentence = f"{name_ranks(s.rank for s in failed)} failed"
    if len(failed) > 1:
        sentence += f", rank {failed[0].rank} first"
    elif failed[0].step:
        sentence += f" after step {failed[0].step}"
    if world.open:
        sentence += f"; {waiters(world.open)}"
    return Verdict("failed", sentence, tuple(sorted(s.rank for s in failed)))


def find_stopped(world: World) -> Verdict | None:
    """Ranks were stopped on request."""
    stopped = world.phased(Phase.STOPPED)
    if not stopped:
        return None
    return Verdict("stopped", f"{all_or_some(stopped, world)} stopped", tuple(s.rank for s in stopped))


def find_finished(world: World) -> Verdict | None:
    """Every rank's function has returned."""
    if not world.snapshots or len(world.phased(Phase.FINISHED)) < len(world.snapshots):
        return None
    return Verdict("finished", f"{all_or_some(world.snapshots, world)} finished")


def find_missing(world: World) -> Verdict | None:
    """Ranks wait in an operation that others, who have finished or died, never came to and never will."""
    dead = tuple(s for s in world.phased(*UP) if world.seen(s.rank).process == "gone")
    left = (*world.phased(*RETURNED), *dead)
    lowest = min(map(place_of, left), default=0)
    waiting = [op for op in world.open if op.rank not in {s.rank for s in dead}]
    operation = next((op for op in waiting if op.place > lowest), None)
    if not left or operation is None:
        return None
    gone = tuple(sorted((s for s in left if place_of(s) < operation.place), key=lambda s: s.rank))
    held = [op for op in waiting if op.place == operation.place]
    how = "died" if any(s in dead for s in gone) else "finished"
    sentence = f"{waiters(held)}, but {name_ranks(s.rank for s in gone)} {verb(gone, 'has', 'have')} {how} without it"
    steps = max(world.by_rank[op.rank].step for op in held), max(s.step for s in gone)
    uneven = how == "finished" and steps[0] > steps[1] > 0
    if uneven:
        sentence += f": uneven loops, {steps[1]} steps against {steps[0]}"
    elsewhere = [s for s in world.snapshots if s.phase in UP and s not in gone and place_of(s) < operation.place]
    if elsewhere:
        sentence += f"; {doings(elsewhere, world)}"
    return Verdict(
        "uneven" if uneven else "missing",
        sentence,
        tuple(s.rank for s in gone),
        lines=places(held, (), world),
        evidence=evidence_of_lines(world),
    )


def find_mismatch(world: World) -> Verdict | None:
    """Ranks have entered different operations at the same place of the common order."""
    for operation in world.open:
        by_name = world.meetings[operation.place]
        if not world.stands(operation):
            continue
        if len(by_name) == 1:
            verdict = _different_sizes(next(iter(by_name.values())), world)
            if verdict is not None:
                return verdict
            continue
        groups = sorted(by_name.values(), key=lambda group: (-len(group), group[0].rank))
        return _different_operations(groups, world)
    return None


def _different_operations(groups: Sequence[Sequence[Operation]], world: World) -> Verdict:
    sentence = f"different collectives meet: {', '.join(called(group) for group in groups)}"
    lines = places([op for group in groups for op in group], (), world)
    evidence = evidence_of_lines(world)
    steps = {op.rank: world.by_rank[op.rank].step for group in groups for op in group}
    fewest, most = min(steps.values()), max(steps.values())
    if 0 < fewest < most and all(len({steps[op.rank] for op in group}) == 1 for group in groups):
        sentence += f"; uneven loops, {fewest} steps against {most}"
        guilty = tuple(sorted(rank for rank, count in steps.items() if count == fewest))
        return Verdict("uneven", sentence, guilty, lines=lines, evidence=evidence)
    return Verdict("mismatch", sentence, minority(groups), lines=lines, evidence=evidence)


def _different_sizes(operations: Sequence[Operation], world: World) -> Verdict | None:
    """Ranks have put parts of different sizes into one operation that needs them alike."""
    by_size: dict[tuple[int, str], list[Operation]] = defaultdict(list)
    for op in operations:
        if op.name in ALIKE and op.shape:
            by_size[op.size].append(op)
    if len(by_size) < 2:
        return None
    groups = sorted(by_size.values(), key=lambda group: (-len(group), group[0].rank))
    sentence = ", ".join(f"{called(group)} with {group[0].shape}" for group in groups)
    lines = places([op for group in groups for op in group], (), world)
    what = "shapes" if len({op.shape.rpartition(" ")[0] for op in operations}) > 1 else "dtypes"
    return Verdict("mismatch", f"different {what} meet: {sentence}", minority(groups), lines=lines)


def find_group_mismatch(world: World) -> Verdict | None:
    """All members of a group stand in its operation of one number, and not in the same one."""
    meetings: dict[tuple[str, int], list[Operation]] = defaultdict(list)
    for op in world.operations.values():
        if op.members and op.sequence and world.stands(op) and not world.by_rank[op.rank].pending_count:
            meetings[op.group, op.sequence].append(op)
    for operations in meetings.values():
        if len(operations) < len(operations[0].members):
            continue
        by_name: dict[str, list[Operation]] = defaultdict(list)
        for op in operations:
            by_name[op.name].append(op)
        if len(by_name) > 1:
            return _different_operations(sorted(by_name.values(), key=lambda g: (-len(g), g[0].rank)), world)
        verdict = _different_sizes(operations, world)
        if verdict is not None:
            return verdict
    return None


def find_starting(world: World) -> Verdict | None:
    """Some ranks are not up yet, so nothing about those who wait for them means anything."""
    down = world.phased(Phase.ABSENT, Phase.STARTING)
    if not down:
        return None
    total = len(world.snapshots)
    if len(down) == total:
        return Verdict("starting", f"{all_or_some(down, world)} starting")
    return Verdict("starting", f"{total - len(down)} of {total} ranks up, {name_ranks(s.rank for s in down)} starting")


def find_late(world: World) -> Verdict | None:
    """The newest open operation waits for ranks that are still on their way to it."""
    if not world.open:
        return None
    place = max(op.place for op in world.open)
    first = next(op for op in world.open if op.place == place)
    if world.now - first.entered < LATE_AFTER:
        return None
    late = tuple(s for s in world.snapshots if s.phase in UP and place_of(s) < place)
    return _late(first, late, world) if late else None


def find_late_for_a_part(world: World) -> Verdict | None:
    """The same in a part of the world: a member, or the other side of a send or receive, that is in its own code."""
    for operation in sorted(world.operations.values(), key=lambda op: (op.entered, op.rank)):
        if operation.place or not world.stands(operation):
            continue
        awaited = (world.by_rank[rank] for rank in ranks_awaited(operation, world))
        late = tuple(s for s in awaited if s.phase in (Phase.RUNNING, Phase.LOADER))
        if late:
            return _late(operation, late, world)
    return None


def find_late_for_native(world: World) -> Verdict | None:
    """The same in an operation that torch issued by itself, such as DDP's all-reduce in the middle of ``backward``."""
    stand = [s for s in native_waits(world) if s.native_name in TOGETHER]
    if not stand:
        return None
    late = [s for s in world.phased(Phase.RUNNING, Phase.LOADER) if s not in stand and not s.native_name]
    if not late:
        return None
    first = min(stand, key=lambda s: s.native_since)
    line = place_in_own_code(first.rank, world)
    operation = Operation(
        first.rank, 0, f"torch's own {first.native_name}", 0, line, entered=first.native_since, waiting=True
    )
    return _late(operation, late, world)


def _late(operation: Operation, late: Sequence[RankSnapshot], world: World) -> Verdict:
    held_up = tuple(s for s in late if s.phase in (Phase.RUNNING, Phase.LOADER))
    blocked = tuple(s for s in held_up if _sleeps(s, world))
    guilty = held_up if len(blocked) == len(held_up) > 0 else tuple(late)
    seconds = world.seconds_since(operation.entered)
    ranks = tuple(s.rank for s in guilty)
    sentence = (
        f"{name_ranks(ranks)} {verb(guilty, 'is', 'are')} {seconds:.1f} s late for {operation}; "
        f"{their_doings(guilty, world)}"
    )
    return Verdict(
        "blocked" if blocked and guilty == held_up else "late",
        sentence,
        ranks,
        operation.entered,
        lines=places([operation], ranks, world),
        evidence=often_last(world.snapshots, ranks),
    )


def _sleeps(snapshot: RankSnapshot, world: World) -> bool:
    """Whether a rank was seen asleep, and not in an operation that torch issued by itself."""
    return world.seen(snapshot.rank).process == "sleeping" and not snapshot.native_name


def find_unexplained(world: World) -> Verdict | None:
    """Every rank that is up waits for others, none has come lately, and nothing above says why."""
    up = world.phased(*UP)
    waiting = [op for op in world.operations.values() if op.waiting]
    if not waiting or len(waiting) < len(up):
        return None
    newest = max(op.entered for op in waiting)
    if world.now - newest < UNEXPLAINED_AFTER:
        return None
    seconds = world.seconds_since(newest)
    who = all_or_some(up, world)
    if len({str(op) for op in waiting}) == 1:
        where = f"{who} in {waiting[0]}"
    else:
        where = f"{who} waiting, {doings(up, world)},"
    sentence = f"{where} for {seconds:.1f} s; whether slow or stuck is unknown"
    return Verdict("unknown", sentence, since=newest)


def find_well(world: World) -> Verdict | None:
    """Ranks run, and some may have finished."""
    up = world.phased(*UP)
    returned = world.phased(*RETURNED)
    if not up and not returned:
        return None
    if not up:
        return Verdict("well", f"{all_or_some(returned, world)} returning")
    sentence = f"{all_or_some(up, world)} {progress(up)}"
    if returned:
        have = "has" if len(returned) == 1 else "have"
        sentence += f"; {name_ranks(s.rank for s in returned)} {have} finished"
    return Verdict("well", sentence)


FINDINGS: Final[tuple[Callable[[World], Verdict | None], ...]] = (
    find_failed,
    find_stopped,
    find_finished,
    find_missing,
    find_mismatch,
    find_group_mismatch,
    find_circle,
    find_deserted,
    find_native_mismatch,
    find_native_missing,
    find_halted,
    find_lost,
    find_starting,
    find_starved,
    find_late,
    find_late_for_a_part,
    find_late_for_native,
    find_unexplained,
    find_well,
)
"""The gravest first: a failure explains a wait, and a wait is no lateness while ranks still start."""

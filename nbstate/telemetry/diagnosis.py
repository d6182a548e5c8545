"""What a launch's ranks are doing, in one sentence: pure functions from snapshots of the board to a verdict.

How ranks are compared
----------------------
Barriers and collectives of the whole world happen in the same order on every rank. So the number of those that a
rank has entered (``barrier + collective``) is a place in that order, and two ranks at the same place are in the same
operation: if its names differ the program is wrong. Operations of a part of the world have no place, and nothing is
concluded from them.

A rank that is behind may be slow and a rank that is silent may compute. Both are healthy, so neither is ever called
missing: only a rank whose function has returned is. When nothing here explains what is seen, the verdict says so.

``FINDINGS`` is an ordered list of small functions, the gravest first. The first that finds something speaks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from nbstate.telemetry.board import Phase, RankSnapshot
from nbstate.telemetry.operations import Operation, World, place_of

__all__ = ["FINDINGS", "Kind", "Operation", "Verdict", "World", "diagnose", "name_ranks"]

Kind = Literal["starting", "well", "late", "missing", "mismatch", "finished", "failed", "stopped", "unknown"]

_SECOND: Final = 1_000_000_000
LATE_AFTER: Final = _SECOND // 2  # ns between the first arrival and the first word about those who have not come
UNEXPLAINED_AFTER: Final = 10 * _SECOND  # ns that all ranks wait in one operation before that is called unknown

# Operations whose parts must be of one size on all ranks.
_ALIKE: Final = frozenset(
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
_WAITING: Final = frozenset({Phase.COLLECTIVE, Phase.BARRIER})
_RETURNED: Final = frozenset({Phase.RETURNING, Phase.FINISHED})
_UP: Final = frozenset({Phase.RUNNING, Phase.LOADER}) | _WAITING
_NAMED_GROUPS: Final = 6
_NAMED_DOINGS: Final = 3


@dataclass(frozen=True)
class Verdict:
    """What diagnosis says.

    Attributes
    ----------
    kind : str
        One of ``Kind``.
    sentence : str
        For a person, without a full stop.
    ranks : tuple of int
        The ranks it is about: the guilty ones. Empty when nobody is.
    since : int
        ``time.monotonic_ns()`` of the moment from which the seconds in the sentence count; 0 if it names none.
    """

    kind: Kind
    sentence: str
    ranks: tuple[int, ...] = ()
    since: int = field(default=0, compare=False)


def diagnose(snapshots: Sequence[RankSnapshot], now: int, cells: Mapping[str, str] | None = None) -> Verdict:
    """Say in one sentence how a launch is doing.

    Parameters
    ----------
    snapshots : sequence of RankSnapshot
        One per rank, as ``Board.snapshot`` returns them.
    now : int
        ``time.monotonic_ns()`` at the time of the snapshots.
    cells : mapping of str to str, optional
        File name of a cell to what the notebook calls it (``"In[5]"``).

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
    world = World(tuple(snapshots), now, cells or {})
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
        sentence += f"; {_waiters(world.open)}"
    return Verdict("failed", sentence, tuple(sorted(s.rank for s in failed)))


def find_stopped(world: World) -> Verdict | None:
    """Ranks were stopped on request."""
    stopped = world.phased(Phase.STOPPED)
    if not stopped:
        return None
    return Verdict("stopped", f"{_all_or_some(stopped, world)} stopped", tuple(s.rank for s in stopped))


def find_finished(world: World) -> Verdict | None:
    """Every rank's function has returned."""
    if not world.snapshots or len(world.phased(Phase.FINISHED)) < len(world.snapshots):
        return None
    return Verdict("finished", f"{_all_or_some(world.snapshots, world)} finished")


def find_missing(world: World) -> Verdict | None:
    """Ranks wait in an operation that others, whose function has returned, never came to and never will."""
    returned = world.phased(*_RETURNED)
    lowest = min(map(place_of, returned), default=0)
    operation = next((op for op in world.open if op.place > lowest), None)
    if not returned or operation is None:
        return None
    gone = tuple(s for s in returned if place_of(s) < operation.place)
    waiters = [op for op in world.open if op.place == operation.place]
    have = "has" if len(gone) == 1 else "have"
    sentence = f"{_waiters(waiters)}, but {name_ranks(s.rank for s in gone)} {have} finished without it"
    elsewhere = [s for s in world.snapshots if s.phase in _UP and place_of(s) < operation.place]
    if elsewhere:
        sentence += f"; {_doings(elsewhere, world)}"
    return Verdict("missing", sentence, tuple(s.rank for s in gone))


def find_mismatch(world: World) -> Verdict | None:
    """Ranks have entered different operations at the same place of the common order."""
    for operation in world.open:
        by_name = world.meetings[operation.place]
        if world.now - operation.entered < world.mismatch_after:
            continue
        if len(by_name) == 1:
            verdict = _different_sizes(next(iter(by_name.values())))
            if verdict is not None:
                return verdict
            continue
        groups = sorted(by_name.values(), key=lambda group: (-len(group), group[0].rank))
        sentence = ", ".join(_called(group) for group in groups)
        return Verdict("mismatch", f"different collectives meet: {sentence}", _minority(groups))
    return None


def _different_sizes(operations: Sequence[Operation]) -> Verdict | None:
    """Ranks have put parts of different sizes into one operation that needs them alike."""
    by_size: dict[tuple[int, str], list[Operation]] = defaultdict(list)
    for op in operations:
        if op.name in _ALIKE and op.shape:
            by_size[op.size].append(op)
    if len(by_size) < 2:
        return None
    groups = sorted(by_size.values(), key=lambda group: (-len(group), group[0].rank))
    sentence = ", ".join(f"{_called(group)} with {group[0].shape}" for group in groups)
    return Verdict("mismatch", f"different shapes meet: {sentence}", _minority(groups))


def find_starting(world: World) -> Verdict | None:
    """Some ranks are not up yet, so nothing about those who wait for them means anything."""
    down = world.phased(Phase.ABSENT, Phase.STARTING)
    if not down:
        return None
    total = len(world.snapshots)
    if len(down) == total:
        return Verdict("starting", f"{_all_or_some(down, world)} starting")
    return Verdict("starting", f"{total - len(down)} of {total} ranks up, {name_ranks(s.rank for s in down)} starting")


def find_late(world: World) -> Verdict | None:
    """The newest open operation waits for ranks that are still on their way to it."""
    if not world.open:
        return None
    place = max(op.place for op in world.open)
    first = next(op for op in world.open if op.place == place)
    if world.now - first.entered < LATE_AFTER:
        return None
    late = tuple(s for s in world.snapshots if s.phase in _UP and place_of(s) < place)
    if not late:
        return None
    are = "is" if len(late) == 1 else "are"
    seconds = world.seconds_since(first.entered)
    sentence = (
        f"{name_ranks(s.rank for s in late)} {are} {seconds:.1f} s late for {first}; {_their_doings(late, world)}"
    )
    return Verdict("late", sentence, tuple(s.rank for s in late), first.entered)


def find_unexplained(world: World) -> Verdict | None:
    """Every rank that is up waits for others, none has come lately, and nothing above says why."""
    up = world.phased(*_UP)
    waiting = [op for op in world.operations.values() if op.waiting]
    if not waiting or len(waiting) < len(up):
        return None
    newest = max(op.entered for op in waiting)
    if world.now - newest < UNEXPLAINED_AFTER:
        return None
    seconds = world.seconds_since(newest)
    who = _all_or_some(up, world)
    if len({str(op) for op in waiting}) == 1:
        where = f"{who} in {waiting[0]}"
    else:
        where = f"{who} waiting, {_doings(up, world)},"
    sentence = f"{where} for {seconds:.1f} s; whether slow or stuck is unknown"
    return Verdict("unknown", sentence, since=newest)


def find_well(world: World) -> Verdict | None:
    """Ranks run, and some may have finished."""
    up = world.phased(*_UP)
    returned = world.phased(*_RETURNED)
    if not up and not returned:
        return None
    if not up:
        return Verdict("well", f"{_all_or_some(returned, world)} returning")
    sentence = f"{_all_or_some(up, world)} {_progress(up)}"
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
    find_starting,
    find_late,
    find_unexplained,
    find_well,
)
"""The gravest first: a failure explains a wait, and a wait is no lateness while ranks still start."""


def name_ranks(ranks: Iterable[int]) -> str:
    """Ranks as people say them: ``"rank 2"``, ``"ranks 1 and 3"``, ``"ranks 0, 2 to 5 and 9"``."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    total = sum(map(len, runs))
    named, rest = runs[:_NAMED_GROUPS], sum(map(len, runs[_NAMED_GROUPS:]))
    parts: list[str] = []
    for run in named:
        parts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else [str(rank) for rank in run]
    if rest:
        parts.append(f"{rest} more")
    shown = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"rank {shown}" if total == 1 else f"ranks {shown}"


def _all_or_some(some: Sequence[RankSnapshot], world: World) -> str:
    if len(some) < len(world.snapshots):
        return name_ranks(s.rank for s in some)
    if len(some) < 3:
        return "both ranks" if len(some) == 2 else f"rank {some[0].rank}"
    return f"all {len(some)} ranks"


def _progress(up: Sequence[RankSnapshot]) -> str:
    first, last = min(s.step for s in up), max(s.step for s in up)
    if not last:
        return "running"
    return f"training, step {last}" if first == last else f"training, steps {first} to {last}"


def _waiters(operations: Sequence[Operation]) -> str:
    """``"ranks 0 and 2 wait in barrier #7 (In[5], line 14)"``, for the place that was reached first."""
    first = operations[0]
    ranks = [op.rank for op in operations if op.place == first.place]
    return f"{name_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'} in {first}"


def _called(group: Sequence[Operation]) -> str:
    ranks = name_ranks(op.rank for op in group)
    shown = next((op for op in group if op.waiting), group[0])
    return f"{ranks} in {shown}" if any(op.waiting for op in group) else f"{ranks} called {shown}"


def _minority(groups: Sequence[Sequence[Operation]]) -> tuple[int, ...]:
    """Who differs from the crowd; everyone, where there is no crowd."""
    guilty = groups if len(groups[0]) == len(groups[1]) else groups[1:]
    return tuple(sorted(op.rank for group in guilty for op in group))


def _doings(snapshots: Sequence[RankSnapshot], world: World) -> str:
    """What ranks are doing, those that do the same thing together: ``"rank 0 is in step 3, rank 2 is running"``."""
    by_doing: dict[str, list[int]] = defaultdict(list)
    for snapshot in snapshots:
        by_doing[_doing(snapshot, world)].append(snapshot.rank)
    said = [
        f"{name_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} {doing}"
        for doing, ranks in list(by_doing.items())[:_NAMED_DOINGS]
    ]
    if len(by_doing) > _NAMED_DOINGS:
        said.append("others elsewhere")
    return ", ".join(said)


def _their_doings(snapshots: Sequence[RankSnapshot], world: World) -> str:
    """The same for ranks that the sentence has just named, which need no second naming if they do one thing."""
    doings = {_doing(snapshot, world) for snapshot in snapshots}
    if len(doings) > 1:
        return _doings(snapshots, world)
    return f"{'it is' if len(snapshots) == 1 else 'they are'} {doings.pop()}"


def _doing(snapshot: RankSnapshot, world: World) -> str:
    operation = world.operations.get(snapshot.rank)
    if operation is not None and operation.waiting:
        return f"in {operation}"
    if snapshot.phase is Phase.LOADER:
        return "waiting for its data loader"
    if snapshot.step:
        return f"in step {snapshot.step}"
    return "running"

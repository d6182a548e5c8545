"""Generated programs: a healthy one is never accused, and of one with a fault the guilty ranks are named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from nbstate.telemetry.board import Barrier, Phase, RankSnapshot
from nbstate.telemetry.diagnosis import Verdict, diagnose
from nbstate.telemetry.observed import Observed, StackFrame

FILE = "/home/me/train.py"
SECOND = 1_000_000_000
START = 1_000 * SECOND
STALL = 10 * SECOND


@dataclass(frozen=True)
class Op:
    """One operation of a program: of whom (all, a group, a pair), and its line."""

    name: str
    members: tuple[int, ...]
    line: int
    world: bool = True
    size: int = 8


@dataclass
class Rank:
    """One rank as it goes through its operations."""

    number: int
    todo: list[tuple[Op, float]]
    clock: float = 0.0
    at: int = 0
    entered: bool = False
    counts: dict[object, int] = field(default_factory=dict)
    snapshot: RankSnapshot = field(init=False)
    barriers: list[Barrier] = field(default_factory=list)

    def __post_init__(self) -> None:
        zero = dict.fromkeys(_INTEGERS, 0) | dict.fromkeys(_TEXTS, "")
        self.snapshot = RankSnapshot(**{**zero, "rank": self.number, "pid": 1, "phase": Phase.RUNNING})  # type: ignore[arg-type]

    def tell(self, **changes: object) -> None:
        self.snapshot = replace(self.snapshot, **changes)  # type: ignore[arg-type]


_TEXTS = ("device", "barrier_file", "collective_file", "collective_name")
_INTEGERS = tuple(f.name for f in fields(RankSnapshot) if f.default is MISSING and f.name not in _TEXTS)


class World:
    """Ranks that go through their operations until a moment, as real ones would: nobody leaves before all have come.

    A rank's todo list holds pairs of an operation and the seconds of its own code before it.
    """

    def __init__(self, todo: Sequence[list[tuple[Op, float]]]) -> None:
        self.ranks = [Rank(number, list(ops)) for number, ops in enumerate(todo)]
        for rank in self.ranks:
            rank.clock = rank.todo[0][1] if rank.todo else 0.0

    def run(self, until: float) -> list[RankSnapshot]:
        """Go on until nothing more can happen before a moment, in seconds; what is on the board then."""
        while True:
            ready = [r for r in self.ranks if not r.entered and r.clock <= until and r.snapshot.phase is Phase.RUNNING]
            if not ready:
                break
            self._enter(min(ready, key=lambda r: (r.clock, r.number)), until)
        return [rank.snapshot for rank in self.ranks]

    def _enter(self, rank: Rank, until: float) -> None:
        now = START + round(rank.clock * SECOND)
        if rank.at == len(rank.todo):
            rank.tell(phase=Phase.FINISHED, phase_since=now, heartbeat=now)
            return
        op = rank.todo[rank.at][0]
        rank.entered = True
        if op.name == "barrier" and op.world:
            number = rank.snapshot.barrier + 1
            rank.barriers.append(Barrier(number, now, 0, op.line, FILE))
            rank.tell(barrier=number, barrier_entered=now, barrier_line=op.line, barrier_file=FILE, phase=Phase.BARRIER)
        else:
            key = op.members if op.name not in ("send", "recv") else (op.name, op.members)
            rank.counts[key] = rank.counts.get(key, 0) + 1
            peer = next((m for m in op.members if m != rank.number), -1) if op.name in ("send", "recv") else -1
            rank.tell(
                collective=rank.snapshot.collective + op.world,
                collective_entered=now,
                collective_line=op.line,
                collective_file=FILE,
                collective_name=op.name,
                collective_bytes=4 * op.size,
                collective_shape=f"{op.size} float32",
                collective_partial=not op.world,
                collective_group="" if op.world or peer >= 0 else ",".join(map(str, op.members)),
                collective_sequence=rank.counts[key],
                collective_peer=peer,
                phase=Phase.COLLECTIVE,
            )
        rank.tell(phase_since=now, heartbeat=now, barriers=tuple(rank.barriers))
        self._meet(op, until)

    def _meet(self, op: Op, until: float) -> None:
        here = [r for r in self.ranks if r.entered and r.at < len(r.todo) and self._same(r.todo[r.at][0], op)]
        if {r.number for r in here} != set(op.members):
            return
        if (
            len({(r.todo[r.at][0].name, r.todo[r.at][0].size) for r in here} - {("send", op.size), ("recv", op.size)})
            > 1
        ):
            return  # a mismatch: nobody goes on
        if {r.todo[r.at][0].name for r in here} in ({"send"}, {"recv"}):
            return
        last = max(r.clock for r in here)
        for rank in here:
            left = last + 0.01 * (1 + rank.number)
            if left > until:
                rank.clock = left  # it is over, and the rank has not noticed yet
                rank.entered = True
                continue
            self._leave(rank, left)

    @staticmethod
    def _same(one: Op, other: Op) -> bool:
        return one.members == other.members

    def _leave(self, rank: Rank, left: float) -> None:
        op, now = rank.todo[rank.at][0], START + round(left * SECOND)
        if op.name == "barrier" and op.world:
            rank.barriers[-1] = replace(rank.barriers[-1], left=now)
            rank.tell(barrier_left=now, barriers=tuple(rank.barriers))
        else:
            rank.tell(collective_left=now)
        rank.tell(phase=Phase.RUNNING, phase_since=now, heartbeat=now, step=rank.snapshot.step + 1)
        rank.at, rank.entered = rank.at + 1, False
        rank.clock = left + 1e-6 + (rank.todo[rank.at][1] if rank.at < len(rank.todo) else 0.0)


DELAYS = st.sampled_from([0.0, 0.001, 0.05, 0.7, 3.0, 25.0])


@st.composite
def programs(draw: st.DrawFn, size: int | None = None) -> tuple[int, list[Op]]:
    """A common sequence of operations: of the whole world, of groups, and of pairs."""
    ranks = size or draw(st.integers(2, 4))
    everyone = tuple(range(ranks))
    ops = []
    for line in range(1, draw(st.integers(1, 8)) + 1):
        name = draw(st.sampled_from(["barrier", "all_reduce", "all_gather", "group", "pair"]))
        if name == "pair":
            pair = draw(st.permutations(everyone))[:2]
            ops.append(Op("exchange", tuple(pair), line, world=False))
        elif name == "group" and ranks > 2:
            members = draw(st.sets(st.sampled_from(everyone), min_size=2, max_size=ranks - 1))
            ops.append(Op(draw(st.sampled_from(["barrier", "all_reduce"])), tuple(sorted(members)), line, world=False))
        else:
            ops.append(Op("all_reduce" if name == "group" else name, everyone, line))
    return ranks, ops


def todo_of(rank: int, ops: list[Op], delays: Sequence[float]) -> list[tuple[Op, float]]:
    """What one rank does of a program."""
    mine = []
    for op, delay in zip(ops, delays, strict=True):
        if rank in op.members:
            name = ("send" if rank == op.members[0] else "recv") if op.name == "exchange" else op.name
            mine.append((replace(op, name=name), delay))
    return mine


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """A healthy program on ranks of different speed."""
    ranks, ops = draw(programs())
    row = st.lists(DELAYS, min_size=len(ops), max_size=len(ops))
    return World([todo_of(rank, ops, draw(row)) for rank in range(ranks)])


def judge(snapshots: list[RankSnapshot], now: int, observed: dict[int, Observed] | None = None) -> Verdict:
    return diagnose(snapshots, now, None, observed)


@settings(max_examples=300, deadline=None)
@given(worlds(), st.floats(0.0, 120.0), st.booleans())
def test_a_healthy_run_is_never_alarming(world: World, moment: float, seen: bool) -> None:
    snapshots = world.run(moment)
    observed = {
        s.rank: Observed(s.rank, "running" if s.phase is Phase.RUNNING else "sleeping", stack=_STACK) for s in snapshots
    }
    verdict = judge(snapshots, START + round(moment * SECOND), observed if seen else None)
    assert not verdict.alarming, verdict
    assert verdict.kind in {"well", "late", "finished", "unknown"}, verdict


_STACK = (StackFrame(FILE, 99, "train"),)


def stall(world: World, observed: dict[int, Observed] | None = None) -> Verdict:
    """What is said long after the last thing has happened."""
    snapshots = world.run(1e6)
    last = max(max(s.heartbeat, s.phase_since) for s in snapshots)
    return judge(snapshots, last + STALL, observed)


QUICK = st.sampled_from([0.0, 0.001, 0.05, 0.7])


@settings(max_examples=150, deadline=None)
@given(programs(), st.data())
def test_a_rank_that_leaves_before_the_last_meeting_is_missing(
    program: tuple[int, list[Op]], data: st.DataObject
) -> None:
    ranks, ops = program
    ops = [*ops, Op("barrier", tuple(range(ranks)), 50)]
    guilty = data.draw(st.integers(0, ranks - 1))
    delays = data.draw(st.lists(QUICK, min_size=len(ops), max_size=len(ops)))
    todo = [todo_of(rank, ops, delays) for rank in range(ranks)]
    todo[guilty].pop()
    verdict = stall(World(todo))
    assert verdict.kind in {"missing", "uneven"}, verdict
    assert verdict.ranks == (guilty,)
    assert verdict.lines == ("train.py:50",)
    assert verdict.alarming


@settings(max_examples=150, deadline=None)
@given(programs(), st.data())
def test_a_rank_that_sleeps_is_blocked(program: tuple[int, list[Op]], data: st.DataObject) -> None:
    ranks, ops = program
    everyone = tuple(range(ranks))
    guilty = data.draw(st.integers(0, ranks - 1))
    last = data.draw(st.sampled_from([Op("barrier", everyone, 50), Op("all_reduce", everyone, 50)]))
    delays = data.draw(st.lists(QUICK, min_size=len(ops) + 1, max_size=len(ops) + 1))
    todo = [todo_of(rank, [*ops, last], delays) for rank in range(ranks)]
    todo[guilty][-1] = (last, 1e9)
    observed = {rank: Observed(rank, "sleeping", stack=_STACK) for rank in everyone}
    verdict = stall(World(todo), observed)
    assert (verdict.kind, verdict.ranks) == ("blocked", (guilty,))
    assert verdict.lines == ("train.py:50", "train.py:99")
    working = {**observed, guilty: Observed(guilty, "running", stack=_STACK)}
    again = stall(World(todo), working)
    assert (again.kind, again.ranks, again.alarming) == ("late", (guilty,), False)
    halted = {**observed, guilty: Observed(guilty, "stopped")}
    assert (stall(World(todo), halted).kind, stall(World(todo), halted).ranks) == ("halted", (guilty,))
    dead = {**observed, guilty: Observed(guilty, "gone")}
    assert (stall(World(todo), dead).kind, stall(World(todo), dead).ranks) == ("missing", (guilty,))


@settings(max_examples=150, deadline=None)
@given(programs(), st.data())
def test_one_that_calls_another_collective_or_shape_differs(program: tuple[int, list[Op]], data: st.DataObject) -> None:
    ranks, ops = program
    everyone = tuple(range(ranks))
    guilty = data.draw(st.integers(0, ranks - 1))
    common = Op("all_reduce", everyone, 50)
    other = data.draw(st.sampled_from([replace(common, name="all_gather"), replace(common, size=9)]))
    delays = data.draw(st.lists(QUICK, min_size=len(ops) + 1, max_size=len(ops) + 1))
    todo = [todo_of(rank, [*ops, common], delays) for rank in range(ranks)]
    todo[guilty][-1] = (replace(other, line=60), 0.0)
    verdict = stall(World(todo))
    assert verdict.kind in {"mismatch", "uneven"}, verdict
    assert guilty in verdict.ranks or verdict.kind == "uneven"
    if ranks > 2 and verdict.kind == "mismatch":
        assert verdict.ranks == (guilty,)
    assert set(verdict.lines) == {"train.py:50", "train.py:60"}


@settings(max_examples=150, deadline=None)
@given(st.integers(3, 4), programs(3), st.data())
def test_groups_in_different_orders(ranks: int, program: tuple[int, list[Op]], data: st.DataObject) -> None:
    _, ops = program
    one, two = data.draw(st.permutations([(0, 1), (0, 1, 2)]))
    delays = data.draw(st.lists(QUICK, min_size=len(ops), max_size=len(ops)))
    todo = [todo_of(rank, ops, delays) for rank in range(ranks)]
    first, second = Op("all_reduce", one, 50, world=False), Op("all_reduce", two, 60, world=False)
    for rank in range(3):
        mine = [op for op in ((second, first) if rank == 1 else (first, second)) if rank in op.members]
        todo[rank] += [(op, 0.0) for op in mine]
    verdict = stall(World(todo))
    assert (verdict.kind, verdict.ranks) == ("order", (0, 1)), verdict
    assert set(verdict.lines) == {"train.py:50", "train.py:60"}


@settings(max_examples=150, deadline=None)
@given(programs(), st.sampled_from(["send", "recv"]), st.data())
def test_pairs_that_wait_for_each_other(program: tuple[int, list[Op]], name: str, data: st.DataObject) -> None:
    ranks, ops = program
    pair = tuple(sorted(data.draw(st.permutations(range(ranks)))[:2]))
    delays = data.draw(st.lists(QUICK, min_size=len(ops), max_size=len(ops)))
    todo = [todo_of(rank, ops, delays) for rank in range(ranks)]
    for rank in pair:
        todo[rank].append((Op(name, pair, 50, world=False), 0.0))
    verdict = stall(World(todo))
    assert (verdict.kind, verdict.ranks, verdict.lines) == ("deadlock", pair, ("train.py:50",))

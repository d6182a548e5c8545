"""What the kernel sees of its ranks from outside: whether a process runs, sleeps, is stopped, and what it has used.

A rank's word on the board ends where it gets stuck. Its process goes on telling: CPU time that grows is work, bytes
that move are work, a stopped process does neither. A rank's children count as the rank: a loader waits while its
workers work.
"""

from __future__ import annotations

import contextlib
import html
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import psutil

from nbstate.launch.stacks import Stacks
from nbstate.telemetry.board import Phase, RankSnapshot
from nbstate.telemetry.diagnosis import Verdict
from nbstate.telemetry.observed import Observed, StackFrame
from nbstate.telemetry.source import is_user_file, show_line

__all__ = ["Finding", "has_worked", "innermost", "observe", "since"]

_State = Literal["running", "sleeping", "stopped", "gone", "unknown"]
_STATES: Final[Mapping[str, _State]] = {
    psutil.STATUS_RUNNING: "running",
    psutil.STATUS_SLEEPING: "sleeping",
    psutil.STATUS_DISK_SLEEP: "sleeping",
    psutil.STATUS_IDLE: "sleeping",
    psutil.STATUS_STOPPED: "stopped",
    psutil.STATUS_TRACING_STOP: "running",  # for a moment, by whoever takes its stack
    psutil.STATUS_ZOMBIE: "gone",
    psutil.STATUS_DEAD: "gone",
}
_SOME_CPU: Final = 0.02  # seconds: two ticks of the system's clock,
_SHARE_OF_CPU: Final = 0.01  # or this part of the time that went by, if that is more
_SOME_BYTES: Final = 1 << 16  # as much as a log or a heartbeat of some library's may write meanwhile
_WAITING: Final = frozenset({Phase.BARRIER, Phase.COLLECTIVE})


def observe(pids: Mapping[int, int], stacks: Stacks | None = None) -> dict[int, Observed]:
    """Look at the ranks' processes.

    Parameters
    ----------
    pids : mapping of int to int
        Ranks and their processes; 0 for a rank that has not started, negative for one that has ended.
    stacks : Stacks, optional
        Their stacks, if they were taken.
    """
    below = _descendants()
    return {rank: _observe(rank, pid, below, stacks.main(rank) if stacks else ()) for rank, pid in pids.items()}


def _observe(rank: int, pid: int, below: Mapping[int, list[int]], stack: tuple[StackFrame, ...]) -> Observed:
    if pid <= 0:
        return Observed(rank, process="gone" if pid else "unknown")
    try:
        process = psutil.Process(pid)
        state: _State = _STATES.get(process.status(), "unknown")
    except psutil.Error:
        state = "gone"
    if state == "gone":
        return Observed(rank, process=state)
    cpu, moved = 0.0, 0
    known = False
    for each in (pid, *_all_below(pid, below)):
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(each).cpu_times()
            # what a child has used counts as its parent's once that has waited for it, so nothing ever drops out
            cpu += times.user + times.system + times.children_user + times.children_system
            counters: Any = psutil.Process(each).io_counters()
            moved += getattr(counters, "read_chars", 0) + getattr(counters, "write_chars", 0)
            known = True
    return Observed(rank, process=state, cpu_seconds=cpu, io_bytes=moved if known else -1, stack=stack)


def _descendants() -> dict[int, list[int]]:
    """Every process of the machine: its children."""
    below: dict[int, list[int]] = defaultdict(list)
    for process in psutil.process_iter(["ppid"]):
        below[process.info["ppid"] or 0].append(process.pid)
    return below


def _all_below(pid: int, below: Mapping[int, list[int]]) -> Iterator[int]:
    for child in below.get(pid, ()):
        yield child
        yield from _all_below(child, below)


def has_worked(
    snapshots: Sequence[RankSnapshot], before: Mapping[int, Observed], after: Mapping[int, Observed], seconds: float
) -> bool:
    """Whether a rank that is in code of its own has done more than a little between two looks.

    What ranks do that wait for others does not count: some back ends wait by spinning.

    Parameters
    ----------
    snapshots : sequence of RankSnapshot
        The board, which was the same at both looks.
    before, after : mapping of int to Observed
        What was seen of the ranks.
    seconds : float
        Between the looks.
    """
    enough = max(_SOME_CPU, _SHARE_OF_CPU * seconds)
    for snapshot in snapshots:
        then, now = before.get(snapshot.rank), after.get(snapshot.rank)
        if snapshot.phase in _WAITING or then is None or now is None:
            continue
        if then.cpu_seconds >= 0 and now.cpu_seconds - then.cpu_seconds > enough:
            return True
        if then.io_bytes >= 0 and now.io_bytes - then.io_bytes > _SOME_BYTES:
            return True
    return False


def since(before: Mapping[int, Observed], after: Mapping[int, Observed], seconds: float) -> dict[int, Observed]:
    """What was seen after, with what CPU time each rank has used since what was seen before."""
    return {
        rank: replace(now, cpu_used=now.cpu_seconds - before[rank].cpu_seconds, cpu_window=seconds)
        if rank in before and min(now.cpu_seconds, before[rank].cpu_seconds) >= 0
        else now
        for rank, now in after.items()
    }


def innermost(stack: Sequence[StackFrame]) -> StackFrame | None:
    """The user's own line that a stack is in."""
    return next((frame for frame in stack if frame.line and is_user_file(frame.file)), None)


@dataclass(frozen=True, repr=False)
class Finding:
    """A verdict and what was seen of the ranks, for a person.

    Attributes
    ----------
    verdict : Verdict
        What is wrong, if anything is.
    observed : dict of int to Observed
        What the kernel saw of each rank.
    cells : dict of str to str
        File names of cells to what the notebook calls them.
    """

    verdict: Verdict
    observed: Mapping[int, Observed] = field(default_factory=dict)
    cells: Mapping[str, str] = field(default_factory=dict)

    @property
    def lines(self) -> tuple[str, ...]:
        """The sentence, then the evidence, then where guilty ranks are if nothing before says it."""
        said = [self.verdict.sentence, *self.verdict.evidence]
        for rank in self.verdict.ranks:
            where = self.place(rank)
            if where and not any(_names(text, where) for text in said):
                said.append(f"rank {rank} is at {where}")
        return tuple(said)

    def place(self, rank: int) -> str:
        """The user's own line that a rank was in, as ``"In[5], line 14"``; empty if it is not known."""
        frame = innermost(self.observed[rank].stack) if rank in self.observed else None
        return show_line(frame.file, frame.line, self.cells) if frame else ""

    def __repr__(self) -> str:
        first, *rest = self.lines
        return "\n".join([first, *(f"  {line}" for line in rest)])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


def _names(text: str, where: str) -> bool:
    """Whether a text names a place, and not one whose number only begins with the same digits."""
    _, found, after = text.partition(where)
    return bool(found) and not after[:1].isdecimal()

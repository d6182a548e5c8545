"""The ranks as columns: one list per column, one entry per rank.

Columns rather than rows: at 512 ranks a name a value would be most of the message. A new fact on the board is one
field in ``telemetry/board.py`` and one column here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_high
from typing import Final, TypedDict

from nbstate.dashboard.gradients import gradient_detail
from nbstate.dashboard.kinds import BLAMING
from nbstate.telemetry.board import Flag, Phase, RankSnapshot
from nbstate.telemetry.diagnosis import name_ranks
from nbstate.telemetry.source import show_line

__all__ = ["STRIP", "Columns", "Utilisation", "build_columns", "name_group", "show_bytes", "show_memory", "strip"]

STRIP: Final = 48  # steps in a strip

_PHASE_TEXT: Final = {
    Phase.ABSENT: "not started",
    Phase.STARTING: "starting",
    Phase.RUNNING: "running",
    Phase.LOADER: "in loader",
    Phase.COLLECTIVE: "in collective",
    Phase.BARRIER: "in barrier",
    Phase.RETURNING: "returning",
    Phase.FINISHED: "finished",
    Phase.FAILED: "failed",
    Phase.STOPPED: "stopped",
}
# Names that are longer than their columns.
_SHORT: Final = {"init_process_group": "init group"}
# In these a rank's time says nothing any more.
_AT_REST: Final = frozenset({Phase.ABSENT, Phase.FINISHED, Phase.FAILED, Phase.STOPPED})


@dataclass(frozen=True)
class Utilisation:
    """How busy a rank is, as seen from outside. None where that is not known.

    Parameters
    ----------
    cpu_percent : float or None
        Of one core, of the rank's own process: 250 is two and a half cores.
    device_percent : float or None
        Of its device, by whoever uses it.
    device_memory_used, device_memory_total : int
        Bytes of its device; zeros where not known.
    """

    cpu_percent: float | None = None
    device_percent: float | None = None
    device_memory_used: int = 0
    device_memory_total: int = 0


_UNKNOWN: Final = Utilisation()


class Columns(TypedDict):
    """One list per column, each in rank order. Times are seconds after the start of the launch.

    ``phase`` is the phase's name in lower case, ``phase_text`` what people call it; ``phase_since`` is None where a
    time says nothing. ``sync``: whether this step's gradients are synchronised, None if unknown. ``strip``: the last
    steps, oldest first, ``"1"`` synchronised and ``"0"`` accumulated; empty beyond a table's size. ``detail``: the
    rest of the gradient state. ``end``: -1 unless this is the last batch of its loader, then the samples that are over.

    ``last`` is the newest collective or barrier, ``last_number`` its number, 0 if only a part of the world takes part.
    ``last_since`` is known while the rank is in it, ``last_took`` (seconds) once it has left, neither if it never left.
    ``last_what`` is its shape, its group if that is not the whole world, and its other side if it has one.
    ``last_where`` is its line. ``pending``: handles that were issued and not yet waited for, ``pending_what`` the
    oldest and its line, ``pending_since`` when that was issued.

    ``cpu`` and ``device_use`` are percent, None if unknown.
    ``memory_share``: percent used, None if unknown. ``mark``: the kind of verdict that blames this rank, or ``""``.
    ``differs``: the columns in which it differs from the crowd.
    """

    rank: list[int]
    pid: list[int]
    device: list[str]
    phase: list[str]
    phase_text: list[str]
    phase_since: list[float | None]
    step: list[int]
    epoch: list[int | None]
    sync: list[bool | None]
    strip: list[str]
    detail: list[str]
    end: list[int]
    last: list[str]
    last_number: list[int]
    last_since: list[float | None]
    last_took: list[float | None]
    last_what: list[str]
    last_where: list[str]
    pending: list[int]
    pending_what: list[str]
    pending_since: list[float | None]
    cpu: list[int | None]
    device_use: list[int | None]
    memory: list[str]
    memory_share: list[int | None]
    mark: list[str]
    differs: list[list[str]]


def build_columns(
    snapshots: Sequence[RankSnapshot],
    started: int,
    *,
    kind: str,
    guilty: Sequence[int],
    cells: Mapping[str, str] | None = None,
    utilisation: Mapping[int, Utilisation] | None = None,
    strips: bool = True,
    ended: bool = False,
) -> Columns:
    """Turn snapshots into columns.

    Parameters
    ----------
    snapshots : sequence of RankSnapshot
        The board, in rank order.
    started : int
        ``monotonic_ns`` of the start of the launch.
    kind : str
        The verdict's kind, which becomes the mark of the guilty.
    guilty : sequence of int
        The ranks the verdict blames.
    cells : mapping of str to str, optional
        File name of a cell to what the notebook calls it.
    utilisation : mapping of int to Utilisation, optional
        How busy each rank is.
    strips : bool
        Whether to fill in the strips of steps.
    ended : bool
        Whether the launch is over, so that what a rank last wrote is what it was doing when it was ended.
    """
    last = [_last(s, started) for s in snapshots]
    blamed = set(guilty) if kind in BLAMING else set()
    use = [_UNKNOWN if utilisation is None or ended else utilisation.get(s.rank, _UNKNOWN) for s in snapshots]
    memory = [_memory(s, u) for s, u in zip(snapshots, use, strict=True)]
    where = _Places(cells or {})
    return Columns(
        rank=[s.rank for s in snapshots],
        pid=[s.pid for s in snapshots],
        device=[s.device for s in snapshots],
        phase=[s.phase.name.lower() for s in snapshots],
        phase_text=[_phase_text(s, ended) for s in snapshots],
        phase_since=[None if ended or s.phase in _AT_REST else _after(started, s.phase_since) for s in snapshots],
        step=[s.step for s in snapshots],
        epoch=[s.epoch if s.flag(Flag.KNOWN) else None for s in snapshots],
        sync=[s.flag(Flag.SYNC_GRADIENTS) if s.flag(Flag.KNOWN) else None for s in snapshots],
        strip=[strip(s.sync_history, s.sync_count) if strips else "" for s in snapshots],
        detail=[gradient_detail(s) for s in snapshots],
        end=[max(0, s.remainder) if s.flag(Flag.END_OF_DATALOADER) else -1 for s in snapshots],
        last=[name for name, _, _, _ in last],
        last_number=[number for _, number, _, _ in last],
        last_since=[since for _, _, since, _ in last],
        last_took=[took for _, _, _, took in last],
        last_what=[_what(s) for s in snapshots],
        last_where=[_where(s, where) for s in snapshots],
        pending=[s.pending_count for s in snapshots],
        pending_what=[_pending(s, where) if s.pending_count else "" for s in snapshots],
        pending_since=[_after(started, s.pending_since) if s.pending_count else None for s in snapshots],
        cpu=[_percent(u.cpu_percent) for u in use],
        device_use=[_percent(u.device_percent) for u in use],
        memory=[show_memory(used, total) for used, total in memory],
        memory_share=[round(100 * used / total) if total else None for used, total in memory],
        mark=[kind if s.rank in blamed else "" for s in snapshots],
        differs=_differs(snapshots),
    )


def strip(history: int, count: int, length: int = STRIP) -> str:
    """The last steps of a rank, oldest first.

    Parameters
    ----------
    history : int
        Bit 0 is the newest step; 1 means its gradients were synchronised.
    count : int
        Steps so far.
    length : int
        Steps to show, at most 64.

    Examples
    --------
    >>> strip(0b0101, 4)
    '0101'
    """
    shown = min(count, length)
    return format(history & ((1 << shown) - 1), f"0{shown}b") if shown else ""


def show_bytes(count: int) -> str:
    """A size as people say it: ``"312 MB"``, ``"3.4 GB"``, ``"80 GB"`` (powers of 1024)."""
    if count < 1 << 30:
        return f"{round(count / (1 << 20))} MB"
    size = count / (1 << 30)
    return f"{size:.1f} GB" if size < 10 else f"{round(size)} GB"


def _after(started: int, moment: int) -> float | None:
    return max(0.0, round((moment - started) / 1e9, 3)) if moment else None


def _phase_text(snapshot: RankSnapshot, ended: bool) -> str:
    phase = snapshot.phase
    if phase is Phase.BARRIER:
        text = f"{'in ' if ended else ''}barrier #{snapshot.barrier}"
    elif phase is Phase.COLLECTIVE and snapshot.collective_name:
        text = f"in {_short(snapshot.collective_name)}"
    else:
        text = _PHASE_TEXT[phase]
    return f"was {text}" if ended and phase not in _AT_REST else text


def _short(collective: str) -> str:
    return _SHORT.get(collective, collective)


def _last(snapshot: RankSnapshot, started: int) -> tuple[str, int, float | None, float | None]:
    """Name, number, ``since`` if the rank is in it, seconds it took if not, of the newest collective or barrier."""
    if _native_is_newest(snapshot):
        # Torch tells of an operation only for as long as it is open.
        waits = snapshot.phase not in _AT_REST
        return _short(snapshot.native_name), 0, _after(started, snapshot.native_since) if waits else None, None
    if _barrier_is_newest(snapshot):
        name, number = "barrier", snapshot.barrier
        entered, left = snapshot.barrier_entered, snapshot.barrier_left
    elif snapshot.collective_entered:
        name, number = _short(snapshot.collective_name), 0 if snapshot.collective_partial else snapshot.collective
        entered, left = snapshot.collective_entered, snapshot.collective_left
    else:
        return "", 0, None, None
    if entered > left:
        # Not left, and in another phase: it raised, or the rank was stopped in it.
        waits = snapshot.phase in (Phase.BARRIER, Phase.COLLECTIVE)
        return name, number, _after(started, entered) if waits else None, None
    return name, number, None, round((left - entered) / 1e9, 4)


class _Places:
    """How lines are called, worked out once for each: ranks are mostly in the same ones."""

    def __init__(self, cells: Mapping[str, str]) -> None:
        self._cells = cells
        self._known: dict[tuple[str, int], str] = {}

    def call(self, file: str, line: int) -> str:
        place = file, line
        if place not in self._known:
            self._known[place] = show_line(file, line, self._cells) if file and line else ""
        return self._known[place]


def _barrier_is_newest(snapshot: RankSnapshot) -> bool:
    return bool(snapshot.barrier) and snapshot.barrier_entered >= snapshot.collective_entered


_AT_ONCE: Final = 100_000_000  # ns between the board's word on an operation and torch's


def _native_is_newest(snapshot: RankSnapshot) -> bool:
    """Whether the rank is in an operation of torch's own, such as DDP's, which no call of the user's stands for."""
    if not snapshot.native_name or snapshot.in_collective or snapshot.in_barrier:
        return False
    if snapshot.heartbeat > snapshot.native_since + _AT_ONCE:
        return False  # the rank has gone on since, and torch was not asked again
    return snapshot.native_since > max(snapshot.collective_entered, snapshot.barrier_entered)


def _what(snapshot: RankSnapshot) -> str:
    """Shape, group and other side of the newest collective; nothing of these is known of a barrier."""
    if _native_is_newest(snapshot):
        group = f"of {name_group(snapshot.native_group)}" if snapshot.native_group else ""
        return " · ".join(part for part in ("torch's own", snapshot.native_shape, group) if part)
    if not snapshot.collective_entered or _barrier_is_newest(snapshot):
        return ""
    group = f"of {name_group(snapshot.collective_group)}" if snapshot.collective_group else ""
    peer = f"with rank {snapshot.collective_peer}" if snapshot.collective_peer >= 0 else ""
    return " · ".join(part for part in (snapshot.collective_shape, peer, "" if peer else group) if part)


def name_group(members: str) -> str:
    """The members of a group as the board has them, as people say them; as they are if the board has cut them.

    Examples
    --------
    >>> name_group("0,2"), name_group("0,1,2,3"), name_group("...,9")
    ('ranks 0 and 2', 'ranks 0 to 3', 'ranks ...,9')
    """
    ranks = members.split(",")
    return name_ranks(map(int, ranks)) if all(rank.isdecimal() for rank in ranks) else f"ranks {members}"


def _where(snapshot: RankSnapshot, places: _Places) -> str:
    if _native_is_newest(snapshot):
        return ""
    if _barrier_is_newest(snapshot):
        return places.call(snapshot.barrier_file, snapshot.barrier_line)
    return places.call(snapshot.collective_file, snapshot.collective_line)


def _pending(snapshot: RankSnapshot, places: _Places) -> str:
    place = places.call(snapshot.pending_file, snapshot.pending_line)
    return f"{snapshot.pending_name} ({place})" if place else snapshot.pending_name


def _percent(value: float | None) -> int | None:
    return None if value is None else round(value)


def _memory(snapshot: RankSnapshot, use: Utilisation) -> tuple[int, int]:
    """Used and total: the rank's own numbers, or, before it has any, its device's."""
    if snapshot.memory_used or snapshot.memory_total:
        return snapshot.memory_used, snapshot.memory_total
    return use.device_memory_used, use.device_memory_total


def show_memory(used: int, total: int) -> str:
    """Memory as people say it: ``"37 / 80 GB"``, ``"100 MB"`` if the total is not known, nothing if nothing is."""
    if not total:
        return show_bytes(used) if used else ""
    whole = show_bytes(total)
    if whole.endswith("MB"):
        return f"{round(used / (1 << 20))} / {whole}"
    gigabytes = used / (1 << 30)
    return f"{gigabytes:.1f} / {whole}" if gigabytes < 9.95 else f"{round(gigabytes)} / {whole}"


def _differs(snapshots: Sequence[RankSnapshot]) -> list[list[str]]:
    """For each rank the columns in which it stands apart from most others."""
    known = [s for s in snapshots if s.flag(Flag.KNOWN)]
    if len(known) < 2:
        return [[] for _ in snapshots]
    usual_step = median_high(s.step for s in known)
    usual_epoch = _usual([s.epoch for s in known])
    # Ranks are never looked at in the same instant, so one step apart is normal, and the flag of a step may only be
    # compared between ranks that are in the same step.
    flags: dict[int, int | None] = {
        step: _usual([s.flags & Flag.SYNC_GRADIENTS for s in known if s.step == step])
        for step in {s.step for s in known}
    }
    apart: list[list[str]] = []
    for s in snapshots:
        columns = []
        if s.flag(Flag.KNOWN):
            if abs(s.step - usual_step) > 1:
                columns.append("step")
            if usual_epoch is not None and s.epoch != usual_epoch:
                columns.append("epoch")
            usual_flag = flags[s.step]
            if usual_flag is not None and s.flags & Flag.SYNC_GRADIENTS != usual_flag:
                columns.append("sync")
        apart.append(columns)
    return apart


def _usual(values: Sequence[int]) -> int | None:
    """The value of a clear majority of three or more, if there is one."""
    if len(values) < 3:
        return None
    ((value, times),) = Counter(values).most_common(1)
    return value if 2 * times > len(values) else None

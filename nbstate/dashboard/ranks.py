"""The ranks as columns: one list per column, one entry per rank.

Columns rather than rows: at 512 ranks a name a value would be most of the message. A new fact on the board is one
field in ``telemetry/board.py`` and one column here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median_high
from typing import Final, TypedDict

from nbstate.telemetry.board import Flag, Phase, RankSnapshot

__all__ = ["STRIP", "Columns", "build_columns", "show_bytes", "strip"]

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
_BLAMED: Final = frozenset({"late", "missing", "mismatch", "failed"})
# Names that are longer than their columns.
_SHORT: Final = {"init_process_group": "init group"}
# In these a rank's time says nothing any more.
_AT_REST: Final = frozenset({Phase.ABSENT, Phase.FINISHED, Phase.FAILED, Phase.STOPPED})


class Columns(TypedDict):
    """One list per column, each in rank order. Times are seconds after the start of the launch.

    ``phase`` is the phase's name in lower case, ``phase_text`` what people call it; ``phase_since`` is None where a
    time says nothing. ``sync``: whether this step's gradients are synchronised, None if unknown. ``strip``: the last
    steps, oldest first, ``"1"`` synchronised and ``"0"`` accumulated; empty beyond a table's size. ``detail``: the
    rest of the gradient state.

    ``last`` is the newest collective or barrier, ``last_number`` its number, 0 if only a part of the world takes part.
    ``last_since`` is known while the rank is in it, ``last_took`` (seconds) once it has left, neither if it never left.

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
    last: list[str]
    last_number: list[int]
    last_since: list[float | None]
    last_took: list[float | None]
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
    strips : bool
        Whether to fill in the strips of steps.
    ended : bool
        Whether the launch is over, so that what a rank last wrote is what it was doing when it was ended.
    """
    last = [_last(s, started) for s in snapshots]
    blamed = set(guilty) if kind in _BLAMED else set()
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
        detail=[_detail(s) for s in snapshots],
        last=[name for name, _, _, _ in last],
        last_number=[number for _, number, _, _ in last],
        last_since=[since for _, _, since, _ in last],
        last_took=[took for _, _, _, took in last],
        memory=[_memory(s) for s in snapshots],
        memory_share=[round(100 * s.memory_used / s.memory_total) if s.memory_total else None for s in snapshots],
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


def _detail(snapshot: RankSnapshot) -> str:
    """What the chip has no room for, as one line."""
    if not snapshot.flag(Flag.KNOWN):
        return ""
    parts = []
    if snapshot.num_steps > 1:
        parts.append(f"every {snapshot.num_steps} steps")
    if snapshot.flag(Flag.END_OF_DATALOADER):
        parts.append("last batch" + (f", remainder {snapshot.remainder}" if snapshot.remainder > 0 else ""))
    if snapshot.num_steps > 1 and not snapshot.flag(Flag.SYNC_WITH_DATALOADER):
        parts.append("count carries over the end of the loader")
    if snapshot.skipped_steps:
        parts.append(f"optimizer steps skipped: {snapshot.skipped_steps}")
    return " · ".join(parts)


def _last(snapshot: RankSnapshot, started: int) -> tuple[str, int, float | None, float | None]:
    """Name, number, ``since`` if the rank is in it, seconds it took if not, of the newest collective or barrier."""
    if snapshot.barrier and snapshot.barrier_entered >= snapshot.collective_entered:
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


def _memory(snapshot: RankSnapshot) -> str:
    if not snapshot.memory_total:
        return show_bytes(snapshot.memory_used) if snapshot.memory_used else ""
    total = show_bytes(snapshot.memory_total)
    if total.endswith("MB"):
        return f"{round(snapshot.memory_used / (1 << 20))} / {total}"
    used = snapshot.memory_used / (1 << 30)
    return f"{used:.1f} / {total}" if used < 9.95 else f"{round(used)} / {total}"


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

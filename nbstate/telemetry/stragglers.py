"""Which rank the others have waited for, from the last barriers that the board remembers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Final

from nbstate.telemetry.board import RankSnapshot

__all__ = ["often_last"]

_SECOND: Final = 1e9
_TOGETHER: Final = 0.01  # seconds: who comes so shortly after the one before was not last
_ENOUGH: Final = 3  # barriers before anything is called often


def often_last(snapshots: Sequence[RankSnapshot], ranks: Sequence[int]) -> tuple[str, ...]:
    """How often each of some ranks was the last at a barrier, and how late, for those that were it mostly.

    Parameters
    ----------
    snapshots : sequence of RankSnapshot
        All ranks.
    ranks : sequence of int
        Those to tell of.

    Returns
    -------
    tuple of str
        As ``"rank 2 was the last at 7 of the last 8 barriers, 1.30 s after the one before"``.
    """
    entered: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for snapshot in snapshots:
        for barrier in snapshot.barriers:
            entered[barrier.number].append((barrier.entered, snapshot.rank))
    full = [sorted(times) for times in entered.values() if len(times) == len(snapshots) > 1]
    if len(full) < _ENOUGH:
        return ()
    lateness: dict[int, list[float]] = defaultdict(list)
    for times in full:
        (before, _), (last, rank) = times[-2:]
        if (last - before) / _SECOND > _TOGETHER:
            lateness[rank].append((last - before) / _SECOND)
    return tuple(
        f"rank {rank} was the last at {len(lateness[rank])} of the last {len(full)} barriers, "
        f"{median(lateness[rank]):.2f} s after the one before"
        for rank in ranks
        if len(lateness.get(rank, ())) * 2 > len(full)
    )

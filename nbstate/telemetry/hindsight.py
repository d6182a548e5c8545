"""Why a launch failed, read from the board: the findings of ``diagnosis``, looked at once nothing more can come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from nbstate.telemetry.board import Phase, RankSnapshot
from nbstate.telemetry.diagnosis import (
    find_group_mismatch,
    find_late,
    find_late_for_a_part,
    find_mismatch,
    find_missing,
)
from nbstate.telemetry.operations import World
from nbstate.telemetry.stuck import find_circle, find_deserted
from nbstate.telemetry.verdict import Verdict

__all__ = ["explain"]

_FINDINGS: Final = (
    find_missing,
    find_mismatch,
    find_group_mismatch,
    find_circle,
    find_deserted,
    find_late,
    find_late_for_a_part,
)


def explain(snapshots: Sequence[RankSnapshot], now: int, cells: Mapping[str, str] | None = None) -> Verdict | None:
    """Say why a launch failed, once a rank's connection broke, its time was up, or C++ ended it.

    The same findings as ``diagnose`` has, looked at in hindsight: a rank whose barrier or collective raised counts as
    one that waits there, and nothing more will come, so operations are compared at once.

    Parameters
    ----------
    snapshots, now, cells
        As ``diagnose`` takes them, at the time of the failure.

    Returns
    -------
    Verdict or None
        Of kind ``"missing"``, ``"mismatch"``, ``"uneven"`` or ``"late"``; None if the board does not explain it.
    """
    world = World(tuple(map(_where_it_failed, snapshots)), now, cells or {}, mismatch_after=0)
    for finding in _FINDINGS:
        verdict = finding(world)
        if verdict is not None:
            return verdict
    return None


def _where_it_failed(snapshot: RankSnapshot) -> RankSnapshot:
    """A rank that failed in a barrier or collective, put back into it."""
    if snapshot.phase is not Phase.FAILED or not (snapshot.in_barrier or snapshot.in_collective):
        return snapshot
    in_barrier = snapshot.barrier_entered > snapshot.collective_entered
    if not (snapshot.in_barrier if in_barrier else snapshot.in_collective):
        return snapshot  # it came out of its last operation; what stands open is an older one
    return replace(snapshot, phase=Phase.BARRIER if in_barrier else Phase.COLLECTIVE)

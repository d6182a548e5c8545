"""A launch examined while it runs: stacks, what its processes do, and what follows from both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from nbstate.launch.dumps import Dumps
from nbstate.launch.native import take_native_stacks
from nbstate.launch.observing import Finding, innermost, observe
from nbstate.launch.stacks import Stacks, take_stacks
from nbstate.launch.stall import StallWatch, stall_after
from nbstate.telemetry.board import Phase, RankSnapshot
from nbstate.telemetry.diagnosis import diagnose
from nbstate.telemetry.observed import Observed
from nbstate.telemetry.source import show_line

__all__ = ["SHORT", "Examiner"]

SHORT: Final = 0.5
"""Seconds to wait for a rank's stacks when nobody has asked for them."""
_PATIENCE: Final = 2.0  # the same when somebody has
_IN_OWN_CODE: Final = frozenset({Phase.RUNNING, Phase.LOADER})

Look = Callable[[], tuple[list[RankSnapshot], int]]


class Examiner:
    """Examines one launch, from any thread.

    Parameters
    ----------
    world_size : int
        Number of ranks.
    look : callable
        The board and the time, as ``Attempt.look``.
    ended : callable
        The ranks whose processes have ended.
    cells : mapping of str to str
        File names of cells to what the notebook calls them.
    say : callable
        Takes the text of an alarm, for the cell.

    Attributes
    ----------
    dumps : Dumps
        Where the ranks write their stacks.
    watch : StallWatch
        Examines by itself when the launch stands; to be ticked.
    """

    def __init__(
        self,
        world_size: int,
        look: Look,
        ended: Callable[[], frozenset[int]],
        cells: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        self.dumps = Dumps(world_size)
        self._look, self._ended, self._cells = look, ended, cells
        self.watch = StallWatch(stall_after(), look, self._observe, cells, say)

    def stacks(self, native: bool = False) -> Stacks:
        """See ``Launch.stacks``."""
        pids = self._pids()
        return take_native_stacks(pids, self._cells) if native else self._take(pids, _PATIENCE)

    def examine(self, patience: float = _PATIENCE) -> Finding:
        """Ask every rank for its stack, look at its process, and say what is wrong, if anything is.

        Parameters
        ----------
        patience : float
            Seconds to wait for a rank that does not answer.
        """
        observed = self._observe(True, patience)
        snapshots, now = self._look()
        return Finding(diagnose(snapshots, now, self._cells, observed), observed, self._cells)

    def find_places(self) -> dict[int, str]:
        """Where ranks that are in code of their own are in it: ``"In[5], line 14"``. For the text of an error."""
        snapshots, _ = self._look()
        own = {snapshot.rank for snapshot in snapshots if snapshot.phase in _IN_OWN_CODE}
        stacks = self._take({rank: pid for rank, pid in self._pids().items() if rank in own}, SHORT)
        found = {rank: innermost(stacks.main(rank)) for rank in own}
        return {rank: show_line(at.file, at.line, self._cells) for rank, at in found.items() if at}

    def close(self) -> None:
        """Stop watching, and let go of the files. Safe to call twice."""
        self.watch.rest()
        self.dumps.close()

    def _take(self, pids: Mapping[int, int], patience: float) -> Stacks:
        return take_stacks(self.dumps, pids, self._cells, patience)

    def _observe(self, with_stacks: bool, patience: float = SHORT) -> dict[int, Observed]:
        pids = self._pids()
        return observe(pids, self._take(pids, patience) if with_stacks else None)

    def _pids(self) -> dict[int, int]:
        """Each rank's process: 0 before it has one, -1 once that has ended."""
        snapshots, _ = self._look()
        ended = self._ended()
        return {snapshot.rank: -1 if snapshot.rank in ended else snapshot.pid for snapshot in snapshots}

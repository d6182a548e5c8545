"""The watch for a launch that has come to a stand: it looks closer, says once what is wrong, and never ends anything.

A launch stands when nothing on its board has changed for a while (``NBSTATE_STALL_AFTER`` seconds) and no rank that is
in code of its own has worked meanwhile. Both must hold: a rank that computes for an hour writes nothing on the board,
and one that waits in a collective may spin. Whether a stand is a fault is for ``diagnose`` to say.

Cost: until half of that time has gone by, one comparison of the board with itself, ten times a second. Only then does
a thread begin to look at processes, and only once the time is over are the ranks asked for their stacks.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from nbstate.launch import observing
from nbstate.launch.observing import Finding, has_worked
from nbstate.telemetry.board import RankSnapshot
from nbstate.telemetry.diagnosis import Verdict, diagnose
from nbstate.telemetry.observed import Observed

__all__ = ["StallWatch", "stall_after"]

VARIABLE: Final = "NBSTATE_STALL_AFTER"
_DEFAULT: Final = 10.0
_LOOK_AGAIN: Final = 0.1
_VERDICT_AGAIN: Final = 1.0
_OBSERVE_AGAIN: Final = (1.0, 2.0, 4.0, 8.0)  # seconds between two closer looks: the longer it stands, the seldomer
_ASLEEP: Final = 2.0  # seconds without a tick: then this process itself did not run, and knows nothing of the others

Look = Callable[[], tuple[list[RankSnapshot], int]]


def stall_after() -> float:
    """Seconds without progress after which a launch stands; infinity for never.

    From ``NBSTATE_STALL_AFTER``; 10 if that is not set, or is not a number.
    """
    try:
        seconds = float(os.environ.get(VARIABLE, ""))
    except ValueError:
        return _DEFAULT
    return seconds if seconds > 0 else math.inf


class StallWatch:
    """Watches one launch.

    Parameters
    ----------
    after : float
        Seconds without progress.
    look : callable
        The board and the time, as ``Attempt.look``.
    observe : callable
        What the kernel sees of the ranks; with their stacks if its argument is true. May take a second.
    cells : mapping of str to str
        File names of cells to what the notebook calls them.
    say : callable
        Takes the text for the cell, once per alarm.

    Attributes
    ----------
    finding : Finding or None
        The alarm that stands, if one does.
    """

    def __init__(
        self,
        after: float,
        look: Look,
        observe: Callable[[bool], Mapping[int, Observed]],
        cells: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        self.finding: Finding | None = None
        self._after, self._look, self._observe, self._cells, self._say = after, look, observe, cells, say
        self._seen: list[RankSnapshot] = []
        self._since = self._ticked = time.monotonic()
        self._active = False
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._said: set[tuple[object, ...]] = set()

    @property
    def verdict(self) -> Verdict | None:
        """The verdict of the alarm that stands."""
        finding = self.finding
        return None if finding is None else finding.verdict

    def tick(self, active: bool) -> None:
        """Notice progress; called often, on one thread.

        Parameters
        ----------
        active : bool
            Whether the launch is to be watched: not if it has failed or is being ended.
        """
        now = time.monotonic()
        self._active = active
        if now - self._ticked < _LOOK_AGAIN and active:
            return
        slept, self._ticked = now - self._ticked > _ASLEEP, now
        snapshots, _ = self._look()
        if not active or slept or snapshots != self._seen:
            self._seen, self._since = snapshots, now
            self.finding = None
        elif now - self._since >= self._after / 2 and not (self._thread and self._thread.is_alive()):
            self._thread = threading.Thread(target=self._stand, args=(self._since,), name="nbstate-watch", daemon=True)
            self._thread.start()

    def rest(self) -> None:
        """Stop watching, until the next tick. Once this returns nobody looks at anything."""
        self._active = False
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        self._wake.clear()
        self.finding = None

    def _stand(self, since: float) -> None:
        try:
            self._look_closer(since)
        except Exception as error:  # whoever only watches must not disturb
            self._after = math.inf
            self._say(f"nbstate: the watch for stalls has stopped: {type(error).__name__}: {error}")

    def _look_closer(self, since: float) -> None:
        """Watch the ranks' processes for as long as nothing has happened since then."""
        before, began = self._observe(False), time.monotonic()
        if not self._sleep_until(since + self._after, since):
            return
        observed: Mapping[int, Observed] = {}
        pauses, due = iter(_OBSERVE_AGAIN), 0.0
        while self._stands(since):
            if time.monotonic() >= due:
                due = time.monotonic() + next(pauses, _OBSERVE_AGAIN[-1])
                if has_worked(self._seen, before, self._observe(False), time.monotonic() - began):
                    if self._stands(since):
                        self.finding, self._since = None, time.monotonic()
                    return
                observed = observing.since(before, self._observe(True), time.monotonic() - began)
            self._judge(observed, since)
            self._sleep_until(time.monotonic() + _VERDICT_AGAIN, since)

    def _stands(self, since: float) -> bool:
        return self._active and self._since == since

    def _sleep_until(self, moment: float, since: float) -> bool:
        """Sleep, and return whether the launch still stands then."""
        while self._stands(since) and (left := moment - time.monotonic()) > 0:
            self._wake.wait(min(left, _LOOK_AGAIN))
        return self._stands(since)

    def _judge(self, observed: Mapping[int, Observed], since: float) -> None:
        snapshots, now = self._look()
        if snapshots != self._seen:
            return
        verdict = diagnose(snapshots, now, self._cells, observed)
        if not verdict.alarming or not self._stands(since):
            self.finding = None
            return
        self.finding = finding = Finding(verdict, observed, self._cells)
        alarm = (verdict.kind, verdict.ranks, verdict.lines)
        if alarm not in self._said:
            self._said.add(alarm)
            self._say(_told(finding))


def _told(finding: Finding) -> str:
    first, *rest = finding.lines
    ways = "Nothing was ended. The launch's stacks() shows where each rank is; stop() ends it"
    return "\n".join([f"nbstate: {first}", *(f"  {line}" for line in rest), f"  {ways}"])

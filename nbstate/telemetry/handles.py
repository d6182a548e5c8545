"""The handles that a rank's calls gave (``async_op=True``, ``isend``) and that it has not waited for yet."""

from __future__ import annotations

import weakref
from typing import Any

from nbstate.telemetry.slot import Issued

__all__ = ["Handles"]


class Handles:
    """Handles in the order in which they were issued, each with the facts of its operation. For one thread.

    A handle is held weakly. One that its owner drops can no longer be waited for; ``forget_dropped`` forgets it, and
    not the moment in which it is dropped, which may be any: in another thread, or in the middle of a write.
    """

    def __init__(self) -> None:
        # The references are the keys: they compare as the handles do, and each keeps its hash when the handle is gone.
        self._open: dict[weakref.ref[Any], Issued] = {}
        self.dropped: list[weakref.ref[Any]] = []

    def __len__(self) -> int:
        return len(self._open)

    def add(self, work: Any, issued: Issued) -> None:
        """Follow a handle from now on."""
        # First, since a new handle may lie where a dropped one lay, and would be taken for it.
        self.forget_dropped()
        self._open[weakref.ref(work, self.dropped.append)] = issued

    def get(self, work: Any) -> Issued | None:
        """The facts of a handle's operation; None if it is not followed."""
        return self._open.get(weakref.ref(work))

    def remove(self, work: Any) -> bool:
        """Follow a handle no longer. Returns whether it was followed."""
        return self._open.pop(weakref.ref(work), None) is not None

    def forget_dropped(self) -> None:
        """Follow those no longer that nobody holds."""
        while self.dropped:
            self._open.pop(self.dropped.pop(), None)

    def oldest(self) -> Issued | None:
        """The facts of the handle that was issued first."""
        return next(iter(self._open.values()), None)

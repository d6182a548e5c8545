"""The Engine protocol: what a supervisor needs of whatever makes ranks."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Protocol

from nbstate.launch.plan import RankPlan

__all__ = ["Engine", "RankHandle"]


class RankHandle(Protocol):
    """One rank, as the kernel holds it."""

    rank: int
    control: int
    """Descriptor, non-blocking: the rank's results and errors arrive here, its permission to leave goes out."""
    stdout: int
    stderr: int
    ended: int
    """Descriptor that becomes readable when the rank's process has ended; -1 if the system has no such thing."""

    @property
    def pid(self) -> int:
        """The rank's process."""

    def poll(self) -> int | None:
        """Exit code (negative: the signal that ended it), or None while it lives."""

    def send_signal(self, number: signal.Signals) -> None:
        """Signal the rank; nothing happens if it has ended."""

    def close(self) -> None:
        """Close the descriptors and forget the process. Only for a rank that has ended."""


class Engine(Protocol):
    """Makes ranks. ``start`` is called on the thread that will outlive them."""

    name: str

    def ready(self) -> bool:
        """Whether ``start`` would start ranks at once. Returns at once; to be asked again until it is so."""

    def why_gone(self, exitcode: int) -> str:
        """Whether a rank that left with this code was ended by the end of the engine, and how; empty if it was not."""

    def start(self, plans: Sequence[RankPlan]) -> list[RankHandle]:
        """Start one rank per plan. If one cannot be started, those before it are killed and the error comes through."""

"""The board: shared memory in which every rank leaves word of itself, one slot per rank.

One-way: ranks write, the kernel reads. A rank that is stuck in C++, stopped or dead leaves its last words readable,
and nothing the kernel does can ever block a rank. What a slot holds, and where, is in ``layout.py``;
how it is written and read, in ``slot.py``.

The memory is a file without a name (memfd on Linux, an unlinked file in a private directory elsewhere), handed to the
ranks as an inherited descriptor: no other user can open it, and it is gone when the last process that holds it is.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Sequence

from nbstate.telemetry.layout import (
    HISTORY,
    SIGNED,
    SLOT_BYTES,
    TEXTS,
    WORDS,
    Barrier,
    Flag,
    Phase,
    RankSnapshot,
)
from nbstate.telemetry.slot import Slot

__all__ = [
    "HISTORY",
    "SIGNED",
    "TEXTS",
    "WORDS",
    "Barrier",
    "Board",
    "Flag",
    "Phase",
    "RankSnapshot",
    "Slot",
    "missing_from_barrier",
]


class Board:
    """The whole board. ``create`` in the kernel, ``attach`` in a rank with the inherited descriptor.

    Parameters
    ----------
    fd : int
        Descriptor of the shared memory. The board owns it and closes it.
    world_size : int
        Number of slots.

    Examples
    --------
    >>> from nbstate.telemetry.board import Board, Phase
    >>> board = Board.create(2)
    >>> board.slot(1).write(pid=42, phase=Phase.RUNNING)
    >>> board.snapshot()[1].pid
    42
    >>> board.close()
    """

    def __init__(self, fd: int, world_size: int) -> None:
        self.fd = fd
        self.world_size = world_size
        self._memory = mmap.mmap(fd, world_size * SLOT_BYTES)
        self._view = memoryview(self._memory)
        self._slots: list[Slot] = []
        for rank in range(world_size):
            raw = self._view[rank * SLOT_BYTES : (rank + 1) * SLOT_BYTES]
            self._slots.append(Slot(raw.cast("Q"), raw, rank))

    @classmethod
    def create(cls, world_size: int) -> Board:
        """Make an empty board that has no name in any file system."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("nbstate-board", os.MFD_CLOEXEC)
        else:  # pragma: no cover - not on Linux
            fd, path = tempfile.mkstemp(prefix="nbstate-board-")
            os.unlink(path)
        os.ftruncate(fd, world_size * SLOT_BYTES)
        board = cls(fd, world_size)
        for slot in board._slots:
            slot.write(collective_peer=-1)
        return board

    @classmethod
    def attach(cls, fd: int, world_size: int) -> Board:
        """Map a board that another process made."""
        return cls(fd, world_size)

    def slot(self, rank: int) -> Slot:
        """One rank's place."""
        return self._slots[rank]

    def snapshot(self) -> list[RankSnapshot]:
        """Read every slot, in rank order."""
        return [slot.snapshot() for slot in self._slots]

    def close(self) -> None:
        """Unmap and close. Safe to call twice."""
        if self.fd < 0:
            return
        for slot in self._slots:
            slot.release()
        self._view.release()
        self._memory.close()
        with contextlib.suppress(OSError):
            os.close(self.fd)
        self.fd = -1

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self.fd < 0


def missing_from_barrier(snapshots: Sequence[RankSnapshot]) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """The newest open barrier of a world.

    Returns
    -------
    tuple
        ``(number, arrived, missing)``: the barrier's number (0 if none is open), the ranks that wait in it or have
        passed it, and the ranks that have not come yet.
    """
    open_numbers = [s.barrier for s in snapshots if s.in_barrier]
    if not open_numbers:
        return 0, (), ()
    number = max(open_numbers)
    arrived = tuple(s.rank for s in snapshots if s.barrier >= number)
    missing = tuple(s.rank for s in snapshots if s.barrier < number)
    return number, arrived, missing

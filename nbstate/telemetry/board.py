"""The board: shared memory in which every rank leaves word of itself, one slot per rank.

One-way: ranks write, the kernel reads. A rank that is stuck in C++, stopped or dead leaves its last words readable,
and nothing the kernel does can ever block a rank. What a slot holds, and where, is in ``layout.py``.

Words are stored through ``memoryview.cast("Q")``, one aligned 8-byte store each, which cannot tear.
``struct.pack_into`` zeroes the place before it packs, and a reader sees the zero: never use it here.

The memory is a file without a name (memfd on Linux, an unlinked file in a private directory elsewhere), handed to the
ranks as an inherited descriptor: no other user can open it, and it is gone when the last process that holds it is.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
from collections.abc import Sequence
from typing import Final

from nbstate.telemetry.layout import (
    HISTORY,
    HISTORY_AT,
    INDEX,
    SIGNED,
    SLOT_BYTES,
    TEXT_PLACES,
    TEXTS,
    WORD,
    WORDS,
    Barrier,
    Flag,
    Phase,
    RankSnapshot,
    barrier_texts,
    collective_texts,
    decode,
    fit,
    read_barriers,
    shape_text,
    signed,
)

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

_MASK: Final = (1 << 64) - 1
_SPINS: Final = 10  # collisions with a writer before the reader makes room for it
_PAUSE: Final = 0.00005  # seconds

# Places of the words that the hot paths store; looking them up by name on each call costs more than the store.
_HEARTBEAT: Final = INDEX["heartbeat"]
_PHASE: Final = INDEX["phase"]
_PHASE_SINCE: Final = INDEX["phase_since"]
_STEP: Final = INDEX["step"]
_FLAGS: Final = INDEX["flags"]
_SYNC_HISTORY: Final = INDEX["sync_history"]
_SYNC_COUNT: Final = INDEX["sync_count"]
_BARRIER: Final = INDEX["barrier"]
_BARRIER_ENTERED: Final = INDEX["barrier_entered"]
_BARRIER_LEFT: Final = INDEX["barrier_left"]
_BARRIER_LINE: Final = INDEX["barrier_line"]
_COLLECTIVE: Final = INDEX["collective"]
_COLLECTIVE_ENTERED: Final = INDEX["collective_entered"]
_COLLECTIVE_LEFT: Final = INDEX["collective_left"]
_COLLECTIVE_LINE: Final = INDEX["collective_line"]
_COLLECTIVE_BYTES: Final = INDEX["collective_bytes"]
_COLLECTIVE_PARTIAL: Final = INDEX["collective_partial"]
_IN_COLLECTIVE: Final = int(Phase.COLLECTIVE)
_IN_BARRIER: Final = int(Phase.BARRIER)
_BARRIER_TEXT_AT: Final = TEXT_PLACES["barrier_file"][0] * WORD
_COLLECTIVE_TEXT_AT: Final = TEXT_PLACES["collective_file"][0] * WORD
_SHAPE_TEXT_AT: Final = TEXT_PLACES["collective_shape"][0] * WORD


class Slot:
    """One rank's place on the board. Written by one thread at a time (the rank's), read by anyone.

    Every write opens with an odd version and closes with the next even one. A write that was cut short (a signal
    handler that raised, a rank killed) leaves the version odd; the next writer starts from there and mends it.
    """

    def __init__(self, words: memoryview, raw: memoryview, rank: int) -> None:
        self.rank = rank
        self._words = words
        self._raw = raw
        self._seen: tuple[int, RankSnapshot] | None = None
        self._ring: tuple[bytes, tuple[Barrier, ...]] = (b"", ())
        self._stuck = 0  # a version at which the slot was found half-written before: not waited for again
        # File, name and shape of the collective whose texts stand in the slot: a loop need not store them again.
        self._file: str | None = None
        self._name: str | None = None
        self._shape: str | None = None

    def write(self, **fields: int) -> None:
        """Store words by name. Readers see all of them or none."""
        words = self._words
        words[0] = version = words[0] | 1
        for name, value in fields.items():
            words[INDEX[name]] = value & _MASK
        words[0] = version + 1

    def write_text(self, **fields: str) -> None:
        """Store texts by name, each cut from the left to its room (the end of a path says more than its start)."""
        words, raw = self._words, self._raw
        self._file = self._shape = None
        words[0] = version = words[0] | 1
        for name, text in fields.items():
            at, room = TEXT_PLACES[name]
            data = fit(text, room)
            start = (at + 1) * WORD
            raw[start : start + len(data)] = data
            words[at] = len(data)
        words[0] = version + 1

    def write_barrier(self, barrier: Barrier) -> None:
        """Store one barrier in the ring of the last ``HISTORY``."""
        words = self._words
        words[0] = version = words[0] | 1
        at = HISTORY_AT + 4 * (barrier.number % HISTORY)
        words[at], words[at + 1] = barrier.number, barrier.entered
        words[at + 2], words[at + 3] = barrier.left, barrier.line
        words[0] = version + 1

    def write_phase(self, phase: int, now: int) -> None:
        """Store the phase, since when, and a heartbeat."""
        words = self._words
        words[0] = version = words[0] | 1
        words[_PHASE] = phase
        words[_PHASE_SINCE] = now
        words[_HEARTBEAT] = now
        words[0] = version + 1

    def write_step(self, step: int, history: int, flags: int, now: int) -> None:
        """Store one step: its number, which is also the count of sync flags, the flags' history, and a heartbeat."""
        words = self._words
        words[0] = version = words[0] | 1
        words[_STEP] = step
        words[_SYNC_COUNT] = step
        words[_SYNC_HISTORY] = history
        words[_FLAGS] = flags
        words[_HEARTBEAT] = now
        words[0] = version + 1

    def open_collective(
        self,
        number: int,
        now: int,
        filename: str,
        line: int,
        name: str,
        nbytes: int,
        partial: bool,
        shape: str = "",
    ) -> None:
        """Store that a collective was entered, phase and heartbeat included, in one guarded write."""
        words = self._words
        texts = None
        if filename is not self._file or name is not self._name:
            texts = collective_texts(filename, name)
        form = None if shape is self._shape else shape_text(shape)
        words[0] = version = words[0] | 1
        words[_HEARTBEAT] = now
        words[_PHASE] = _IN_COLLECTIVE
        words[_PHASE_SINCE] = now
        words[_COLLECTIVE] = number
        words[_COLLECTIVE_ENTERED] = now
        words[_COLLECTIVE_LINE] = line
        words[_COLLECTIVE_BYTES] = nbytes
        words[_COLLECTIVE_PARTIAL] = partial
        if texts is not None:
            self._raw[_COLLECTIVE_TEXT_AT : _COLLECTIVE_TEXT_AT + len(texts)] = texts
            self._file, self._name = filename, name
        if form is not None:
            self._raw[_SHAPE_TEXT_AT : _SHAPE_TEXT_AT + len(form)] = form
            self._shape = shape
        words[0] = version + 1

    def close_collective(self, phase: int, now: int) -> None:
        """Store that the open collective was left for ``phase``, in one guarded write."""
        words = self._words
        words[0] = version = words[0] | 1
        words[_COLLECTIVE_LEFT] = now
        words[_PHASE] = phase
        words[_PHASE_SINCE] = now
        words[_HEARTBEAT] = now
        words[0] = version + 1

    def open_barrier(self, number: int, now: int, filename: str, line: int) -> None:
        """Store that a barrier was entered, phase, heartbeat and history included, in one guarded write."""
        words = self._words
        texts = barrier_texts(filename)
        at = HISTORY_AT + 4 * (number % HISTORY)
        words[0] = version = words[0] | 1
        words[_HEARTBEAT] = now
        words[_PHASE] = _IN_BARRIER
        words[_PHASE_SINCE] = now
        words[_BARRIER] = number
        words[_BARRIER_ENTERED] = now
        words[_BARRIER_LINE] = line
        self._raw[_BARRIER_TEXT_AT : _BARRIER_TEXT_AT + len(texts)] = texts
        words[at] = number
        words[at + 1] = now
        words[at + 2] = 0
        words[at + 3] = line
        words[0] = version + 1

    def close_barrier(self, number: int, phase: int, now: int) -> None:
        """Store that barrier ``number`` was left for ``phase``, history included, in one guarded write."""
        words = self._words
        words[0] = version = words[0] | 1
        words[_BARRIER_LEFT] = now
        words[_PHASE] = phase
        words[_PHASE_SINCE] = now
        words[_HEARTBEAT] = now
        words[HISTORY_AT + 4 * (number % HISTORY) + 2] = now
        words[0] = version + 1

    def read(self, name: str) -> int:
        """One word, as the rank itself last stored it."""
        return signed(name, self._words[INDEX[name]])

    def snapshot(self, tries: int = 50) -> RankSnapshot:
        """Read the whole slot.

        A slot that was not written since the last call gives the same object again, at the cost of one read. A
        writer that is at work is waited for, a few milliseconds at most; after ``tries`` collisions (a rank that
        was stopped or killed in the middle of a write) the newest copy is taken as it is.
        """
        words, raw = self._words, self._raw
        copy = b""
        for attempt in range(tries):
            before = words[0]
            if self._seen is not None and self._seen[0] == before:
                return self._seen[1]
            copy = bytes(raw)
            if before == words[0] and not before & 1:
                self._seen = before, self._decode(copy)
                return self._seen[1]
            if before == self._stuck:
                break
            if attempt > _SPINS:
                time.sleep(_PAUSE)
        self._stuck = words[0]
        return self._decode(copy)

    def _decode(self, copy: bytes) -> RankSnapshot:
        ring = copy[HISTORY_AT * WORD :]
        # Most reads find the ring as it was, and building its barriers is most of the cost of a read.
        if ring != self._ring[0]:
            self._ring = ring, read_barriers(ring)
        return decode(self.rank, copy, self._ring[1])

    def release(self) -> None:
        """Let go of the memory, so that the board can be closed."""
        self._words.release()
        self._raw.release()


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
        """Make a board of zeroes that has no name in any file system."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("nbstate-board", os.MFD_CLOEXEC)
        else:  # pragma: no cover - not on Linux
            fd, path = tempfile.mkstemp(prefix="nbstate-board-")
            os.unlink(path)
        os.ftruncate(fd, world_size * SLOT_BYTES)
        return cls(fd, world_size)

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

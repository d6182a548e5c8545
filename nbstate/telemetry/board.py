"""The board: shared memory in which every rank leaves word of itself, one slot per rank.

One-way: ranks write, the kernel reads. A rank that is stuck in C++, stopped or dead leaves its last words readable,
and nothing the kernel does can ever block a rank.

Layout of a slot, in 8-byte words::

    word 0         version: even when the slot is at rest, odd while its rank writes (a sequence lock)
    words 1..      one word per name in ``WORDS``, unsigned; ``SIGNED`` ones are two's complement
    then           one text per row of ``TEXTS``: its length in one word, then its bytes, utf-8
    then           the last ``HISTORY`` barriers: number, entered, left, line

Words are stored through ``memoryview.cast("Q")``, one aligned 8-byte store each, which cannot tear.
``struct.pack_into`` zeroes the place before it packs, and a reader sees the zero: never use it here.

Times are ``time.monotonic_ns()``, which all processes of one machine share.

The memory is a file without a name (memfd on Linux, an unlinked file in a private directory elsewhere), handed to the
ranks as an inherited descriptor: no other user can open it, and it is gone when the last process that holds it is.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

__all__ = ["Barrier", "Board", "Flag", "Phase", "RankSnapshot", "Slot"]


class Phase(IntEnum):
    """What a rank is doing. One word for one thing: these are also the words of the dashboard."""

    ABSENT = 0
    STARTING = 1
    RUNNING = 2
    LOADER = 3
    COLLECTIVE = 4
    BARRIER = 5
    RETURNING = 6
    FINISHED = 7
    FAILED = 8
    STOPPED = 9


class Flag(IntEnum):
    """Bits of the word ``flags``: the gradient state as the rank sees it."""

    KNOWN = 1
    SYNC_GRADIENTS = 2
    END_OF_DATALOADER = 4
    SYNC_WITH_DATALOADER = 8
    ADJUST_SCHEDULER = 16
    IN_DATALOADER = 32


WORDS: Final = (
    "pid",
    "attempt",
    "heartbeat",
    "phase",
    "phase_since",
    "step",
    "epoch",
    "flags",
    "num_steps",
    "remainder",
    "sync_history",
    "sync_count",
    "optimizer_steps",
    "skipped_steps",
    "barrier",
    "barrier_entered",
    "barrier_left",
    "barrier_line",
    "collective",
    "collective_entered",
    "collective_left",
    "collective_line",
    "collective_bytes",
    "memory_used",
    "memory_total",
)
SIGNED: Final = frozenset({"remainder", "epoch"})
TEXTS: Final = {"device": 24, "barrier_file": 200, "collective_file": 200, "collective_name": 40}
HISTORY: Final = 32

_WORD = 8
_INDEX: Final = {name: 1 + i for i, name in enumerate(WORDS)}


def _place_texts() -> tuple[dict[str, tuple[int, int]], int]:
    places, word = {}, 1 + len(WORDS)
    for name, size in TEXTS.items():
        places[name] = (word, size)
        word += 1 + size // _WORD
    return places, word


_TEXT_PLACES, _HISTORY_AT = _place_texts()
_SLOT_WORDS: Final = _HISTORY_AT + 4 * HISTORY
_SLOT_BYTES: Final = _SLOT_WORDS * _WORD
_MASK: Final = (1 << 64) - 1


@dataclass(frozen=True)
class Barrier:
    """One barrier of one rank. Times in nanoseconds; ``left`` is 0 while the rank still waits."""

    number: int
    entered: int
    left: int
    line: int


@dataclass(frozen=True)
class RankSnapshot:
    """What the board says of one rank at one moment. All times are ``time.monotonic_ns()``; 0 means never."""

    rank: int
    pid: int
    attempt: int
    heartbeat: int
    phase: Phase
    phase_since: int
    step: int
    epoch: int
    flags: int
    num_steps: int
    remainder: int
    sync_history: int
    sync_count: int
    optimizer_steps: int
    skipped_steps: int
    barrier: int
    barrier_entered: int
    barrier_left: int
    barrier_line: int
    collective: int
    collective_entered: int
    collective_left: int
    collective_line: int
    collective_bytes: int
    memory_used: int
    memory_total: int
    device: str
    barrier_file: str
    collective_file: str
    collective_name: str
    barriers: tuple[Barrier, ...] = ()

    def flag(self, flag: Flag) -> bool:
        """Whether one bit of the gradient state is set."""
        return bool(self.flags & flag)

    @property
    def in_barrier(self) -> bool:
        """Whether the rank has entered a barrier and not left it."""
        return self.barrier_entered > self.barrier_left

    @property
    def in_collective(self) -> bool:
        """Whether the rank has entered a collective and not left it."""
        return self.collective_entered > self.collective_left


class Slot:
    """One rank's place on the board. Written by one thread at a time (the rank's), read by anyone."""

    def __init__(self, words: memoryview, raw: memoryview, rank: int) -> None:
        self.rank = rank
        self._words = words
        self._raw = raw

    def write(self, **fields: int) -> None:
        """Store words by name. Readers see all of them or none."""
        words = self._words
        words[0] += 1
        for name, value in fields.items():
            words[_INDEX[name]] = value & _MASK
        words[0] += 1

    def write_text(self, **fields: str) -> None:
        """Store texts by name, each cut from the left to its room (the end of a path says more than its start)."""
        words, raw = self._words, self._raw
        words[0] += 1
        for name, text in fields.items():
            at, room = _TEXT_PLACES[name]
            data = text.encode("utf-8", "replace")[-room:]
            start = (at + 1) * _WORD
            raw[start : start + len(data)] = data
            words[at] = len(data)
        words[0] += 1

    def write_barrier(self, barrier: Barrier) -> None:
        """Store one barrier in the ring of the last ``HISTORY``."""
        at = _HISTORY_AT + 4 * (barrier.number % HISTORY)
        words = self._words
        words[0] += 1
        words[at], words[at + 1], words[at + 2], words[at + 3] = (
            barrier.number,
            barrier.entered,
            barrier.left,
            barrier.line,
        )
        words[0] += 1

    def read(self, name: str) -> int:
        """One word, as the rank itself last stored it."""
        return _signed(name, self._words[_INDEX[name]])

    def snapshot(self, tries: int = 50) -> RankSnapshot:
        """Read the whole slot. After ``tries`` collisions with the writer the newest copy is taken as it is."""
        words, raw = self._words, self._raw
        copy = b""
        for _ in range(tries):
            before = words[0]
            copy = bytes(raw)
            if before == words[0] and not before & 1:
                break
        return _decode(self.rank, copy)

    def release(self) -> None:
        """Let go of the memory, so that the board can be closed."""
        self._words.release()
        self._raw.release()


def _signed(name: str, value: int) -> int:
    return value - (1 << 64) if name in SIGNED and value >> 63 else value


def _decode(rank: int, copy: bytes) -> RankSnapshot:
    words = memoryview(copy).cast("Q")
    values: dict[str, int] = {name: _signed(name, words[i]) for name, i in _INDEX.items()}
    phase = values.pop("phase")
    texts = {}
    for name, (at, room) in _TEXT_PLACES.items():
        start = (at + 1) * _WORD
        texts[name] = copy[start : start + min(words[at], room)].decode("utf-8", "replace")
    ring = (words[i : i + 4].tolist() for i in range(_HISTORY_AT, _SLOT_WORDS, 4))
    barriers = sorted((Barrier(*row) for row in ring if row[0]), key=lambda barrier: barrier.number)
    known = Phase(phase) if phase in Phase._value2member_map_ else Phase.ABSENT
    return RankSnapshot(rank=rank, phase=known, barriers=tuple(barriers), **values, **texts)


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
        self._memory = mmap.mmap(fd, world_size * _SLOT_BYTES)
        self._view = memoryview(self._memory)
        self._slots: list[Slot] = []
        for rank in range(world_size):
            raw = self._view[rank * _SLOT_BYTES : (rank + 1) * _SLOT_BYTES]
            self._slots.append(Slot(raw.cast("Q"), raw, rank))

    @classmethod
    def create(cls, world_size: int) -> Board:
        """Make a board of zeroes that has no name in any file system."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("nbstate-board", os.MFD_CLOEXEC)
        else:  # pragma: no cover - not on Linux
            fd, path = tempfile.mkstemp(prefix="nbstate-board-")
            os.unlink(path)
        os.ftruncate(fd, world_size * _SLOT_BYTES)
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

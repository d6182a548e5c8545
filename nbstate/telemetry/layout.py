"""What a slot of the board holds and where: its words, its texts, and the last barriers.

In 8-byte words::

    word 0         version: even when the slot is at rest, odd while its rank writes (a sequence lock)
    words 1..      one word per name in ``WORDS``, unsigned; ``SIGNED`` ones are two's complement
    then           one text per row of ``TEXTS``: its length in one word, then its bytes, utf-8
    then           the last ``HISTORY`` barriers: number, entered, left, line

A new fact is one name in ``WORDS`` (or a row in ``TEXTS``) and one field of ``RankSnapshot``. Times are
``time.monotonic_ns()``, which all processes of one machine share.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

__all__ = [
    "HISTORY",
    "HISTORY_AT",
    "INDEX",
    "SIGNED",
    "SLOT_BYTES",
    "TEXTS",
    "TEXT_PLACES",
    "WORD",
    "WORDS",
    "Barrier",
    "Flag",
    "Phase",
    "RankSnapshot",
    "barrier_texts",
    "collective_texts",
    "decode",
    "fit",
    "read_barriers",
    "shape_text",
    "signed",
]


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
    "collective_partial",
    "memory_used",
    "memory_total",
)
SIGNED: Final = frozenset({"remainder", "epoch"})
TEXTS: Final = {
    "device": 24,
    "barrier_file": 200,
    "collective_file": 200,
    "collective_name": 40,
    "collective_shape": 48,
}
HISTORY: Final = 32

WORD: Final = 8
INDEX: Final = {name: 1 + i for i, name in enumerate(WORDS)}


def _place_texts() -> tuple[dict[str, tuple[int, int]], int]:
    places, word = {}, 1 + len(WORDS)
    for name, size in TEXTS.items():
        places[name] = (word, size)
        word += 1 + size // WORD
    return places, word


TEXT_PLACES, HISTORY_AT = _place_texts()
SLOT_BYTES: Final = (HISTORY_AT + 4 * HISTORY) * WORD
_PHASES: Final = {int(phase): phase for phase in Phase}


def fit(text: str, room: int) -> bytes:
    """Encode a text, cut from the left to ``room`` bytes without leaving half a character at the cut."""
    data = text.encode("utf-8", "replace")
    return data if len(data) <= room else data[-room:].decode("utf-8", "ignore").encode()


def _text_block(**texts: str) -> bytes:
    parts = []
    for name, text in texts.items():
        room = TEXT_PLACES[name][1]
        data = fit(text, room)
        parts += [len(data).to_bytes(WORD, sys.byteorder), data.ljust(room, b"\0")]
    return b"".join(parts)


@functools.lru_cache(maxsize=1024)
def collective_texts(filename: str, name: str) -> bytes:
    """Bytes of ``collective_file`` and ``collective_name``, lengths included: side by side, so one copy stores both."""
    return _text_block(collective_file=filename, collective_name=name)


@functools.lru_cache(maxsize=1024)
def shape_text(shape: str) -> bytes:
    """Bytes of ``collective_shape``, its length included."""
    return _text_block(collective_shape=shape)


@functools.lru_cache(maxsize=1024)
def barrier_texts(filename: str) -> bytes:
    """Bytes of ``barrier_file``, its length included."""
    return _text_block(barrier_file=filename)


@dataclass(frozen=True)
class Barrier:
    """One barrier of one rank. Times in nanoseconds; ``left`` is 0 while the rank still waits."""

    number: int
    entered: int
    left: int
    line: int


@dataclass(frozen=True)
class RankSnapshot:
    """What the board says of one rank at one moment. All times are ``time.monotonic_ns()``; 0 means never.

    ``barrier`` and ``collective`` number the operations of the whole world only, so that equal numbers on two ranks
    mean the same operation. ``collective_partial`` is 1 if the last collective was one of a part of the world (a
    smaller group, a send, a receive): then it has no number of its own. ``collective_shape`` is what this rank put
    into the last collective, as ``"4x8 float32"``; empty where that is not known.
    """

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
    collective_partial: int = 0
    collective_shape: str = ""

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


def signed(name: str, value: int) -> int:
    """A stored word as the number it stands for."""
    return value - (1 << 64) if name in SIGNED and value >> 63 else value


def decode(rank: int, copy: bytes, barriers: tuple[Barrier, ...]) -> RankSnapshot:
    """A copy of a slot as a snapshot; its ring of barriers comes decoded (see ``read_barriers``)."""
    words = memoryview(copy).cast("Q")
    values: dict[str, Any] = {name: words[i] for name, i in INDEX.items()}
    for name in SIGNED:
        values[name] = signed(name, values[name])
    values["phase"] = _PHASES.get(values["phase"], Phase.ABSENT)
    for name, (at, room) in TEXT_PLACES.items():
        start = (at + 1) * WORD
        values[name] = copy[start : start + min(words[at], room)].decode("utf-8", "replace")
    return RankSnapshot(rank=rank, barriers=barriers, **values)


def read_barriers(ring: bytes) -> tuple[Barrier, ...]:
    """The ring of a slot's last barriers, in the order of their numbers."""
    words = memoryview(ring).cast("Q")
    rows = sorted(words[i : i + 4].tolist() for i in range(0, 4 * HISTORY, 4) if words[i])
    return tuple(Barrier(*row) for row in rows)

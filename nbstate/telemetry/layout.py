"""What a slot of the board holds and where: its words, its texts, and the last barriers.

In 8-byte words::

    word 0         version: even when the slot is at rest, odd while its rank writes (a sequence lock)
    words 1..      one word per name in ``WORDS``, unsigned; ``SIGNED`` ones are two's complement
    then           one text per row of ``TEXTS``: its length in one word, then its bytes, utf-8
    then           the last ``HISTORY`` barriers: number, entered, left, line, serial number of its file
    then           the last ``FILES`` files of barriers: serial number, length in one word, bytes
    then           what the flight recorder tells: a version of its own, words, texts; another thread writes there

A new fact is one name in ``WORDS`` (or a row in ``TEXTS``) and one field of ``RankSnapshot``. Times are
``time.monotonic_ns()``, which all processes of one machine share.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

__all__ = [
    "BARRIER_WORDS",
    "FILES",
    "FILES_AT",
    "FILE_WORDS",
    "HISTORY",
    "HISTORY_AT",
    "INDEX",
    "NATIVE_AT",
    "NATIVE_INDEX",
    "NATIVE_PLACES",
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
    "pending_texts",
    "read_barriers",
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
    "step",
    "epoch",
    "flags",
    "num_steps",
    "remainder",
    "sync_history",
    "sync_count",
    "optimizer_steps",
    "skipped_steps",
    # From here to collective_peer side by side, for entering a collective stores them in one piece.
    "heartbeat",
    "phase",
    "phase_since",
    "collective",
    "collective_entered",
    "collective_line",
    "collective_bytes",
    "collective_partial",
    "collective_place",
    "collective_sequence",
    "collective_peer",
    "collective_left",
    "barrier",
    "barrier_entered",
    "barrier_left",
    "barrier_line",
    "pending_count",
    "pending_since",
    "pending_line",
    "memory_used",
    "memory_total",
)
SIGNED: Final = frozenset({"remainder", "epoch", "collective_peer"})
TEXTS: Final = {
    "device": 24,
    "barrier_file": 200,
    "collective_file": 200,
    "collective_name": 40,
    "collective_shape": 48,
    "collective_group": 96,
    "pending_file": 200,
    "pending_name": 40,
}
HISTORY: Final = 32
BARRIER_WORDS: Final = 5
FILES: Final = 8
NATIVE_WORDS: Final = ("native_sequence", "native_since")
NATIVE_TEXTS: Final = {"native_name": 40, "native_shape": 48, "native_group": 96}

WORD: Final = 8
INDEX: Final = {name: 1 + i for i, name in enumerate(WORDS)}


def _place_texts(texts: Mapping[str, int], word: int) -> tuple[dict[str, tuple[int, int]], int]:
    places = {}
    for name, size in texts.items():
        places[name] = (word, size)
        word += 1 + size // WORD
    return places, word


TEXT_PLACES, HISTORY_AT = _place_texts(TEXTS, 1 + len(WORDS))
FILES_AT: Final = HISTORY_AT + BARRIER_WORDS * HISTORY
FILE_WORDS: Final = 2 + TEXTS["barrier_file"] // WORD
NATIVE_AT: Final = FILES_AT + FILE_WORDS * FILES
NATIVE_INDEX: Final = {name: NATIVE_AT + 1 + i for i, name in enumerate(NATIVE_WORDS)}
NATIVE_PLACES, _END = _place_texts(NATIVE_TEXTS, NATIVE_AT + 1 + len(NATIVE_WORDS))
SLOT_BYTES: Final = _END * WORD
_PHASES: Final = {int(phase): phase for phase in Phase}


def fit(text: str, room: int) -> bytes:
    """Encode a text, cut from the left to ``room`` bytes without leaving half a character at the cut."""
    data = text.encode("utf-8", "replace")
    return data if len(data) <= room else data[-room:].decode("utf-8", "ignore").encode()


def _text_block(**texts: str) -> bytes:
    parts = []
    for name, text in texts.items():
        room = TEXTS[name]
        data = fit(text, room)
        parts += [len(data).to_bytes(WORD, sys.byteorder), data.ljust(room, b"\0")]
    return b"".join(parts)


@functools.lru_cache(maxsize=4096)
def collective_texts(filename: str, name: str, shape: str, members: str) -> bytes:
    """Bytes of the four texts of a collective, lengths included: side by side, so one copy stores all."""
    return _text_block(collective_file=filename, collective_name=name, collective_shape=shape, collective_group=members)


@functools.lru_cache(maxsize=1024)
def pending_texts(filename: str, name: str) -> bytes:
    """The same of ``pending_file`` and ``pending_name``."""
    return _text_block(pending_file=filename, pending_name=name)


@functools.lru_cache(maxsize=1024)
def barrier_texts(filename: str) -> bytes:
    """Bytes of ``barrier_file``, its length included."""
    return _text_block(barrier_file=filename)


@dataclass(frozen=True)
class Barrier:
    """One barrier of one rank. Times in nanoseconds; ``left`` is 0 while the rank still waits.

    ``file`` is empty where it is no longer known: a slot remembers the last ``FILES`` files only.
    """

    number: int
    entered: int
    left: int
    line: int
    file: str = ""


@dataclass(frozen=True)
class RankSnapshot:
    """What the board says of one rank at one moment. All times are ``time.monotonic_ns()``; 0 means never.

    ``barrier`` and ``collective`` number the operations of the whole world only, so that equal numbers on two ranks
    mean the same operation. ``collective_partial`` is 1 if the last collective was one of a part of the world (a
    smaller group, a send, a receive): then it has no number of its own. ``collective_shape`` is what this rank put
    into the last collective, as ``"4x8 float32"``; empty where that is not known.

    A collective is the call itself, or the wait for a handle that an earlier call gave (``async_op=True``, ``isend``);
    its line is then the wait's. ``collective_place`` is the operation's place among all barriers and collectives of the
    whole world, counted when it was issued, and so the one thing by which the operations of two ranks may be paired;
    0 if only a part of the world takes part. ``collective_group`` names the members of that part, as ``"0,2"``
    (empty: the whole world), ``collective_sequence`` is the operation's number within its group, and of a send or
    receive its number among those to or from ``collective_peer``, a global rank (-1: no peer, or more than one).

    ``pending_count`` handles were issued and not yet waited for; the other ``pending_`` fields are of the oldest.

    The ``native_`` fields are of the oldest operation that torch has begun and not ended on this rank, whoever issued
    it, DDP's and FSDP's own included, as its flight recorder tells once the rank has stood still for about a second;
    ``native_name`` is empty if there is none. ``native_sequence`` is torch's own number within the group.
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
    collective_group: str = ""
    collective_place: int = 0
    collective_sequence: int = 0
    collective_peer: int = -1
    pending_count: int = 0
    pending_since: int = 0
    pending_line: int = 0
    pending_file: str = ""
    pending_name: str = ""
    native_name: str = ""
    native_shape: str = ""
    native_group: str = ""
    native_sequence: int = 0
    native_since: int = 0

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
        length = words[at]
        values[name] = _text(copy, at, length, room) if length else ""
    if not values["pending_count"]:  # what stands there is of a handle that was waited for
        values.update(pending_since=0, pending_line=0, pending_file="", pending_name="")
    if words[NATIVE_AT]:  # most ranks never stand still long enough to have anything there
        values.update((name, words[i]) for name, i in NATIVE_INDEX.items())
        values.update((name, _text(copy, at, words[at], room)) for name, (at, room) in NATIVE_PLACES.items())
    # The generated constructor of a frozen dataclass sets one field at a time, the slow way: half the cost of a read.
    snapshot = object.__new__(RankSnapshot)
    snapshot.__dict__.update(_NO_NATIVE, rank=rank, barriers=barriers, **values)
    return snapshot


_NO_NATIVE: Final[dict[str, Any]] = {**dict.fromkeys(NATIVE_WORDS, 0), **dict.fromkeys(NATIVE_TEXTS, "")}


def _text(copy: bytes, at: int, length: int, room: int) -> str:
    start = (at + 1) * WORD
    return copy[start : start + min(length, room)].decode("utf-8", "replace")


def read_barriers(ring: bytes) -> tuple[Barrier, ...]:
    """The ring of a slot's last barriers and its table of files, in the order of the barriers' numbers."""
    words = memoryview(ring).cast("Q")
    files = {}
    for at in range(FILES_AT - HISTORY_AT, NATIVE_AT - HISTORY_AT, FILE_WORDS):
        if words[at]:
            files[words[at]] = _text(ring, at + 1, words[at + 1], TEXTS["barrier_file"])
    rows = [words[i : i + BARRIER_WORDS].tolist() for i in range(0, BARRIER_WORDS * HISTORY, BARRIER_WORDS) if words[i]]
    return tuple(
        Barrier(number, entered, left, line, files.get(serial, ""))
        for number, entered, left, line, serial in sorted(rows)
    )

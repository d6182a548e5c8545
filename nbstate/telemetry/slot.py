"""One rank's place on the board, and how it is written and read without a lock.

Words are stored through ``memoryview.cast("Q")``, one aligned 8-byte store each, which cannot tear.
``struct.pack_into`` zeroes the place before it packs, and a reader sees the zero: never use it here.
"""

from __future__ import annotations

import struct
import time
from typing import Final, NamedTuple

from nbstate.telemetry.layout import (
    BARRIER_WORDS,
    FILE_WORDS,
    FILES,
    FILES_AT,
    HISTORY,
    HISTORY_AT,
    INDEX,
    NATIVE_AT,
    NATIVE_INDEX,
    NATIVE_PLACES,
    TEXT_PLACES,
    WORD,
    Barrier,
    Phase,
    RankSnapshot,
    barrier_texts,
    collective_texts,
    decode,
    fit,
    pending_texts,
    read_barriers,
    signed,
)

__all__ = ["Issued", "Slot"]

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
_COLLECTIVE_PEER: Final = INDEX["collective_peer"]
_PENDING_COUNT: Final = INDEX["pending_count"]
_PENDING_SINCE: Final = INDEX["pending_since"]
_PENDING_LINE: Final = INDEX["pending_line"]
_NATIVE_SEQUENCE: Final = NATIVE_INDEX["native_sequence"]
_NATIVE_SINCE: Final = NATIVE_INDEX["native_since"]
_IN_COLLECTIVE: Final = int(Phase.COLLECTIVE)
_IN_BARRIER: Final = int(Phase.BARRIER)
_BARRIER_TEXT_AT: Final = TEXT_PLACES["barrier_file"][0] * WORD
_COLLECTIVE_TEXT_AT: Final = TEXT_PLACES["collective_file"][0] * WORD
# What entering a collective stores in one piece: to copy it costs less than to store word by word.
_OPEN: Final = slice(_HEARTBEAT * WORD, (_COLLECTIVE_PEER + 1) * WORD)
_pack_open: Final = struct.Struct("=10Qq").pack
_unpack_open: Final = struct.Struct("=10Qq").unpack
_TEXTS_OPEN: Final = slice(_COLLECTIVE_TEXT_AT, _COLLECTIVE_TEXT_AT + len(collective_texts("", "", "", "")))
_PENDING_TEXT_AT: Final = TEXT_PLACES["pending_file"][0] * WORD


class Issued(NamedTuple):
    """A collective as it was when it was issued: what the wait for its handle has to say again.

    ``block`` is its part of the slot as it stands there, which is quicker to keep than to read.
    """

    block: bytes
    since: int
    line: int
    filename: str
    name: str
    shape: str
    members: str

    def part(self, name: str, nbytes: int, shape: str, members: str, sequence: int, peer: int) -> Issued:
        """One send or receive of the batch that this is."""
        *common, _, partial, place, _, _ = _unpack_open(self.block)
        block = _pack_open(*common, nbytes, partial, place, sequence, peer)
        return self._replace(block=block, name=name, shape=shape, members=members)


class Slot:
    """One rank's place on the board. Written by one thread at a time (the rank's), read by anyone.

    Every write opens with an odd version and closes with the next even one. A write that was cut short (a signal
    handler that raised, a rank killed) leaves the version odd; the next writer starts from there and mends it.
    What the flight recorder tells comes from another thread, so that part of the slot has a version of its own.
    """

    def __init__(self, words: memoryview, raw: memoryview, rank: int) -> None:
        self.rank = rank
        self._words = words
        self._raw = raw
        self._seen: tuple[tuple[int, int], RankSnapshot] | None = None
        self._ring: tuple[bytes, tuple[Barrier, ...]] = (b"", ())
        self._stuck = 0, 0  # versions at which the slot was found half-written before: not waited for again
        # The texts of the collective that stand in the slot: a loop need not store them again.
        self._file: str | None = None
        self._name: str | None = None
        self._shape: str | None = None
        self._members: str | None = None
        self._barrier_file: str | None = None
        self._pending: Issued | None = None
        self._files: dict[str, int] = {}  # serial numbers of the files in the table of the ring

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
        self._file = self._shape = self._members = self._pending = self._barrier_file = None
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
        at = HISTORY_AT + BARRIER_WORDS * (barrier.number % HISTORY)
        words[at], words[at + 1] = barrier.number, barrier.entered
        words[at + 2], words[at + 3] = barrier.left, barrier.line
        words[at + 4] = self._files.get(barrier.file) or self._remember_file(barrier.file)
        words[0] = version + 1

    def _remember_file(self, filename: str) -> int:
        """Put a file into the ring's table, in an open write, and return its serial number.

        A file that is pushed out takes its number with it: its barriers are then without a file, never with another's.
        """
        words = self._words
        # Not from what this object wrote: another rank may have had the slot before, in an earlier attempt.
        serial = 1 + max(words[FILES_AT + FILE_WORDS * row] for row in range(FILES))
        at = FILES_AT + FILE_WORDS * (serial % FILES)
        texts = barrier_texts(filename)
        words[at] = serial
        self._raw[(at + 1) * WORD : (at + 1) * WORD + len(texts)] = texts
        self._files = {known: number for known, number in self._files.items() if number > serial - FILES}
        self._files[filename] = serial
        return serial

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
        members: str = "",
        place: int = 0,
        sequence: int = 0,
        peer: int = -1,
    ) -> None:
        """Store that a collective was entered, phase and heartbeat included, in one guarded write."""
        words = self._words
        texts = None
        if (
            shape is not self._shape
            or name is not self._name
            or filename is not self._file
            or members is not self._members
        ):
            texts = collective_texts(filename, name, shape, members)  # before the write opens: it must be short
        words[0] = version = words[0] | 1
        self._raw[_OPEN] = _pack_open(
            now, _IN_COLLECTIVE, now, number, now, line, nbytes, partial, place, sequence, peer
        )
        if texts is not None:
            self._raw[_TEXTS_OPEN] = texts
            self._file, self._name, self._shape, self._members = filename, name, shape, members
        words[0] = version + 1

    def reopen_collective(self, number: int, now: int, filename: str, line: int, issued: Issued) -> None:
        """Store that an operation that was issued before is waited for now, as ``open_collective`` does."""
        words = self._words
        shape, name, members = issued.shape, issued.name, issued.members
        texts = None
        if (
            shape is not self._shape
            or name is not self._name
            or filename is not self._file
            or members is not self._members
        ):
            texts = collective_texts(filename, name, shape, members)
        words[0] = version = words[0] | 1
        self._raw[_OPEN] = issued.block
        words[_PHASE] = _IN_COLLECTIVE  # the block may be from when the operation had been left
        words[_HEARTBEAT] = now
        words[_PHASE_SINCE] = now
        words[_COLLECTIVE] = number
        words[_COLLECTIVE_ENTERED] = now
        words[_COLLECTIVE_LINE] = line
        if texts is not None:
            self._raw[_TEXTS_OPEN] = texts
            self._file, self._name, self._shape, self._members = filename, name, shape, members
        words[0] = version + 1

    def issued(self) -> Issued:
        """The collective that was entered last, as the rank itself stored it."""
        words = self._words
        return Issued(
            bytes(self._raw[_OPEN]),
            words[_COLLECTIVE_ENTERED],
            words[_COLLECTIVE_LINE],
            self._file or "",
            self._name or "",
            self._shape or "",
            self._members or "",
        )

    def issued_barrier(self) -> Issued:
        """The same for the barrier that was entered last."""
        words = self._words
        number, place = words[_BARRIER], words[_BARRIER] + words[_COLLECTIVE]
        since, line = words[_BARRIER_ENTERED], words[_BARRIER_LINE]
        block = _pack_open(since, _IN_COLLECTIVE, since, words[_COLLECTIVE], since, line, 0, False, place, number, -1)
        return Issued(block, since, line, self._barrier_file or "", "barrier", "", "")

    def write_pending(self, count: int, oldest: Issued | None) -> None:
        """Store how many handles are not yet waited for, and which is the oldest; None if there is none."""
        words, before, texts = self._words, self._pending, None
        if oldest is None or oldest is before:
            oldest = None
        elif before is None or before.filename is not oldest.filename or before.name is not oldest.name:
            texts = pending_texts(oldest.filename, oldest.name)
        words[0] = version = words[0] | 1
        words[_PENDING_COUNT] = count
        if oldest is not None:
            self._pending = oldest
            words[_PENDING_SINCE] = oldest.since
            words[_PENDING_LINE] = oldest.line
        if texts is not None:
            self._raw[_PENDING_TEXT_AT : _PENDING_TEXT_AT + len(texts)] = texts
        words[0] = version + 1

    def write_native(self, sequence: int, since: int, name: str = "", shape: str = "", group: str = "") -> None:
        """Store what the flight recorder tells. For one thread, which need not be the rank's first."""
        words, raw = self._words, self._raw
        words[NATIVE_AT] = version = words[NATIVE_AT] | 1
        words[_NATIVE_SEQUENCE], words[_NATIVE_SINCE] = sequence, since
        for field, text in (("native_name", name), ("native_shape", shape), ("native_group", group)):
            at, room = NATIVE_PLACES[field]
            data = fit(text, room)
            raw[(at + 1) * WORD : (at + 1) * WORD + len(data)] = data
            words[at] = len(data)
        words[NATIVE_AT] = version + 1

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
        texts = None if filename is self._barrier_file else barrier_texts(filename)
        at = HISTORY_AT + BARRIER_WORDS * (number % HISTORY)
        words[0] = version = words[0] | 1
        words[_HEARTBEAT] = now
        words[_PHASE] = _IN_BARRIER
        words[_PHASE_SINCE] = now
        words[_BARRIER] = number
        words[_BARRIER_ENTERED] = now
        words[_BARRIER_LINE] = line
        if texts is not None:
            self._raw[_BARRIER_TEXT_AT : _BARRIER_TEXT_AT + len(texts)] = texts
            self._barrier_file = filename
        words[at] = number
        words[at + 1] = now
        words[at + 2] = 0
        words[at + 3] = line
        words[at + 4] = self._files.get(filename) or self._remember_file(filename)
        words[0] = version + 1

    def close_barrier(self, number: int, phase: int, now: int) -> None:
        """Store that barrier ``number`` was left for ``phase``, history included, in one guarded write."""
        words = self._words
        words[0] = version = words[0] | 1
        words[_BARRIER_LEFT] = now
        words[_PHASE] = phase
        words[_PHASE_SINCE] = now
        words[_HEARTBEAT] = now
        words[HISTORY_AT + BARRIER_WORDS * (number % HISTORY) + 2] = now
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
            before = words[0], words[NATIVE_AT]
            if self._seen is not None and self._seen[0] == before:
                return self._seen[1]
            copy = bytes(raw)
            if before == (words[0], words[NATIVE_AT]) and not (before[0] | before[1]) & 1:
                self._seen = before, self._decode(copy)
                return self._seen[1]
            if before == self._stuck:
                break
            if attempt > _SPINS:
                time.sleep(_PAUSE)
        self._stuck = words[0], words[NATIVE_AT]
        return self._decode(copy)

    def _decode(self, copy: bytes) -> RankSnapshot:
        ring = copy[HISTORY_AT * WORD : NATIVE_AT * WORD]
        # Most reads find the ring as it was, and building its barriers is most of the cost of a read.
        if ring != self._ring[0]:
            self._ring = ring, read_barriers(ring)
        return decode(self.rank, copy, self._ring[1])

    @property
    def version(self) -> int:
        """Another number after each write of the rank."""
        return self._words[0]

    def release(self) -> None:
        """Let go of the memory, so that the board can be closed."""
        self._words.release()
        self._raw.release()

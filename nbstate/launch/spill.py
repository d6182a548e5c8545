"""All that one rank has printed, in bounded memory: the newest in memory, the rest in a file without a name.

The file is made when a rank has printed more than ``IN_MEMORY`` bytes, so most launches make none. It has no name from
its first moment on (``O_TMPFILE``, or unlinked at once) and mode 0600: nobody else can open it, and the system frees it
when the kernel ends, however it ends.
"""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from typing import Final

__all__ = ["IN_MEMORY", "RankLog"]

IN_MEMORY: Final = 1 << 18
"""Bytes of a rank's output that are kept in memory before they go to the file."""
_TAIL: Final = 1 << 16


class RankLog:
    """What one rank has printed: append-only, readable from any thread.

    Offsets are bytes from the beginning of the rank's output. If the disk is full, what would have gone to the file is
    lost from the log, which says so; the cell still gets every line.
    """

    def __init__(self) -> None:
        self._memory = bytearray()
        self._start = 0
        """Offset of the first byte in memory; all before it is in the file."""
        self._fd = -1
        self._failure = ""
        self._lock = threading.Lock()

    @property
    def failed(self) -> bool:
        """Whether the file could not be written, so that only the newest is left."""
        return bool(self._failure)

    def append(self, text: str) -> tuple[int, int]:
        """Add text. Returns where it lies: offsets of its beginning and its end."""
        data = text.encode("utf-8", "replace")
        with self._lock:
            begin = self._start + len(self._memory)
            self._memory += data
            if len(self._memory) > IN_MEMORY:
                self._spill()
            return begin, begin + len(data)

    def read(self, begin: int, end: int) -> str:
        """The text between two offsets."""
        with self._lock:
            return self._read(begin, end).decode("utf-8", "replace")

    def text(self) -> str:
        """Everything."""
        with self._lock:
            end = self._start + len(self._memory)
            if self._failure:
                note = f"nbstate: what came before could not be kept: {self._failure}\n".encode()
                return (note + self._memory).decode("utf-8", "replace")
            return self._read(0, end).decode("utf-8", "replace")

    def tail(self, lines: int) -> tuple[str, ...]:
        """The last lines; no more than 64 KiB of them, so the first may have lost its beginning."""
        with self._lock:
            end = self._start + len(self._memory)
            begin = max(end - _TAIL, self._start if self._failure else 0)
            found = self._read(begin, end).decode("utf-8", "replace").split("\n")
        if found and not found[-1]:
            found.pop()
        if begin > 0 and len(found) <= lines and found:
            found[0] = f"…{found[0]}"
        return tuple(found[-lines:]) if lines > 0 else ()

    def _spill(self) -> None:
        if not self._failure:
            try:
                self._write_out()
                return
            except OSError as error:
                self._failure = f"{type(error).__name__}: {error}"
        surplus = len(self._memory) - IN_MEMORY
        del self._memory[:surplus]
        self._start += surplus

    def _write_out(self) -> None:
        if self._fd < 0:
            with tempfile.TemporaryFile(prefix="nbstate-") as file:
                self._fd = os.dup(file.fileno())
            weakref.finalize(self, os.close, self._fd)
        left, at = memoryview(self._memory), self._start
        try:
            while left:
                written = os.pwrite(self._fd, left, at)
                left, at = left[written:], at + written
        finally:
            left.release()
        self._start = at
        self._memory = bytearray()

    def _read(self, begin: int, end: int) -> bytes:
        parts = []
        at = begin
        while at < min(end, self._start):
            part = os.pread(self._fd, min(end, self._start) - at, at)
            if not part:
                break
            parts.append(part)
            at += len(part)
        parts.append(bytes(self._memory[max(begin - self._start, 0) : max(end - self._start, 0)]))
        return b"".join(part for part in parts if part)

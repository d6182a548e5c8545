"""Lines of N ranks into one cell: every line whole, none lost, none doubled, each with its rank."""

from __future__ import annotations

import codecs
import threading
from collections import deque
from string import Template
from typing import Final

__all__ = ["LineAssembler", "Output"]

_KEEP_LINES: Final = 20_000
_RECENT: Final = 400


class LineAssembler:
    """Puts the lines of one stream together from whatever pieces arrive.

    A line ends with a newline. What a carriage return overwrote is gone, as on a terminal, so a progress bar that
    redraws itself is one line. Bytes that are not utf-8 become U+FFFD.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._partial = ""

    def feed(self, piece: bytes, final: bool = False) -> list[str]:
        """Add a piece; returns the lines that are complete by now, without their newline."""
        text = self._partial + self._decoder.decode(piece, final)
        *lines, self._partial = text.split("\n")
        if final and self._partial:
            lines.append(self._partial)
            self._partial = ""
        elif "\r" in self._partial:
            self._partial = _after_return(self._partial)
        return [_after_return(line) for line in lines]


def _after_return(line: str) -> str:
    """What is left of a line that was redrawn with carriage returns."""
    body = line.removesuffix("\r")
    return body.rsplit("\r", 1)[-1] + line[len(body) :] if "\r" in body else line


class Output:
    """What the ranks of one launch have printed. The supervisor adds; a cell, ``logs`` and the dashboard read.

    Parameters
    ----------
    world_size : int
        Number of ranks.
    prefix : str
        Put before each line; ``${rank}``, ``${local_rank}`` and ``${role_name}`` stand for what they say.
    """

    def __init__(self, world_size: int, prefix: str) -> None:
        template = Template(prefix)
        self._prefixes = [
            template.safe_substitute(rank=rank, local_rank=rank, role_name="rank") for rank in range(world_size)
        ]
        self._assemblers = {
            (rank, name): LineAssembler() for rank in range(world_size) for name in ("stdout", "stderr")
        }
        self._logs: list[deque[str]] = [deque(maxlen=_KEEP_LINES) for _ in range(world_size)]
        self._recent: deque[tuple[int, str]] = deque(maxlen=_RECENT)
        self._pending: deque[tuple[str, str]] = deque()
        self._lock = threading.Lock()

    def feed(self, rank: int, stream: str, piece: bytes, final: bool = False) -> bool:
        """Add what arrived from a rank's pipe. Returns whether a line is complete."""
        lines = self._assemblers[rank, stream].feed(piece, final)
        with self._lock:
            for line in lines:
                shown = line.removesuffix("\r")
                self._logs[rank].append(shown)
                self._recent.append((rank, shown))
                self._pending.append((stream, f"{self._prefixes[rank]}{shown}\n"))
        return bool(lines)

    def take(self) -> list[tuple[str, str]]:
        """What has not been shown yet, as pairs of stream and text; neighbours of one stream are joined."""
        with self._lock:
            pending, self._pending = self._pending, deque()
        taken: list[tuple[str, str]] = []
        run: list[str] = []
        stream = ""
        for name, text in pending:
            if name != stream and run:
                taken.append((stream, "".join(run)))
                run = []
            stream = name
            run.append(text)
        if run:
            taken.append((stream, "".join(run)))
        return taken

    def logs(self, rank: int) -> str:
        """The last lines of one rank, both streams, in the order in which they arrived."""
        with self._lock:
            return "".join(f"{line}\n" for line in self._logs[rank])

    def tail(self, rank: int, lines: int = 10) -> tuple[str, ...]:
        """The very last lines of one rank."""
        with self._lock:
            return tuple(self._logs[rank])[-lines:]

    def recent(self) -> tuple[tuple[int, str], ...]:
        """The last lines of all ranks, each with its rank."""
        with self._lock:
            return tuple(self._recent)

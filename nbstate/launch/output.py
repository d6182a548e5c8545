"""Lines of N ranks into one cell: every line whole, none lost, none doubled, each with its rank, in bounded memory.

Whatever a rank prints goes two ways. To its log (``RankLog``: the newest in memory, the rest in a nameless file), from
which ``logs`` and ``tail`` read. And to the cell, through a queue: the supervisor adds and the thread of the cell
takes. A rank must never wait for the cell, and the kernel must not hold what the cell has yet to show; so while the
queue is short it holds text, and beyond that only says where in the rank's log the text lies.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import threading
from collections import defaultdict, deque
from dataclasses import dataclass
from string import Template
from typing import Final

from nbstate.launch.spill import RankLog

__all__ = ["LONGEST_LINE", "LineAssembler", "Output", "Rich", "flush_c_streams"]

LONGEST_LINE: Final = 1 << 20
"""Characters. What has arrived of a line is cut off here if no newline has come; nothing of it is lost."""
_NOBODY: Final = -1  # in the place of a rank: the line is nbstate's own
_RECENT: Final = 400
_RECENT_WIDTH: Final = 8_000  # characters of a line that the dashboard may look at
_BATCH: Final = 1 << 17  # characters that go to the cell at once
_QUEUED: Final = 1 << 22  # characters that wait for the cell in memory; what is more waits in the logs


def flush_c_streams() -> None:
    """Send on what C code has printed with ``printf`` and its like.

    The C library holds it back when it goes to a pipe. A rank, which leaves with ``os._exit``, would lose it; and a
    fork would copy what the kernel's C code has printed, so that each rank printed it again.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).fflush(None)


class LineAssembler:
    """Puts the lines of one stream together from whatever pieces arrive.

    A line ends with a newline. What a carriage return overwrote is gone, as on a terminal, so a progress bar that
    redraws itself is one line. Bytes that are not utf-8 become U+FFFD. A line of more than ``LONGEST_LINE`` characters
    is cut, so that a rank that prints no newline at all costs no more memory than others.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._parts: list[str] = []
        self._length = 0
        self._redrawn = False

    @property
    def bar(self) -> str:
        """The newest state of a line that is being redrawn with carriage returns; empty if there is none."""
        return "".join(self._parts).rstrip("\r") if self._redrawn else ""

    def feed(self, piece: bytes, final: bool = False) -> str:
        """Add a piece; returns the lines that are complete by now, each with its newline."""
        text = self._decoder.decode(piece, final)
        complete, newline, rest = text.rpartition("\n")
        done = ""
        if newline:
            done = _redraw("".join([*self._parts, complete, "\n"]))
            self._start_line()
        self._hold(rest)
        if final and self._parts:
            done += _redraw("".join([*self._parts, "\n"]))
            self._start_line()
        while self._length > LONGEST_LINE:
            held = "".join(self._parts)
            done += held[:LONGEST_LINE] + "\n"
            self._start_line()
            self._hold(held[LONGEST_LINE:])
        return done

    def _start_line(self) -> None:
        self._parts, self._length, self._redrawn = [], 0, False

    def _hold(self, rest: str) -> None:
        """Keep the beginning of a line, without what it has overwritten already."""
        if "\r" in rest or (self._redrawn and self._parts[-1].endswith("\r")):
            rest = _after_return("".join([*self._parts, rest]))
            self._parts, self._length, self._redrawn = [], 0, True
        if rest:
            self._parts.append(rest)
            self._length += len(rest)


def _redraw(text: str) -> str:
    """Whole lines, each as its carriage returns have left it."""
    if "\r" not in text:
        return text
    return "".join(f"{_after_return(line).removesuffix(chr(13))}\n" for line in text.split("\n")[:-1])


def _after_return(line: str) -> str:
    """What is left of a line that was redrawn. A return at its very end has overwritten nothing yet."""
    body = line.rstrip("\r")
    return body.rpartition("\r")[2] + ("\r" if len(body) < len(line) else "")


@dataclass(frozen=True)
class Rich:
    """Something that a rank has displayed.

    Attributes
    ----------
    rank : int
        Who did.
    text : str
        Its plain text as lines with the rank's prefix, for places that can show nothing else.
    content : dict
        Content of a Jupyter ``display_data`` message: ``data``, ``metadata``, ``transient``.
    update : bool
        Whether it takes the place of an earlier one.
    heading : bool
        Whether the rank must be named first: what the cell shows above comes from elsewhere.
    """

    rank: int
    text: str
    content: dict[str, object]
    update: bool
    heading: bool


@dataclass(frozen=True)
class _Queued:
    """Lines that wait for the cell: their text, or where it lies in the rank's log."""

    rank: int
    stream: str
    begin: int
    end: int
    text: str | None


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
        self._logs = [RankLog() for _ in range(world_size)]
        self._recent: deque[tuple[int, str]] = deque(maxlen=_RECENT)
        self._queue: deque[_Queued | Rich] = deque()
        self._queued = 0
        self._displayed: int | None = None
        """The rank whose display is the newest in the queue; None if lines came after it."""
        self._lock = threading.Lock()

    def feed(self, rank: int, stream: str, piece: bytes, final: bool = False) -> bool:
        """Add what arrived from a rank's pipe. Returns whether a line is complete."""
        with self._lock:
            text = self._assemblers[rank, stream].feed(piece, final)
            if text:
                begin, end = self._keep(rank, text)
                held = self._queued < _QUEUED or self._logs[rank].failed
                self._queue.append(_Queued(rank, stream, begin, end, text if held else None))
                self._queued += len(text) if held else 0
                self._displayed = None
        return bool(text)

    def say(self, line: str) -> None:
        """Add a line of nbstate's own, in its place among those of the ranks, for stderr."""
        with self._lock:
            self._queue.append(_Queued(_NOBODY, "stderr", 0, 0, f"{line}\n"))
            self._queued += len(line) + 1
            self._displayed = None

    def show(self, rank: int, content: dict[str, object], update: bool) -> None:
        """Add what a rank has displayed: the content of a Jupyter ``display_data`` message."""
        data = content.get("data")
        plain = str(data.get("text/plain", "")) if isinstance(data, dict) else ""
        text = f"{plain}\n" if plain else ""
        with self._lock:
            if text and not update:
                self._keep(rank, text)
            heading = not update and self._displayed != rank
            self._queue.append(Rich(rank, self._prefixed(rank, text), content, update, heading))
            if not update:
                self._displayed = rank

    def _keep(self, rank: int, text: str) -> tuple[int, int]:
        newest = text.rsplit("\n", _RECENT + 1)[-_RECENT - 1 : -1]
        self._recent.extend((rank, line[:_RECENT_WIDTH]) for line in newest)
        return self._logs[rank].append(text)

    def _prefixed(self, rank: int, text: str) -> str:
        if rank == _NOBODY:
            return text
        prefix = self._prefixes[rank]
        return f"{prefix}{text[:-1]}\n".replace("\n", f"\n{prefix}", text.count("\n") - 1) if text else ""

    def take(self) -> tuple[str, str] | Rich | None:
        """The next that has not been shown yet, in the order in which it arrived; None if there is nothing.

        Returns
        -------
        (str, str), Rich or None
            Stream and text: neighbours of one stream are joined, up to about 128 KiB. Or something displayed.
        """
        parts: list[str] = []
        stream, length = "", 0
        with self._lock:
            if self._queue and isinstance(self._queue[0], Rich):
                return self._queue.popleft()  # type: ignore[return-value]
            for one in self._queue:
                if isinstance(one, Rich) or length >= _BATCH or (parts and one.stream != stream):
                    break
                text = self._logs[one.rank].read(one.begin, one.end) if one.text is None else one.text
                stream, length = one.stream, length + len(text)
                parts.append(self._prefixed(one.rank, text))
            joined = "".join(parts)
            # Only now, since an interrupt of the cell's thread may come at any line above, and must not lose any.
            for _ in parts:
                gone = self._queue.popleft()
                self._queued -= len(getattr(gone, "text", None) or "")
        return (stream, joined) if parts else None

    @property
    def waits(self) -> bool:
        """Whether there is something that has not been shown yet."""
        return bool(self._queue)

    @property
    def displays(self) -> bool:
        """Whether something of that was displayed, and is not a line."""
        with self._lock:
            return any(isinstance(one, Rich) for one in self._queue)

    def leave_out(self, keep: int) -> int:
        """Take out of the queue what a cell that is full shall not get: all lines but each rank's last.

        What was displayed stays, and the lines before it go; of those after it about the last ``keep`` bytes of each
        rank stay.

        Returns
        -------
        int
            Bytes of the lines that were taken out.
        """
        gone = 0
        kept: defaultdict[int, int] = defaultdict(int)
        with self._lock:
            stay: deque[_Queued | Rich] = deque()
            before_display = False
            for one in reversed(self._queue):
                if isinstance(one, Rich):
                    before_display = True
                    stay.appendleft(one)
                elif one.rank == _NOBODY or (kept[one.rank] < keep and not before_display):
                    kept[one.rank] += one.end - one.begin
                    stay.appendleft(one)
                else:
                    gone += one.end - one.begin
                    self._queued -= len(one.text or "")
            self._queue = stay
        return gone

    def logs(self, rank: int) -> str:
        """All that one rank has printed, both streams, in the order in which it arrived."""
        return self._logs[rank].text()

    def tail(self, rank: int, lines: int = 10) -> tuple[str, ...]:
        """The very last lines of one rank."""
        return self._logs[rank].tail(lines)

    def recent(self) -> tuple[tuple[int, str], ...]:
        """The last lines of all ranks, each with its rank; at the end bars that are being redrawn, as they are now."""
        with self._lock:
            bars = [(rank, one.bar[:_RECENT_WIDTH]) for (rank, _), one in self._assemblers.items()]
            return (*self._recent, *((rank, bar) for rank, bar in bars if bar))

"""Tracebacks that travel: taken apart in the rank, told as text, and drawn in the notebook with the cell's source.

Frames of the user's own are shown in full, a library's with one line each, and those of nbstate's machinery (how a
rank was started, how a collective was seen) not at all: nobody can do anything about them.
"""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from nbstate.telemetry.source import is_user_file

__all__ = [
    "COLOURS",
    "NO_COLOURS",
    "Frame",
    "Link",
    "Palette",
    "chain_of",
    "draw",
    "is_machinery",
    "short_path",
    "take_apart",
    "tell",
]

_NBSTATE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_HIDDEN: Final = (
    os.path.join(_NBSTATE, "launch") + os.sep,
    os.path.join(_NBSTATE, "telemetry") + os.sep,
)
_HIDDEN_ENDS: Final = (os.path.join("torch", "distributed", "c10d_logger.py"),)
_ENDS: Final = 20  # frames kept at either end of a very deep stack
_DRAWN_ENDS: Final = 5  # the same where they are drawn
_AROUND: Final = 2  # lines of source before and after the one that failed

Relation = Literal["", "cause", "context"]
_BECAUSE: Final[Mapping[Relation, str]] = {
    "": "",
    "cause": "The above exception was the direct cause of the following exception:",
    "context": "During handling of the above exception, another exception occurred:",
}


@dataclass(frozen=True)
class Frame:
    """One frame: where, and its line of source if it is the user's. ``skipped`` frames were left out before it."""

    filename: str
    line: int
    name: str
    source: str
    user: bool
    skipped: int = 0


@dataclass(frozen=True)
class Link:
    """One exception of a chain, told after what brought it about.

    Attributes
    ----------
    relation : {"", "cause", "context"}
        What the exception told before this one is to it; empty for the first.
    frames : tuple of Frame
        Outermost first, without nbstate's machinery.
    last : str
        Its class, message and notes; the whole tree if it is a group.
    """

    relation: Relation
    frames: tuple[Frame, ...]
    last: str


@dataclass(frozen=True)
class Palette:
    """Escape sequences for what is drawn; all empty where colours are off."""

    error: str = ""
    place: str = ""
    arrow: str = ""
    dim: str = ""
    end: str = ""


NO_COLOURS: Final = Palette()
COLOURS: Final = Palette("\x1b[31m", "\x1b[36m", "\x1b[32m", "\x1b[2m", "\x1b[0m")


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """An exception, what it came from, what that came from, and so on: the newest first, each once.

    An exception that was raised ``from None`` still came from what was being handled.
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__context__ if link.__cause__ is None else link.__cause__


def take_apart(error: BaseException) -> traceback.TracebackException:
    """An exception with its causes, groups and notes as Python would print it, less what nobody needs to see."""
    taken = traceback.TracebackException.from_exception(error)
    for each in _everything_in(taken):
        shown = [_brief(frame) for frame in each.stack if not is_machinery(frame.filename)]
        each.stack[:] = shown or each.stack[:]
    return taken


def _everything_in(taken: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    todo: list[Any] = [taken]
    seen: set[int] = set()
    while todo:
        each = todo.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        todo += [each.__cause__, each.__context__, *(getattr(each, "exceptions", None) or ())]


def is_machinery(filename: str) -> bool:
    """Whether a code object's file belongs to nbstate's machinery, which no stack shows."""
    return filename.startswith(_HIDDEN) or filename.endswith(_HIDDEN_ENDS)


def _brief(frame: traceback.FrameSummary) -> traceback.FrameSummary:
    if is_user_file(frame.filename):
        return frame
    return traceback.FrameSummary(frame.filename, frame.lineno or 0, frame.name, lookup_line=False, line="")


def tell(taken: traceback.TracebackException) -> tuple[str, tuple[Link, ...]]:
    """The whole chain as text, and as links that can be drawn, the oldest first."""
    text = "".join(taken.format()).rstrip("\n")
    links: list[Link] = []
    each: traceback.TracebackException | None = taken
    while each is not None:
        before, relation = _before(each)
        links.append(_link(each, relation))
        each = before
    return text, tuple(reversed(links))


def _before(taken: traceback.TracebackException) -> tuple[traceback.TracebackException | None, Relation]:
    if taken.__cause__ is not None:
        return taken.__cause__, "cause"
    if taken.__context__ is not None and not taken.__suppress_context__:
        return taken.__context__, "context"
    return None, ""


def _link(taken: traceback.TracebackException, relation: Relation) -> Link:
    if getattr(taken, "exceptions", None):
        alone = taken.__cause__, taken.__context__
        taken.__cause__ = taken.__context__ = None
        tree = "".join(taken.format()).rstrip("\n")
        taken.__cause__, taken.__context__ = alone
        return Link(relation, (), tree)
    last = "".join(taken.format_exception_only()).rstrip("\n")
    return Link(relation, tuple(_frames(taken.stack)), last)


def _frames(stack: Sequence[traceback.FrameSummary]) -> Iterator[Frame]:
    kept, left_out = _ends(list(stack), _ENDS)
    for number, frame in enumerate(kept):
        user = is_user_file(frame.filename)
        skipped = left_out if number == _ENDS else 0
        yield Frame(frame.filename, frame.lineno or 0, frame.name, (frame.line or "") if user else "", user, skipped)


def _ends(items: list[Any], ends: int) -> tuple[list[Any], int]:
    """A list, or its two ends if it is long, and how many are between them."""
    left_out = len(items) - 2 * ends
    return (items, 0) if left_out <= 1 else (items[:ends] + items[-ends:], left_out)


def draw(links: Sequence[Link], cells: Mapping[str, str], palette: Palette) -> list[str]:
    """Lines that show a chain as IPython shows its own: source around the line that failed, and an arrow.

    Parameters
    ----------
    links : sequence of Link
        The oldest first.
    cells : mapping of str to str
        File names of cells to what the notebook calls them.
    palette : Palette
        ``COLOURS`` or ``NO_COLOURS``.
    """
    lines: list[str] = []
    for link in links:
        if link.relation:
            lines += ["", _BECAUSE[link.relation], ""]
        frames, left_out = _ends(list(link.frames), _DRAWN_ENDS)
        for number, frame in enumerate(frames):
            skipped = frame.skipped + (left_out if number == _DRAWN_ENDS else 0)
            if skipped:
                lines.append(f"{palette.dim}... {skipped} frames more ...{palette.end}")
            lines += _draw_frame(frame, cells, palette)
        name, colon, rest = link.last.partition(":")
        single = "\n" not in name
        lines.append(f"{palette.error}{name}{palette.end}{colon}{rest}" if single else link.last)
    return [line for text in lines for line in text.split("\n")]


def _draw_frame(frame: Frame, cells: Mapping[str, str], palette: Palette) -> list[str]:
    if frame.filename in cells:
        where = f"Cell {cells[frame.filename]}, line {frame.line}"
    else:
        where = f"File {short_path(frame.filename)}:{frame.line}"
    if not frame.user:
        return [f"{palette.dim}{where}, in {frame.name}{palette.end}"]
    return [f"{palette.place}{where}, in {frame.name}{palette.end}", *_draw_source(frame, palette)]


def _draw_source(frame: Frame, palette: Palette) -> list[str]:
    linecache.checkcache(frame.filename)
    source = linecache.getlines(frame.filename)
    at = frame.line
    if not 0 < at <= len(source) or source[at - 1].strip() != frame.source.strip():
        # not to be had here, or changed since: the line as the rank saw it
        return [f"{palette.arrow}----> {at}{palette.end}     {frame.source}"] if frame.source else []
    lines = []
    for number in range(max(1, at - _AROUND), min(len(source), at + _AROUND) + 1):
        text = source[number - 1].rstrip()
        arrow = "-" * max(0, 5 - len(str(number))) + f"> {number}" if number == at else f"{number:>7}"
        colour = palette.arrow if number == at else palette.dim
        lines.append(f"{colour}{arrow}{palette.end} {text}".rstrip())
    return lines


def short_path(filename: str) -> str:
    """A path from the folder on the import path on, since what comes before says nothing."""
    for folder in sorted(sys.path, key=len, reverse=True):
        if folder and filename.startswith(folder.rstrip(os.sep) + os.sep):
            return filename[len(folder.rstrip(os.sep)) + 1 :]
    return filename

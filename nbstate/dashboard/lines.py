"""Which lines of output a frame carries, and how their text is cleaned."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

__all__ = ["clean_line", "pick_lines", "pick_tails", "without_colours"]

MERGED: Final = 80  # the last lines of all ranks together
OF_A_RANK: Final = 8  # and at least these of each rank, so that a noisy one does not silence the others
APART: Final = 256  # where there are few ranks: these together, divided among them
WIDTH: Final = 400  # characters that show; a longer line is cut

# The escape sequences of ECMA-48: CSI, OSC and those of two bytes. SGR, a CSI that ends in m, sets colours and weight.
_ESCAPES: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])?")
_SGR: Final = re.compile(r"\x1b\[[0-9;]*m")
_CONTROLS: Final = re.compile(r"[\x00-\x08\x0a-\x1a\x1c-\x1f\x7f]")
_RAW: Final = 16 * WIDTH


@lru_cache(maxsize=2048)  # most lines come again in the next frames
def clean_line(text: str) -> str:
    r"""One line as a terminal would leave it: colours stay, cursor moves go, a progress bar is its last state.

    Examples
    --------
    >>> clean_line("\x1b[2K 10 %\r\x1b[32m 50 %\x1b[0m")
    '\x1b[32m 50 %\x1b[0m'
    """
    text = text.rstrip("\r\n").rpartition("\r")[2]
    # A line of megabytes must not cost a regular expression over all of it, ten times a second.
    text = _ESCAPES.sub(lambda match: match[0] if _SGR.fullmatch(match[0]) else "", text[:_RAW])
    text = _CONTROLS.sub("", text)
    return text if len(text) <= WIDTH else _cut(text)


def without_colours(text: str) -> str:
    """A cleaned line as plain text."""
    return _SGR.sub("", text)


def pick_lines(lines: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
    """The last lines of all ranks together, oldest first, cleaned.

    Parameters
    ----------
    lines : sequence of (int, str)
        Rank and text, oldest first.
    """
    return [(rank, clean_line(text)) for rank, text in lines[-MERGED:]]


def pick_tails(lines: Sequence[tuple[int, str]], world_size: int) -> list[list[str]]:
    """For each rank the lines right before those that ``pick_lines`` takes, so that a noisy one silences no other.

    They are apart from the others because both lists lose lines at their head only: who reads one can keep the place.

    Parameters
    ----------
    lines : sequence of (int, str)
        Rank and text, oldest first.
    world_size : int
        Number of ranks.
    """
    room = max(OF_A_RANK, APART // world_size)
    wanted = Counter(dict.fromkeys(range(world_size), room))
    wanted.subtract(rank for rank, _ in lines[-MERGED:])
    tails: list[list[str]] = [[] for _ in range(world_size)]
    for rank, text in reversed(lines[:-MERGED]):
        if wanted[rank] > 0:
            wanted[rank] -= 1
            tails[rank].append(clean_line(text))
    for tail in tails:
        tail.reverse()
    return tails


def _cut(text: str) -> str:
    """The first characters that show, and the colours among them."""
    room, kept, at = WIDTH, [], 0
    for match in _SGR.finditer(text):
        shown = text[at : match.start()][:room]
        room -= len(shown)
        kept += [shown, match[0]]
        at = match.end()
    rest = text[at:]
    kept.append(rest[:room])
    cut = "".join(kept)
    return cut if without_colours(cut) == without_colours(text) else cut + "…"

"""Which lines of output a frame carries, and how their text is cleaned."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Final

__all__ = ["clean_line", "pick_lines", "without_colours"]

MERGED: Final = 80  # the last lines of all ranks together
OF_A_RANK: Final = 8  # and at least these of each rank, so that a noisy one does not silence the others
WIDTH: Final = 400  # characters that show; a longer line is cut

# The escape sequences of ECMA-48: CSI, OSC and those of two bytes. SGR, a CSI that ends in m, sets colours and weight.
_ESCAPES: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])?")
_SGR: Final = re.compile(r"\x1b\[[0-9;]*m")
_CONTROLS: Final = re.compile(r"[\x00-\x08\x0a-\x1a\x1c-\x1f\x7f]")
_RAW: Final = 16 * WIDTH


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


def pick_lines(lines: Sequence[tuple[int, str]], per_rank: bool) -> list[tuple[int, str]]:
    """The lines a frame carries, oldest first.

    Parameters
    ----------
    lines : sequence of (int, str)
        Rank and text, oldest first.
    per_rank : bool
        Whether the last few of each rank come along even if the others have printed much since.
    """
    recent = len(lines) - MERGED
    seen: Counter[int] = Counter()
    picked = []
    for at in range(len(lines) - 1, -1, -1):
        rank, text = lines[at]
        seen[rank] += 1
        if at >= recent or (per_rank and seen[rank] <= OF_A_RANK):
            picked.append((rank, clean_line(text)))
        elif not per_rank:
            break
    picked.reverse()
    return picked


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

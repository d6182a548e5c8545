"""How each kind of verdict looks: a symbol, a word, and how grave it is. One table for page, picture and text."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final, Literal, NamedTuple

__all__ = ["BLAMING", "KINDS", "SYMBOLS", "KindLook", "Tone", "look_of"]

Tone = Literal["plain", "good", "warn", "bad"]


class KindLook(NamedTuple):
    """A symbol and a word, so that no meaning hangs on the colour that the tone stands for."""

    symbol: str
    word: str
    tone: Tone


_WARNED: Final = ("late", "missing", "uneven", "halted", "starved", "blocked")
_BROKEN: Final = ("mismatch", "order", "deadlock")

KINDS: Final = MappingProxyType(
    {
        "starting": KindLook("…", "starting", "plain"),
        "well": KindLook("●", "all well", "good"),
        **{kind: KindLook("▲", kind, "warn") for kind in _WARNED},
        **{kind: KindLook("◆", kind, "bad") for kind in _BROKEN},
        "lost": KindLook("✕", "lost", "bad"),
        "finished": KindLook("✓", "finished", "good"),
        "failed": KindLook("✕", "failed", "bad"),
        "interrupted": KindLook("■", "interrupted", "warn"),
        "stopped": KindLook("■", "stopped", "warn"),
        "unknown": KindLook("?", "unclear", "plain"),
    }
)
SYMBOLS: Final = MappingProxyType({kind: look.symbol for kind, look in KINDS.items()})
BLAMING: Final = frozenset({*_WARNED, *_BROKEN, "lost", "failed"})
"""Kinds whose ranks are marked in the table."""


def look_of(kind: str) -> KindLook:
    """How a kind looks; one that is not in the table looks unclear."""
    return KINDS.get(kind, KINDS["unknown"])

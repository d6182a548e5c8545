"""Ranks in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

__all__ = ["name_ranks", "verb"]

_NAMED_GROUPS: Final = 6


def name_ranks(ranks: Iterable[int]) -> str:
    """Ranks as people say them: ``"rank 2"``, ``"ranks 1 and 3"``, ``"ranks 0, 2 to 5 and 9"``."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    total = sum(map(len, runs))
    named, rest = runs[:_NAMED_GROUPS], sum(map(len, runs[_NAMED_GROUPS:]))
    parts: list[str] = []
    for run in named:
        parts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else [str(rank) for rank in run]
    if rest:
        parts.append(f"{rest} more")
    shown = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"rank {shown}" if total == 1 else f"ranks {shown}"


def verb(ranks: Sequence[object], one: str, many: str) -> str:
    """The form of a verb that goes with so many ranks."""
    return one if len(ranks) == 1 else many

"""The gradient state in words: of one rank, and of all ranks in one line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache

from nbstate.telemetry.board import Flag, RankSnapshot
from nbstate.telemetry.diagnosis import name_ranks

__all__ = ["gradient_detail", "gradient_facts"]


def gradient_detail(snapshot: RankSnapshot) -> str:
    """What a chip has no room for, as one line."""
    return _detail(snapshot.flags, snapshot.num_steps, snapshot.remainder, snapshot.skipped_steps)


@lru_cache(maxsize=1024)  # hundreds of ranks are in a handful of states
def _detail(flags: int, num_steps: int, remainder: int, skipped: int) -> str:
    if not flags & Flag.KNOWN:
        return ""
    parts = []
    if num_steps > 1:
        parts.append(f"every {num_steps} steps")
    if flags & Flag.END_OF_DATALOADER:
        parts.append("last batch" + (f", remainder {remainder}" if remainder > 0 else ""))
    if num_steps > 1 and not flags & Flag.SYNC_WITH_DATALOADER:
        parts.append("count carries over the end of the loader")
    if skipped:
        parts.append(f"optimizer steps skipped: {skipped}")
    return " · ".join(parts)


def gradient_facts(snapshots: Sequence[RankSnapshot]) -> list[str]:
    """How the ranks accumulate and what their scalers have skipped: for all in one, or who differs by name.

    Returns
    -------
    list of str
        As ``["every 4 steps and at the end of the loader", "optimizer steps skipped: 2"]``; empty where no rank tells.
    """
    known = [s for s in snapshots if s.flag(Flag.KNOWN)]
    facts = _folded({s.rank: _cycle(s) for s in known}, of=len(known))
    skipping = {s.rank: str(s.skipped_steps) for s in known if s.skipped_steps}
    if skipping:
        counts = _folded(skipping, of=len(known))
        facts.append(f"optimizer steps skipped: {', '.join(counts)}")
    return facts


def _cycle(snapshot: RankSnapshot) -> str:
    if snapshot.num_steps <= 1:
        return "every step"
    at_end = snapshot.flag(Flag.SYNC_WITH_DATALOADER)
    rest = "and at the end of the loader" if at_end else "across the end of the loader"
    return f"every {snapshot.num_steps} steps {rest}"


def _folded(texts: Mapping[int, str], of: int) -> list[str]:
    """One text if all of so many ranks have it, else each with its ranks, the most common first; at most three."""
    by_text: dict[str, list[int]] = defaultdict(list)
    for rank, text in texts.items():
        by_text[text].append(rank)
    if len(by_text) <= 1 and len(texts) == of:
        return list(by_text)
    groups = sorted(by_text.items(), key=lambda pair: -len(pair[1]))
    said = [f"{text} ({name_ranks(ranks)})" for text, ranks in groups[:3]]
    return [*said, "others differ"] if len(groups) > 3 else said

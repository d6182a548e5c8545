"""A frame in words: as text for a terminal or a log, and the sentences that every picture of it shares.

The html picture is drawn in ``picture.py``, out of the same words.
"""

from __future__ import annotations

from typing import Final

from nbstate.dashboard.kinds import SYMBOLS
from nbstate.dashboard.lines import without_colours
from nbstate.dashboard.model import AGE, TABLE_ROWS, Frame, show_elapsed

__all__ = [
    "PLAIN_TEXT",
    "SYMBOLS",
    "age",
    "barrier_words",
    "crowd",
    "facts_line",
    "frame_to_text",
    "moment",
    "time_in",
    "use_words",
    "verdict_sentence",
]

PLAIN_TEXT: Final = "nbstate dashboard"

_LINES: Final = 30  # lines of output that come along
_HEADINGS: Final = ("rank", "device", "phase", "step", "epoch", "gradients", "last steps", "last collective", "memory")


def frame_to_text(frame: Frame, now: float | None = None) -> str:
    """The whole picture for a terminal or a log.

    Parameters
    ----------
    frame : Frame
        What to draw.
    now : float, optional
        Seconds after the start of the launch, for the ages of what is still open. Not needed once it has ended.
    """
    at = moment(frame, now)
    symbol = SYMBOLS.get(frame["verdict"]["kind"], "?")
    rows = [f"{frame['title']}  {facts_line(frame, at)}", f"{symbol} {verdict_sentence(frame, at)}"]
    rows += [f"  {fact}" for fact in frame["verdict"]["evidence"]]
    if (barrier := frame["barrier"]) is not None:
        count = f"barrier #{barrier['number']}: {barrier['arrived']} of {frame['world_size']}"
        rows.append(" · ".join((count, *barrier_words(frame, at))))
    if frame["world_size"] <= TABLE_ROWS:
        rows += _aligned([_HEADINGS, *(_row(frame, at, i) for i in range(len(frame["ranks"]["rank"])))])
    else:
        rows += [f"{phase}: {count} ranks" for phase, count in crowd(frame)]
    if frame["gradients"]:
        rows.append(f"gradients: {' · '.join(frame['gradients'])}")
    rows += [f"[{rank}] {without_colours(text)}" for rank, text in frame["lines"][-_LINES:]]
    return "\n".join(rows)


def age(seconds: float) -> str:
    """A waiting time as people say it: ``"12 ms"``, ``"3.1 s"``, ``"02:05"``."""
    if seconds < 0.001:
        return "<1 ms"
    if seconds < 0.0995:
        return f"{round(seconds * 1000)} ms"
    return f"{seconds:.1f} s" if seconds < 60 else show_elapsed(seconds)


def verdict_sentence(frame: Frame, now: float | None = None) -> str:
    """The verdict's sentence with its waiting time, if it has one, as of ``now``; "some time" where that is unknown."""
    verdict = frame["verdict"]
    if verdict["since"] is None:
        return verdict["sentence"]
    waited = "some time" if now is None else age(max(0.0, now - verdict["since"]))
    return verdict["sentence"].replace(AGE, waited, 1)


def moment(frame: Frame, now: float | None) -> float | None:
    """The moment a picture shows: the end of the launch, or ``now`` while it runs."""
    return frame["elapsed"] if frame["elapsed"] is not None else now


def facts_line(frame: Frame, at: float | None) -> str:
    """What stands beside the title: size, start method, engine, cell and time."""
    size = frame["world_size"]
    facts = [f"{size} rank{'s' if size != 1 else ''}", frame["start_method"], frame["engine"], frame["cell"]]
    if at is not None:
        facts.append(show_elapsed(at))
    return " · ".join(fact for fact in facts if fact)


def barrier_words(frame: Frame, at: float | None) -> list[str]:
    """What is to say of the newest barrier besides how many have come: who is missing or was last, and where it is."""
    barrier = frame["barrier"]
    if barrier is None:
        return []
    words = []
    if barrier["open"]:
        words.append(f"missing: {barrier['missing_text']}")
        if at is not None:
            verb = "waiting" if frame["elapsed"] is None else "waited"
            words.append(f"{verb} {age(max(0.0, at - barrier['since']))}")
    elif barrier["spread"] is not None:
        words += [f"spread {age(barrier['spread'])}", f"rank {barrier['last']} last"]
    words.append(barrier["where"])
    return [word for word in words if word]


def time_in(frame: Frame, i: int, at: float | None) -> str:
    """How long a rank has been, or was, in its last collective or barrier; ``"not left"`` if it never came out."""
    ranks = frame["ranks"]
    since, took = ranks["last_since"][i], ranks["last_took"][i]
    if not ranks["last"][i]:
        return ""
    if since is not None:
        return "" if at is None else age(max(0.0, at - since))
    return "not left" if took is None else age(took)


def use_words(frame: Frame, i: int) -> str:
    """How busy a rank's device is, or, where that is not known, its process; empty if neither is."""
    ranks = frame["ranks"]
    device, cpu = ranks["device_use"][i], ranks["cpu"][i]
    if device is not None:
        return f"{device} %"
    return "" if cpu is None else f"cpu {cpu} %"


def crowd(frame: Frame) -> list[tuple[str, int]]:
    """How many ranks are in each phase, in the order in which the first rank of each stands."""
    counts: dict[str, int] = {}
    for text in frame["ranks"]["phase_text"]:
        counts[text] = counts.get(text, 0) + 1
    return list(counts.items())


def _row(frame: Frame, at: float | None, i: int) -> tuple[str, ...]:
    """One rank's cells, in the order of ``_HEADINGS``."""
    ranks = frame["ranks"]
    mark, sync, epoch, last = ranks["mark"][i], ranks["sync"][i], ranks["epoch"][i], ranks["last"][i]
    if last:
        last += f" #{ranks['last_number'][i]}" if ranks["last_number"][i] else ""
        spent = time_in(frame, i, at)
        last += f", {'in it ' if ranks['last_since'][i] is not None else ''}{spent}" if spent else ""
    return (
        f"{SYMBOLS[mark]} {ranks['rank'][i]}" if mark else str(ranks["rank"][i]),
        ranks["device"][i],
        ranks["phase_text"][i],
        str(ranks["step"][i]),
        "" if epoch is None else str(epoch),
        "" if sync is None else ("sync" if sync else "accumulate"),
        ranks["strip"][i][-32:].replace("0", "▁").replace("1", "▇"),
        last,
        ranks["memory"][i],
    )


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]

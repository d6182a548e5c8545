"""A launch from its start to its end as one drawing: a row for each rank, time from left to right. Inline SVG.

A bar is tall where a rank works and low where it waits, so that the drawing can be read without its colours. How wide a
launch is drawn does not depend on how much happened in it: a row is divided into ``ACROSS`` columns, each shows the
phase that takes most of it, and neighbours alike become one bar. A barrier that was found exactly is drawn over that.

Events are those of ``Launch.timeline()``, plain dicts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

__all__ = ["LEGEND", "ROWS", "Barrier", "barriers_of", "draw_chart", "pick_rows", "show_seconds"]

Event = Mapping[str, Any]

ROWS: Final = 32
"""Ranks that a chart has room for."""
LEGEND: Final = (
    ("running", "running"),
    ("loader", "in loader"),
    ("collective", "in a collective"),
    ("barrier", "in a barrier"),
    ("starting", "starting or returning"),
)
"""Class of a bar, and what it means."""
ACROSS: Final = 900
_LEFT: Final = 64
_TOP: Final = 26
_LINES: Final = 40  # barriers whose arrivals are joined by a line

# Where in its row a bar begins and how tall it is, in hundredths: work is tall, waiting is low.
_SHAPES: Final = {
    "running": (0, 100),
    "loader": (35, 65),
    "collective": (50, 50),
    "barrier": (50, 50),
    "starting": (75, 25),
    "returning": (75, 25),
}
_ENDS: Final = {"finished": "✓", "failed": "✕", "stopped": "■"}
_END_WORDS: Final = {"finished": "finished", "failed": "failed", "stopped": "interrupted"}


@dataclass(frozen=True)
class Barrier:
    """One barrier of the world: when each rank came and left, in seconds; ``left`` lacks those that never did."""

    attempt: int
    number: int
    where: str
    entered: Mapping[int, float]
    left: Mapping[int, float]

    @property
    def spread(self) -> float:
        """Seconds between first and last arrival."""
        return max(self.entered.values()) - min(self.entered.values())

    @property
    def last(self) -> int:
        """Who came last."""
        return max(self.entered, key=lambda rank: self.entered[rank])


def barriers_of(events: Iterable[Event]) -> list[Barrier]:
    """The barriers among the events, in their order."""
    entered: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
    left: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
    where: dict[tuple[int, int], str] = {}
    for event in events:
        if event["kind"] != "barrier":
            continue
        key = event["attempt"], event["number"]
        entered[key][event["rank"]] = event["time"]
        if event["seconds"] is not None:
            left[key][event["rank"]] = event["time"] + event["seconds"]
        where[key] = where.get(key) or event["where"]
    return [Barrier(*key, where[key], entered[key], left[key]) for key in sorted(entered)]


def pick_rows(world_size: int, wanted: Sequence[int]) -> list[int]:
    """The ranks to draw: all if there is room, else the wanted ones first and the others at even distances."""
    if world_size <= ROWS:
        return list(range(world_size))
    picked = set(list(dict.fromkeys(wanted))[: ROWS // 2])
    rest = [rank for rank in range(world_size) if rank not in picked]
    room = ROWS - len(picked)
    picked.update(rest[i * (len(rest) - 1) // (room - 1)] for i in range(room))
    return sorted(picked)


def draw_chart(events: Sequence[Event], ranks: Sequence[int], seconds: float) -> str:
    """Draw the rows of ``ranks`` over a launch of ``seconds``; an empty string if there is nothing to draw."""
    if not ranks or seconds <= 0:
        return ""
    sheet = _Sheet(list(ranks), seconds)
    mine = [event for event in events if event["rank"] in sheet.rows]
    barriers = barriers_of(mine)
    phases: dict[int, list[Event]] = defaultdict(list)
    for event in mine:
        if event["kind"] == "phase":
            phases[event["rank"]].append(event)
    parts = [
        *sheet.axis(),
        *(part for rank in ranks for part in sheet.row(rank, phases[rank], barriers)),
        *sheet.arrivals(barriers),
        *sheet.restarts(events),
    ]
    label = f"Timeline of {len(ranks)} rank{'s' if len(ranks) != 1 else ''} over {show_seconds(seconds)}"
    size = f'viewBox="0 0 {_LEFT + ACROSS + 24} {sheet.bottom + 8}"'
    return f'<svg class="chart" role="img" aria-label="{label}" {size}>{"".join(parts)}</svg>'


class _Sheet:
    """The paper: where times and ranks are."""

    def __init__(self, ranks: Sequence[int], seconds: float) -> None:
        self.rows = {rank: place for place, rank in enumerate(ranks)}
        self.seconds = seconds
        self.height = 22 if len(ranks) <= 8 else 13
        self.pitch = self.height + (8 if len(ranks) <= 8 else 4)
        self.bottom = _TOP + self.pitch * len(ranks)

    def x(self, time: float) -> float:
        return _LEFT + ACROSS * min(max(time, 0.0), self.seconds) / self.seconds

    def y(self, rank: int) -> int:
        return _TOP + self.rows[rank] * self.pitch

    def axis(self) -> Iterator[str]:
        """A line and a number at round times."""
        for time in _round_times(self.seconds):
            x = round(self.x(time), 1)
            yield f'<path class="grid" d="M{x} {_TOP - 6}V{self.bottom}"/>'
            yield f'<text class="tick" x="{x}" y="{_TOP - 11}">{show_seconds(time)}</text>'

    def row(self, rank: int, phases: Sequence[Event], barriers: Sequence[Barrier]) -> Iterator[str]:
        """A rank's name, its bars, and how it ended."""
        y = self.y(rank)
        yield f'<text class="rank" x="{_LEFT - 8}" y="{y + self.height * 0.74:g}">rank {rank}</text>'
        yield f'<path class="ground" d="M{_LEFT} {y + self.height + 0.5}h{ACROSS}"/>'
        columns = self._columns(phases)
        for barrier in barriers:
            if rank in barrier.entered:
                self._lay(columns, barrier.entered[rank], barrier.left.get(rank, self.seconds), "barrier")
        for name, path in self._paths(columns, y).items():
            share = columns.count(name) / ACROSS
            yield f'<path class="{name}" d="{path}"><title>rank {rank}, {_word(name)}: {share:.0%}</title></path>'
        for event in phases:
            if event["name"] in _ENDS:
                x, sign, word = self.x(event["time"]), _ENDS[event["name"]], _END_WORDS[event["name"]]
                said = f"rank {rank} {word} after {show_seconds(event['time'])}"
                yield (
                    f'<text class="end {event["name"]}" x="{min(x + 9, _LEFT + ACROSS + 10):.1f}" '
                    f'y="{y + self.height * 0.78:g}">{sign}<title>{said}</title></text>'
                )

    def _columns(self, phases: Sequence[Event]) -> list[str]:
        """The phase that takes most of each column."""
        columns = [""] * ACROSS
        taken = [0.0] * ACROSS
        width = self.seconds / ACROSS
        for event in phases:
            begin = event["time"]
            end = self.seconds if event["seconds"] is None else begin + event["seconds"]
            for column in range(max(0, int(begin / width)), min(ACROSS, math.ceil(end / width))):
                share = min(end, (column + 1) * width) - max(begin, column * width)
                if share > taken[column]:
                    columns[column], taken[column] = event["name"], share
        return columns

    def _lay(self, columns: list[str], begin: float, end: float, name: str) -> None:
        """Lay what is known exactly over what was sampled, where it is wide enough to fill most of a column."""
        width = self.seconds / ACROSS
        first, last = round(begin / width), min(ACROSS, round(end / width))
        columns[first:last] = [name] * max(0, last - first)

    def _paths(self, columns: Sequence[str], y: int) -> dict[str, str]:
        """One path for all bars of a kind: a row may have hundreds."""
        paths: dict[str, list[str]] = defaultdict(list)
        first = 0
        for column in range(1, ACROSS + 1):
            if column < ACROSS and columns[column] == columns[first]:
                continue
            name = columns[first]
            if name in _SHAPES:
                top, tall = (round(part * self.height / 100, 1) for part in _SHAPES[name])
                wide = column - first
                paths[name].append(f"M{_LEFT + first} {y + top:g}h{wide}v{tall:g}h-{wide}z")
            first = column
        return {name: "".join(parts) for name, parts in paths.items()}

    def arrivals(self, barriers: Sequence[Barrier]) -> Iterator[str]:
        """For the barriers of the widest spread: a line through the arrivals of all ranks, and a mark on the last."""
        apart = [barrier for barrier in barriers if len(barrier.entered) > 1 and self._apart(barrier) >= 3]
        for barrier in sorted(apart, key=lambda barrier: -barrier.spread)[:_LINES]:
            points = [
                f"{self.x(barrier.entered[rank]):.1f} {self.y(rank) + self.height / 2:g}"
                for rank in self.rows
                if rank in barrier.entered
            ]
            x, y = self.x(barrier.entered[barrier.last]), self.y(barrier.last)
            said = f"barrier #{barrier.number}: spread {show_seconds(barrier.spread)}, rank {barrier.last} last" + (
                f", {barrier.where}" if barrier.where else ""
            )
            yield f'<g><title>{escape(said)}</title><path class="met" d="M{"L".join(points)}"/>'
            yield f'<path class="late" d="M{x:.1f} {y + 1}l4.5 -7h-9z"/></g>'

    def _apart(self, barrier: Barrier) -> float:
        return ACROSS * barrier.spread / self.seconds

    def restarts(self, events: Sequence[Event]) -> Iterator[str]:
        """A line across all rows where the ranks were started anew."""
        for event in events:
            if event["kind"] == "restart":
                x = round(self.x(event["time"]), 1)
                yield f'<path class="restart" d="M{x} {_TOP - 6}V{self.bottom}"/>'
                yield f'<text class="again" x="{x + 4}" y="{self.bottom + 4}">attempt {event["number"] + 1}</text>'


def _word(name: str) -> str:
    return {"returning": "returning", "starting": "starting"}.get(name) or dict(LEGEND)[name]


def _round_times(seconds: float) -> Iterator[float]:
    """Up to eight round times from 0 to the end."""
    step = 10 ** math.floor(math.log10(seconds / 4))
    step = next(step * factor for factor in (1, 2, 5, 10) if seconds / (step * factor) <= 8)
    for i in range(int(seconds / step) + 1):
        yield i * step


def show_seconds(seconds: float) -> str:
    """A length of time in the words of an axis or a table: ``"0"``, ``"12 ms"``, ``"2.5 s"``, ``"3:20 min"``."""
    if seconds <= 0:
        return "0"
    if seconds < 0.9995:
        return f"{seconds * 1000:.2g} ms" if seconds < 0.01 else f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} h" if hours else f"{minutes}:{rest:02} min"

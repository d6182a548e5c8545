"""A launch as one page that can be mailed: what ran, how it went, and what each rank did when.

The page is self-contained: its style and its drawing are in it, it has no script, and its own content policy forbids it
to load anything. It names neither the machine nor its user, and no path of theirs (see ``privacy``). Every string that
came from a rank is escaped.

How a launch makes one (``Launch.report``), at any time and from any thread::

    report = build_report(
        facts,                                             # LaunchFacts, as the dashboard got them
        view,                                              # LaunchView of now; of an ended launch, the one of its end
        timeline.events(cells),                            # Launch.timeline()
        tails={rank: output.tail(rank, TAIL) for rank in range(world_size)},
        error="" if error is None else str(error),         # the launch's error, its traceback included
    )
    if path is not None:
        report.save(path)
    return report
"""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from nbstate._version import __version__
from nbstate.dashboard.chart import LEGEND, barriers_of, draw_chart, pick_rows, show_seconds
from nbstate.dashboard.kinds import look_of
from nbstate.dashboard.lines import clean_line, without_colours
from nbstate.dashboard.model import LIVE, Frame, LaunchFacts, LaunchView, build_frame, seconds_after
from nbstate.dashboard.privacy import without_machine
from nbstate.dashboard.ranks import STRIP
from nbstate.dashboard.snapshot import facts_line, verdict_sentence
from nbstate.telemetry.board import RankSnapshot

__all__ = ["TAIL", "Report", "build_report", "software"]

TAIL: Final = 40
"""Lines of each rank's output that a report has room for."""
_STATIC: Final = Path(__file__).parent / "static"
_PLAIN_TEXT: Final = "nbstate report"
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"
_WIDEST: Final = 12  # barriers in the table

Clean = Callable[[str], str]
Event = Mapping[str, Any]


@dataclass(frozen=True)
class Report:
    """One page of html about a launch. In a notebook it shows itself.

    Attributes
    ----------
    html : str
        The whole page.

    Examples
    --------
    >>> report = Report("<!doctype html><title>train</title>")
    >>> report
    nbstate report
    """

    html: str

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a file, for any browser to open."""
        Path(path).write_text(self.html, encoding="utf-8")

    def _repr_html_(self) -> str:
        # A page of its own inside the notebook's, so that neither's style reaches the other.
        style = "width:100%;height:42em;border:1px solid rgba(127,127,127,.32);border-radius:6px;resize:vertical"
        page = f'<iframe title="{_PLAIN_TEXT}" sandbox="" style="{style}" srcdoc="{escape(self.html)}"></iframe>'
        # A notebook that is not trusted shows no such page, and then this line says what stood here.
        return f'<div style="font-size:.88em;opacity:.8">{_PLAIN_TEXT}; its save(path) writes it to a file</div>{page}'

    def __repr__(self) -> str:
        return _PLAIN_TEXT


def build_report(
    facts: LaunchFacts,
    view: LaunchView,
    events: Sequence[Event],
    *,
    tails: Mapping[int, Sequence[str]] | None = None,
    error: str = "",
    versions: Mapping[str, str] | None = None,
) -> Report:
    """Tell of a launch as it stands.

    Parameters
    ----------
    facts : LaunchFacts
        What is known of it beforehand.
    view : LaunchView
        Its present, or its end.
    events : sequence of dict
        What has happened, as ``Launch.timeline()`` has it.
    tails : mapping of int to sequence of str, optional
        The last lines of output, by rank.
    error : str
        The text of its error, with the traceback.
    versions : mapping of str to str, optional
        What it ran on. Left out: ``software()``.
    """
    clean = without_machine()
    frame = build_frame(facts, view)
    seconds = seconds_after(facts.started, view.now)
    story = _Story(frame, view.snapshots, list(events), seconds, clean)
    sections = (
        story.header(facts.started, view.now),
        story.verdict(),
        story.figures(),
        _section("What was raised", f"<pre>{escape(clean(error))}</pre>") if error else "",
        story.timeline(),
        story.ranks(),
        story.barriers(),
        story.gradients(),
        _output(tails or {}, story.shown(), clean),
        _footer(software() if versions is None else versions),
    )
    head = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" '
        f'content="{_POLICY}"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(clean(facts.title))}: nbstate report</title><style>{_style()}</style></head>"
    )
    return Report(f"{head}<body>{''.join(sections)}</body></html>\n")


@cache
def software() -> dict[str, str]:
    """What the ranks ran on: names and versions of software, nothing of the machine."""
    found = {"nbstate": __version__, "Python": platform.python_version()}
    for name in ("torch", "accelerate", "ipykernel"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return {**found, platform.system(): f"{platform.release()} {platform.machine()}"}


@cache
def _style() -> str:
    return (_STATIC / "report.css").read_text(encoding="utf-8")


class _Story:
    """One launch, told section by section."""

    def __init__(
        self, frame: Frame, snapshots: Sequence[RankSnapshot], events: list[Event], seconds: float, clean: Clean
    ) -> None:
        self._frame, self._snapshots, self._events = frame, snapshots, events
        self._seconds, self._clean = seconds, clean
        self._waited = {event["rank"]: event for event in events if event["kind"] == "waited"}
        self._last = {event["rank"]: event for event in events if event["kind"] == "last"}

    def _said(self, text: str) -> str:
        return escape(self._clean(text))

    def shown(self) -> list[int]:
        """The ranks that there is room for: the guilty, those that held up the others, and enough of the rest."""
        held_up = sorted(self._last, key=lambda rank: -(self._last[rank]["seconds"] or 0.0))
        slow = [rank for rank in held_up if self._last[rank]["number"]]
        return pick_rows(self._frame["world_size"], [*self._frame["verdict"]["ranks"], *slow])

    def header(self, started: int, now: int) -> str:
        """What ran, and when."""
        began = datetime.datetime.now().astimezone() - datetime.timedelta(seconds=max(0.0, (now - started) / 1e9))
        facts = [facts_line(self._frame, self._seconds), f"{began.day} {began:%B %Y}"]
        return f'<h1>{self._said(self._frame["title"])}</h1><p class="facts">{self._said(" · ".join(facts))}</p>'

    def verdict(self) -> str:
        """How it went, in one sentence, and what speaks for it."""
        verdict = self._frame["verdict"]
        sentence = verdict_sentence(self._frame, self._seconds)
        live = " so far" if self._frame["state"] in LIVE else ""
        word = "" if sentence.lower().startswith(verdict["kind"]) else f" {verdict['word']}{live}"
        sign = f"<strong>{escape(verdict['symbol'] + word)}</strong>"
        said = self._said(sentence[:1].upper() + sentence[1:])
        more = "".join(f"<br><small>{self._said(fact)}</small>" for fact in (*verdict["lines"], *verdict["evidence"]))
        return f'<div class="verdict {verdict["tone"]}">{sign}<span>{said}{more}</span></div>'

    def figures(self) -> str:
        """The few numbers that say most."""
        steps = [s.step for s in self._snapshots]
        waited = [event["seconds"] or 0.0 for event in self._waited.values()]
        passed = max((event["number"] for event in self._waited.values()), default=0)
        figures = {"time": show_seconds(self._seconds) if self._seconds else "0"}
        if any(steps):
            low, high = min(steps), max(steps)
            figures["steps of each rank"] = str(low) if low == high else f"{low} to {high}"
        if updates := max((s.optimizer_steps for s in self._snapshots), default=0):
            figures["optimizer steps"] = str(updates)
        if passed:
            figures["barriers"] = str(passed)
            figures["longest wait in barriers"] = f"{max(waited) / self._seconds:.0%}" if self._seconds else "0"
        tiles = "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in figures.items())
        return f'<dl class="figures">{tiles}</dl>'

    def timeline(self) -> str:
        """The drawing, and how to read it."""
        size = self._frame["world_size"]
        rows = self.shown()
        chart = draw_chart(self._events, rows, self._seconds)
        if not chart:
            return ""
        notes = [f"{len(rows)} of {size} ranks are shown, here and below"] if len(rows) < size else []
        notes += [f"{event['name']} ({event['number']})" for event in self._events if event["kind"] == "note"]
        said = "".join(f'<p class="note">{self._said(note[:1].upper() + note[1:])}.</p>' for note in notes)
        return _section("Timeline", f'<div class="wide">{chart}</div>{_legend()}{said}')

    def ranks(self) -> str:
        """One row a rank, as it was at the end."""
        columns = self._frame["ranks"]
        rows = []
        for rank in self.shown():
            snapshot, waited, last = self._snapshots[rank], self._waited.get(rank), self._last.get(rank)
            share = f"{(waited['seconds'] or 0.0) / self._seconds:.0%}" if waited and self._seconds else ""
            cells = [
                columns["device"][rank],
                columns["phase_text"][rank],
                _number(snapshot.step),
                _number(snapshot.optimizer_steps),
                _number(snapshot.barrier),
                share if snapshot.barrier else "",
                _number(last["number"]) if last else "",
                columns["last"][rank],
                columns["memory"][rank],
            ]
            mark = columns["mark"][rank]
            sign = f"{look_of(mark).symbol} " if mark else ""
            rows.append((f"{sign}{rank}", cells, look_of(mark).tone if mark else ""))
        heads = ("device", "at the end", "steps", "optimizer steps", "barriers", "time in them", "came last")
        table = self._table("rank", (*heads, "last collective", "memory"), rows, numbers=range(2, 7))
        return _section("Ranks", table)

    def barriers(self) -> str:
        """Who was late, and for which barriers it was worst."""
        barriers = [b for b in barriers_of(self._events) if len(b.entered) == self._frame["world_size"] > 1]
        if not barriers:
            return ""
        widest = sorted(barriers, key=lambda barrier: -barrier.spread)[:_WIDEST]
        rows = [
            (
                f"#{b.number}" + (f" of attempt {b.attempt + 1}" if b.attempt else ""),
                [show_seconds(min(b.entered.values())), show_seconds(b.spread), f"rank {b.last}", b.where],
                "",
            )
            for b in sorted(widest, key=lambda barrier: (barrier.attempt, barrier.number))
        ]
        table = self._table("barrier", ("first arrival", "spread", "last", "line"), rows, numbers=range(2))
        heading = (
            f"Barriers: the {len(rows)} of {len(barriers)} with the widest spread"
            if len(rows) < len(barriers)
            else "Barriers"
        )
        return _section(heading, f"{self._stragglers()}{table}")

    def _stragglers(self) -> str:
        """A sentence about each of the ranks that cost the others most."""
        told = []
        for rank in sorted(self._last, key=lambda rank: -(self._last[rank]["seconds"] or 0.0))[:3]:
            times, held_up = self._last[rank]["number"], self._last[rank]["seconds"] or 0.0
            if times:
                of = self._waited[rank]["number"] if rank in self._waited else times
                told.append(
                    f"Rank {rank} came last {times} of {max(of, times)} times by more than 1 ms, "
                    f"and held up the others for {show_seconds(held_up)} in all."
                )
        return "".join(f"<p>{sentence}</p>" for sentence in told)

    def gradients(self) -> str:
        """The flags of each rank's last steps."""
        columns = self._frame["ranks"]
        known = [rank for rank in self.shown() if columns["strip"][rank]]
        if not known:
            return ""
        rows = []
        for rank in known:
            flags = columns["strip"][rank]
            skipped = self._snapshots[rank].skipped_steps
            detail = columns["detail"][rank]
            rows.append(
                (str(rank), [_Html(_strip(flags)), f"{flags.count('1')} of {len(flags)}", _number(skipped), detail], "")
            )
        heads = (f"last {STRIP} steps at most, newest at the right", "synchronised", "skipped", "state")
        facts = " · ".join(self._frame["gradients"])
        said = f"<p>{self._said(facts[:1].upper() + facts[1:])}.</p>" if facts else ""
        return _section("Gradient synchronisation", said + self._table("rank", heads, rows, numbers=range(1, 3)))

    def _table(
        self, first: str, heads: Sequence[str], rows: Sequence[tuple[str, Sequence[str], str]], numbers: range
    ) -> str:
        """A table without the columns that say nothing. A row: its heading, its cells, its tone."""
        shown = [i for i in range(len(heads)) if any(cells[i] for _, cells, _ in rows)]
        look = {i: ' class="number"' if i in numbers else "" for i in shown}
        head = "".join(f'<th scope="col"{look[i]}>{heads[i]}</th>' for i in shown)
        body = "".join(
            f'<tr class="{tone}"><th scope="row">{self._said(name)}</th>'
            + "".join(
                f"<td{look[i]}>{cells[i] if isinstance(cells[i], _Html) else self._said(cells[i])}</td>" for i in shown
            )
            + "</tr>"
            for name, cells, tone in rows
        )
        heading = f'<thead><tr><th scope="col">{first}</th>{head}</tr></thead>'
        return f'<div class="wide"><table>{heading}<tbody>{body}</tbody></table></div>'


class _Html(str):
    """What is html already, and made here."""


def _section(heading: str, body: str) -> str:
    return f"<section><h2>{escape(heading)}</h2>{body}</section>"


def _number(count: int) -> str:
    return str(count) if count else ""


def _strip(flags: str) -> str:
    """A tall mark for each step that synchronised, a short one for each that did not."""
    first = 4 * (STRIP - len(flags)) + 2
    tall = "".join(f"M{first + 4 * i} 0v12" for i, flag in enumerate(flags) if flag == "1")
    short = "".join(f"M{first + 4 * i} 8v4" for i, flag in enumerate(flags) if flag == "0")
    said = f"last {len(flags)} steps: {flags.count('1')} synchronised"
    marks = f'<path class="kept" d="{short}"/><path class="sync" d="{tall}"/>'
    return f'<svg class="strip" role="img" aria-label="{said}" viewBox="0 0 {4 * STRIP} 12">{marks}</svg>'


def _legend() -> str:
    shapes = {"running": "0h16v12h-16z", "loader": "4h16v8h-16z", "starting": "9h16v3h-16z"}
    items = []
    for name, words in LEGEND:
        bar = f'<path class="{name}" d="M0 {shapes.get(name, "6h16v6h-16z")}"/>'
        items.append(f'<li><svg viewBox="0 0 16 12" aria-hidden="true">{bar}</svg>{words}</li>')
    late = '<svg viewBox="0 0 16 12" aria-hidden="true"><path class="late" d="M8 10l5-8h-10z"/></svg>'
    return f'<ul class="legend">{"".join(items)}<li>{late}came last to a barrier</li></ul>'


def _output(tails: Mapping[int, Sequence[str]], ranks: Sequence[int], clean: Clean) -> str:
    """The last lines of each rank that has printed."""
    spoke = [rank for rank in ranks if tails.get(rank)]
    if not spoke:
        return ""
    parts = []
    for rank in spoke:
        lines = "\n".join(clean(without_colours(clean_line(line))) for line in tails[rank][-TAIL:])
        parts.append(f"<h3>rank {rank}</h3><pre>{escape(lines)}</pre>")
    return _section("Last lines of output", "".join(parts))


def _footer(versions: Mapping[str, str]) -> str:
    said = " · ".join(f"{name} {number}" for name, number in versions.items())
    return (
        f"<footer><p>{escape(said)}</p><p>Made by nbstate. Paths are shortened; the names of the machine and of its "
        "user are left out.</p></footer>"
    )

"""A frame as html: what a notebook keeps of a launch, and what shows where no widget runs.

It must look the part in pages that trust it and in pages that do not. What those leave of a picture was measured with
JupyterLab's own sanitizer (4.6): ``<style>``, ``<svg>``, ``aria-*`` and ``role`` go, classes stay but nothing styles
them, and each declaration of an inline style is judged alone. ``var()`` passes as a length, hardly ever as a colour.
So:

- Colours of text are the page's own, or the page's own mixed with a named one (``color-mix`` with ``currentcolor``),
  which darkens on light pages and lightens on dark ones, without asking for the theme.
- Surfaces are translucent tints of whatever is below; marks are middle tones with 3 : 1 on black and on white.
- The strip of steps is an image with its own words (``alt``): no markup is as small, or as true.
- Tables scroll inside a box of their own. A picture cannot ask how wide it is: columns that say nothing are left out.

Where every style is gone, as on a code-hosting site, tables and sentences in reading order remain. Every string is
escaped, whoever it came from. The lines of output are not in it: they stand in the cell, right below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Final, NamedTuple
from urllib.parse import quote

from nbstate.dashboard.kinds import look_of
from nbstate.dashboard.model import TABLE_ROWS, Frame
from nbstate.dashboard.ranks import STRIP
from nbstate.dashboard.snapshot import (
    PLAIN_TEXT,
    age,
    barrier_words,
    crowd,
    facts_line,
    moment,
    time_in,
    use_words,
    verdict_sentence,
)

__all__ = ["frame_to_html"]

_GREEN: Final = "#2da44e"
_PURPLE: Final = "#8a63d2"
_BLUE: Final = "#4c8ed9"
_GREY: Final = "#8c959f"
_AMBER: Final = "#bf8700"
_RED: Final = "#e5534b"

_INK: Final = {name: f"color:color-mix(in srgb,currentcolor 45%,{name})" for name in ("green", "red", "orange")}
_MUTED: Final = "color:color-mix(in srgb,currentcolor 72%,transparent);font-size:.88em"
_LINE: Final = "1px solid rgba(127,127,127,.32)"
_RULE: Final = f"border-top:{_LINE}"
_SOFT_RULE: Final = "border-top:1px solid rgba(127,127,127,.18)"
_TRACK: Final = "rgba(127,127,127,.2)"
_WARN_TINT: Final = "background:rgba(212,160,23,.17)"
_BAD_TINT: Final = "background:rgba(229,83,75,.15)"

_PER_ROW: Final = 32  # cells in a row of the heat map
_ROWS_BELOW_MAP: Final = 8  # ranks that are shown one by one below it

# Letter, tone, and whether the dot is filled, for each phase.
_PHASES: Final = {
    "absent": ("·", _GREY, False),
    "starting": ("s", _GREY, False),
    "running": ("r", _GREEN, True),
    "loader": ("l", _BLUE, True),
    "collective": ("c", _PURPLE, True),
    "barrier": ("b", _PURPLE, True),
    "returning": ("e", _GREEN, True),
    "finished": ("✓", _GREEN, False),
    "failed": ("✕", _RED, True),
    "stopped": ("■", _GREY, False),
}
_ROUND: Final = frozenset({"absent", "starting", "collective", "barrier", "finished"})


def frame_to_html(frame: Frame, now: float | None = None) -> str:
    """The whole picture as self-contained html, without script or style sheet.

    Parameters
    ----------
    frame : Frame
        What to draw.
    now : float, optional
        Seconds after the start of the launch, for the ages of what is still open. Not needed once it has ended.
    """
    at = moment(frame, now)
    parts = (_header(frame, at), _verdict(frame, at), _barrier(frame, at), _ranks(frame, at), _history(frame))
    style = f"border:{_LINE};border-radius:6px;font-size:var(--jp-ui-font-size1,13px);line-height:1.45;overflow:hidden"
    return f'<div class="nbs-picture" role="group" aria-label="{PLAIN_TEXT}" style="{style}">{"".join(parts)}</div>'


def _span(style: str, inner: str, title: str = "") -> str:
    """An inline piece; ``inner`` is html, ``title`` text."""
    said = f' title="{escape(title)}"' if title else ""
    return f'<span style="{style}"{said}>{inner}</span>'


def _header(frame: Frame, at: float | None) -> str:
    title = f'<strong style="font-size:1.1em">{escape(frame["title"])}</strong>'
    facts = _span(_MUTED, escape(facts_line(frame, at)))
    style = "display:flex;flex-wrap:wrap;gap:2px 12px;align-items:baseline;padding:9px 14px"
    return f'<div style="{style}">{title} {facts}</div>'


def _verdict(frame: Frame, at: float | None) -> str:
    kind, sentence = frame["verdict"]["kind"], verdict_sentence(frame, at)
    symbol, word, _ = look_of(kind)
    word = "" if sentence.lower().startswith(word) else f" {escape(word)}"
    ink, tint = _tone(kind)
    sign = f'<strong style="white-space:nowrap;{ink}">{symbol}{word}</strong>'
    words = _span(
        "min-width:0;white-space:pre-line;overflow-wrap:break-word", escape(sentence[:1].upper() + sentence[1:])
    )
    style = f"display:flex;gap:9px;align-items:baseline;padding:7px 14px;{_RULE};{tint}"
    return f'<div style="{style}">{sign} {words}</div>{_evidence(frame, tint)}'


def _evidence(frame: Frame, tint: str) -> str:
    facts = [*frame["verdict"]["evidence"], *frame["verdict"]["lines"]]
    rows = "".join(f"<div>{escape(fact[:1].upper() + fact[1:])}</div>" for fact in facts)
    return f'<div style="padding:0 14px 7px 40px;{_MUTED};{tint}">{rows}</div>' if rows else ""


def _tone(kind: str) -> tuple[str, str]:
    """The colour of a verdict's sign and the tint under it. Neither is its only sign: there are a symbol and a word."""
    tone = look_of(kind).tone
    if tone == "good":
        return _INK["green"], ""
    if tone == "warn":
        return _INK["orange"], _WARN_TINT
    return (_INK["red"], _BAD_TINT) if tone == "bad" else ("", "")


def _is_bad(mark: str) -> bool:
    return look_of(mark).tone == "bad"


def _barrier(frame: Frame, at: float | None) -> str:
    barrier = frame["barrier"]
    if barrier is None:
        return ""
    number = _span(_MUTED, f"barrier #{barrier['number']}")
    count = _span("white-space:nowrap", f"{number} <strong>{barrier['arrived']} of {frame['world_size']}</strong>")
    info = _span(_MUTED, escape(" · ".join(barrier_words(frame, at))))
    style = f"display:flex;flex-wrap:wrap;gap:4px 14px;align-items:center;padding:8px 14px;{_RULE}"
    return f'<div style="{style}">{count} {_arrivals(frame)} {info}</div>'


def _arrivals(frame: Frame) -> str:
    """Who is in the barrier: a block for each rank, dashed for those that are not, or one bar for many ranks."""
    barrier = frame["barrier"]
    assert barrier is not None
    faded = "" if barrier["open"] else ";opacity:.55"
    if frame["world_size"] > TABLE_ROWS:
        return _bar(100 * barrier["arrived"] / frame["world_size"], _PURPLE, f"flex:1 1 8em;height:13px{faded}")
    missing = set(barrier["missing"])
    here = f"flex:1 1 0;border-radius:3px;background:{_PURPLE}"
    absent = f"flex:1 1 0;border-radius:3px;border:2px dashed {_AMBER}"
    blocks = "".join(
        _span(absent, "", f"rank {rank}: not yet here") if rank in missing else _span(here, "")
        for rank in range(frame["world_size"])
    )
    return _span(f"display:flex;flex:1 1 8em;gap:3px;height:13px{faded}", blocks)


def _bar(percent: float, colour: str, style: str) -> str:
    fill = f"{percent:.0f}%"
    ground = f"background:linear-gradient(90deg,{colour} {fill},{_TRACK} {fill})"
    return _span(f"display:inline-block;border-radius:4px;{ground};{style}", "")


class _Column(NamedTuple):
    """A column of the table: its heading, how one rank's cell is drawn, and how it is set."""

    heading: str
    draw: Callable[[Frame, int, float | None], str]
    right: bool = False


def _ranks(frame: Frame, at: float | None) -> str:
    ranks = range(frame["world_size"])
    if frame["world_size"] <= TABLE_ROWS:
        return _table(frame, ranks, at) + _gradient_facts(frame)
    marked = [rank for rank in ranks if frame["ranks"]["mark"][rank]]
    below = _table(frame, marked[:_ROWS_BELOW_MAP], at) if marked else ""
    return _map(frame) + below + _gradient_facts(frame)


def _gradient_facts(frame: Frame) -> str:
    facts = " · ".join(frame["gradients"])
    return f'<div style="padding:5px 14px;{_SOFT_RULE};{_MUTED}">gradients: {escape(facts)}</div>' if facts else ""


def _table(frame: Frame, ranks: Sequence[int], at: float | None) -> str:
    cells = [[column.draw(frame, rank, at) for rank in ranks] for column in _COLUMNS]
    shown = [place for place, column in enumerate(cells) if any(column)]
    last = len(shown) - 1
    head = "".join(
        f'<th scope="col" style="{_cell(_COLUMNS[place].right, i, last)};width:{"99%" if _wide(place) else "1px"}">'
        f"{_span(_MUTED, _COLUMNS[place].heading)}</th>"
        for i, place in enumerate(shown)
    )
    body = []
    for row, rank in enumerate(ranks):
        mark = frame["ranks"]["mark"][rank]
        _, tint = _tone(mark) if mark else ("", "background:none")
        edge = f";box-shadow:inset 3px 0 {_RED if _is_bad(mark) else _AMBER}" if mark else ""
        looks = [_cell(_COLUMNS[place].right, i, last) for i, place in enumerate(shown)]
        first = f'<th scope="row" style="{looks[0]}{edge}">{cells[0][row]}</th>'
        rest = "".join(
            f'<td style="{look}">{cells[place][row]}</td>' for look, place in zip(looks[1:], shown[1:], strict=True)
        )
        body.append(f'<tr style="{_SOFT_RULE};{tint}">{first}{rest}</tr>')
    return _scrolling(_RULE, "none", head, body)


def _scrolling(box: str, widest: str, head: str, rows: Sequence[str]) -> str:
    """A table in a box of its own, which scrolls if the page is narrower than it."""
    looks = f"table-layout:auto;border-collapse:collapse;border:0;margin:0;font-size:1em;width:100%;max-width:{widest}"
    inner = f'<thead style="border:0"><tr style="background:none">{head}</tr></thead><tbody>{"".join(rows)}</tbody>'
    return f'<div style="overflow-x:auto;{box}"><table style="{looks}">{inner}</table></div>'


def _cell(right: bool, place: int, last: int) -> str:
    """How a cell is set: the first and the last one keep clear of the edges."""
    sides = {0: "4px 7px 4px 14px", last: "4px 14px 4px 7px"}
    return f"padding:{sides.get(place, '4px 7px')};text-align:{'right' if right else 'left'};white-space:nowrap"


def _wide(place: int) -> bool:
    """Whether this column takes the room that is left."""
    return _COLUMNS[place].draw is _phase


def _rank(frame: Frame, i: int, _: float | None) -> str:
    mark = frame["ranks"]["mark"][i]
    if not mark:
        return str(i)
    return f"{_span(_tone(mark)[0], look_of(mark).symbol, mark)} {i}"


def _device(frame: Frame, i: int, _: float | None) -> str:
    return escape(frame["ranks"]["device"][i])


def _phase(frame: Frame, i: int, at: float | None) -> str:
    ranks = frame["ranks"]
    phase, since = ranks["phase"][i], ranks["phase_since"][i]
    _, tone, filled = _PHASES[phase]
    if frame["elapsed"] is not None and phase not in ("finished", "failed"):
        tone, filled = _GREY, False  # where a rank was when it was ended is no sign of life
    shape = "50%" if phase in _ROUND else "1px"
    ground = f";background:{tone}" if filled else ""
    dot = _span(
        f"display:inline-block;box-sizing:border-box;width:9px;height:9px;margin-right:7px;"
        f"border:1.5px solid {tone};border-radius:{shape}{ground}",
        "",
    )
    waited = at - since if at is not None and since is not None else 0.0
    suffix = " " + _span(_MUTED, age(waited)) if waited >= 1 else ""
    return f"{dot}{escape(ranks['phase_text'][i])}{suffix}"


def _counted(column: str, text: str, frame: Frame, i: int) -> str:
    if column not in frame["ranks"]["differs"][i]:
        return text
    return f'<strong title="differs from most ranks">{_span(_INK["orange"], "≠")} {text}</strong>'


def _step(frame: Frame, i: int, _: float | None) -> str:
    return _counted("step", str(frame["ranks"]["step"][i]), frame, i)


def _epoch(frame: Frame, i: int, _: float | None) -> str:
    epoch = frame["ranks"]["epoch"][i]
    return "" if epoch is None else _counted("epoch", str(epoch), frame, i)


def _gradients(frame: Frame, i: int, _: float | None) -> str:
    sync, detail = frame["ranks"]["sync"][i], frame["ranks"]["detail"][i]
    if sync is None:
        return ""
    pill = "border-radius:9px;padding:0 7px;font-size:.88em"
    if sync:
        chip = _span(f"{pill};border:1px solid {_GREEN};{_INK['green']}", "sync", detail)
    else:
        chip = _span(f"{pill};border:1px dashed {_GREY}", "accumulate", detail)
    return _counted("sync", chip, frame, i)


def _strip(frame: Frame, i: int, _: float | None) -> str:
    steps = frame["ranks"]["strip"][i]
    if not steps:
        return ""
    first = 3 * (STRIP - len(steps))  # the newest step is always at the right end
    synced = "".join(f"M{first + 3 * x + 1} 0v12" for x, step in enumerate(steps) if step == "1")
    # A short mark for every step is one dashed line; the tall ones cover theirs.
    svg = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {3 * STRIP} 12' shape-rendering='crispEdges'>"
        f"<path stroke='{_GREY}' stroke-width='4' stroke-dasharray='2 1' d='M{first} 10H{3 * STRIP}'/>"
        f"<path stroke='{_GREEN}' stroke-width='2' d='{synced}'/></svg>"
    )
    count = f"last {len(steps)} step{'s' if len(steps) != 1 else ''}: {steps.count('1')} synchronised"
    style = f"width:{3 * STRIP}px;height:12px;max-width:none;margin:0;vertical-align:middle"
    return f'<img alt="{count}" title="{count}" style="{style}" src="data:image/svg+xml,{quote(svg, _SAFE)}">'


_SAFE: Final = " /=':"  # what a data address in double quotes may hold as it is


def _last(frame: Frame, i: int, _: float | None) -> str:
    name, number = frame["ranks"]["last"][i], frame["ranks"]["last_number"][i]
    if not name:
        return ""
    return escape(name) + (" " + _span(_MUTED, f"#{number}") if number else "")


def _what(frame: Frame, i: int, _: float | None) -> str:
    ranks = frame["ranks"]
    pending = f"{ranks['pending'][i]} pending: {ranks['pending_what'][i]}" if ranks["pending"][i] else ""
    said = " · ".join(part for part in (ranks["last_what"][i], pending) if part)
    return f"<small>{escape(said)}</small>" if said else ""


def _use(frame: Frame, i: int, _: float | None) -> str:
    return use_words(frame, i)


def _time(frame: Frame, i: int, at: float | None) -> str:
    return escape(time_in(frame, i, at))


def _memory(frame: Frame, i: int, _: float | None) -> str:
    text, share = frame["ranks"]["memory"][i], frame["ranks"]["memory_share"][i]
    if not text:
        return ""
    looks = "width:30px;height:8px;margin-right:6px;vertical-align:middle"
    return ("" if share is None else _bar(share, _BLUE, looks)) + f"<small>{escape(text)}</small>"


_COLUMNS: Final = (
    _Column("rank", _rank, right=True),
    _Column("device", _device),
    _Column("phase", _phase),
    _Column("step", _step, right=True),
    _Column("epoch", _epoch, right=True),
    _Column("gradients", _gradients),
    _Column(f"{STRIP} steps, tall: sync", _strip),
    _Column("last collective", _last, right=True),
    _Column("time in it", _time, right=True),
    _Column("shape, group", _what),
    _Column("memory", _memory),
    _Column("use", _use, right=True),
)


def _map(frame: Frame) -> str:
    """One cell a rank, in rows that begin with the number of their first rank, and how many are where."""
    ranks = frame["ranks"]
    row_style = f"display:grid;grid-template-columns:3em repeat({_PER_ROW},19px);gap:2px;margin-bottom:2px"
    rows = []
    for first in range(0, frame["world_size"], _PER_ROW):
        cells = "".join(
            _map_cell(ranks["phase"][i], ranks["mark"][i])
            for i in range(first, min(first + _PER_ROW, frame["world_size"]))
        )
        label = _span(f"text-align:right;padding-right:6px;{_MUTED}", str(first))
        rows.append(f'<div style="{row_style}">{label} {cells}</div>')
    where = {text: phase for phase, text in zip(ranks["phase"], ranks["phase_text"], strict=True)}
    legend = "".join(
        _span("white-space:nowrap", f"{_PHASES[where[text]][0]}  {escape(text)}: {count}") + " "
        for text, count in crowd(frame)
    )
    return (
        f'<div style="overflow-x:auto;padding:10px 14px 2px;{_RULE};text-align:center;line-height:19px">'
        f"{''.join(rows)}</div>"
        f'<div style="display:flex;flex-wrap:wrap;gap:0 18px;padding:4px 14px 9px;{_MUTED}">{legend}</div>'
    )


def _map_cell(phase: str, mark: str) -> str:
    letter, tone, _ = _PHASES[phase]
    ring = f";font-weight:bold;box-shadow:inset 0 0 0 2px {_RED if _is_bad(mark) else _AMBER}" if mark else ""
    return f'<span style="background:{tone}44{ring}">{letter}</span>'


def _history(frame: Frame) -> str:
    meetings = frame["history"]
    if not meetings:
        return ""
    slow = frame["straggler"]
    note = f"rank {slow['rank']} was last in {slow['times']} of {slow['of']}" if slow else ""
    title = f"<strong>Barriers</strong> {_span(_MUTED, note)}"
    widest = max(0.01, *(meeting["spread"] for meeting in meetings))
    columns = (("no.", True), ("where", False), ("spread", False), ("last", True))
    looks = [_cell(right, i, len(columns) - 1) for i, (_, right) in enumerate(columns)]
    head = "".join(
        f'<th scope="col" style="{look}">{_span(_MUTED, name)}</th>'
        for look, (name, _) in zip(looks, columns, strict=True)
    )
    body = []
    for meeting in meetings:
        bar = _bar(
            100 * meeting["spread"] / widest, _PURPLE, "width:70px;height:8px;margin-right:7px;vertical-align:middle"
        )
        cells = (
            f"#{meeting['number']}",
            escape(meeting["where"] or "–"),
            f"{bar}{escape(age(meeting['spread']))}",
            f"rank {meeting['last']}",
        )
        tds = "".join(f'<td style="{look}">{cell}</td>' for look, cell in zip(looks, cells, strict=True))
        body.append(f'<tr style="{_SOFT_RULE};background:none">{tds}</tr>')
    heading = f'<div style="display:flex;flex-wrap:wrap;gap:2px 10px;padding:7px 14px 3px;{_RULE}">{title}</div>'
    return heading + _scrolling("padding:0", "44em", head, body)

"""A frame as html and as text: for saved, untrusted and exported notebooks, where no widget runs.

Notebook front ends clean html they do not trust: ``<style>``, classes and svg go, and often inline styles too. So the
picture is made of what always survives: tables, words, and block characters for strips and bars. Inline styles only add
comfort. Colours are inherited, so light and dark pages both work.

Every string is escaped, whoever it came from.
"""

from __future__ import annotations

from html import escape
from typing import Final

from nbstate.dashboard.lines import without_colours
from nbstate.dashboard.model import AGE, TABLE_ROWS, Frame, show_elapsed

__all__ = ["PLAIN_TEXT", "SYMBOLS", "age", "frame_to_html", "frame_to_text", "verdict_sentence"]

PLAIN_TEXT: Final = "nbstate dashboard"

SYMBOLS: Final = {
    "starting": "…",
    "well": "●",
    "late": "▲",
    "missing": "▲",
    "mismatch": "◆",
    "finished": "✓",
    "failed": "✕",
    "interrupted": "■",
    "stopped": "■",
    "unknown": "?",
}

_LINES: Final = 30  # lines of output kept in a static picture
_CELL: Final = "text-align:left;padding:2px 10px 2px 0;white-space:nowrap"
_MONO: Final = "font-family:ui-monospace,monospace"


def frame_to_html(frame: Frame, now: float | None = None) -> str:
    """The whole picture as self-contained html, without script or style sheet.

    Parameters
    ----------
    frame : Frame
        What to draw.
    now : float, optional
        Seconds after the start of the launch, for the ages of what is still open. Not needed once it has ended.
    """
    at = _moment(frame, now)
    parts = [
        f"<p><strong>{escape(frame['title'])}</strong> <small>{escape(_facts(frame, at))}</small></p>",
        f"<p>{_verdict_html(frame, at)}</p>",
        _barrier_html(frame, at),
        _ranks_html(frame, at),
        _history_html(frame),
        _output_html(frame),
    ]
    return f'<div role="group" aria-label="{PLAIN_TEXT}">{"".join(parts)}</div>'


def frame_to_text(frame: Frame, now: float | None = None) -> str:
    """The same picture for a terminal or a log; parameters as ``frame_to_html``."""
    at = _moment(frame, now)
    symbol = SYMBOLS.get(frame["verdict"]["kind"], "?")
    rows = [f"{frame['title']}  {_facts(frame, at)}", f"{symbol} {verdict_sentence(frame, at)}"]
    if frame["barrier"] is not None:
        rows.append(_barrier_words(frame, at))
    if frame["world_size"] <= TABLE_ROWS:
        rows += _aligned([_HEADINGS, *(_row(frame, at, i) for i in range(len(frame["ranks"]["rank"])))])
    else:
        rows += [f"{phase}: {count} ranks" for phase, count in _crowd(frame)]
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


_HEADINGS: Final = ("rank", "device", "phase", "step", "epoch", "gradients", "last steps", "last collective", "memory")


def _moment(frame: Frame, now: float | None) -> float | None:
    return frame["elapsed"] if frame["elapsed"] is not None else now


def _facts(frame: Frame, at: float | None) -> str:
    size = frame["world_size"]
    facts = [f"{size} rank{'s' if size != 1 else ''}", frame["start_method"], frame["engine"], frame["cell"]]
    if at is not None:
        facts.append(show_elapsed(at))
    return " · ".join(fact for fact in facts if fact)


def _verdict_html(frame: Frame, at: float | None) -> str:
    kind, sentence = frame["verdict"]["kind"], verdict_sentence(frame, at)
    word = "" if sentence.lower().startswith(kind) else f" {escape(kind)}"
    return f"<strong>{SYMBOLS.get(kind, '?')}{word}</strong> {escape(sentence)}"


def _barrier_words(frame: Frame, at: float | None) -> str:
    barrier = frame["barrier"]
    if barrier is None:
        return ""
    words = [f"barrier #{barrier['number']}: {barrier['arrived']} of {frame['world_size']}"]
    if barrier["open"]:
        words.append(f"missing: {barrier['missing_text']}")
        if at is not None:
            verb = "waiting" if frame["elapsed"] is None else "waited"
            words.append(f"{verb} {age(max(0.0, at - barrier['since']))}")
    elif barrier["spread"] is not None:
        words.append(f"spread {age(barrier['spread'])}, rank {barrier['last']} last")
    words.append(barrier["where"])
    return " · ".join(word for word in words if word)


def _barrier_html(frame: Frame, at: float | None) -> str:
    barrier = frame["barrier"]
    if barrier is None:
        return ""
    bar = ""
    if frame["world_size"] <= TABLE_ROWS:
        missing = set(barrier["missing"])
        blocks = "".join("□" if rank in missing else "■" for rank in range(frame["world_size"]))
        bar = f'<span aria-hidden="true" style="letter-spacing:2px">{blocks}</span> '
    return f"<p>{bar}{escape(_barrier_words(frame, at))}</p>"


def _ranks_html(frame: Frame, at: float | None) -> str:
    if frame["world_size"] > TABLE_ROWS:
        items = "".join(f"<li>{escape(phase)}: {count} ranks</li>" for phase, count in _crowd(frame))
        return f"<ul>{items}</ul>"
    head = "".join(f'<th scope="col" style="{_CELL}">{name}</th>' for name in _HEADINGS)
    body = []
    marks, strips = frame["ranks"]["mark"], _HEADINGS.index("last steps")
    for i in range(len(frame["ranks"]["rank"])):
        cells = []
        for column, text in enumerate(_row(frame, at, i)):
            shown = escape(text)
            if marks[i] and column < 3:
                shown = f"<strong>{shown}</strong>"
            style = f"{_CELL};{_MONO};font-size:80%;letter-spacing:-1px" if column == strips else _CELL
            cells.append(f'<td style="{style}">{shown}</td>')
        body.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _row(frame: Frame, at: float | None, i: int) -> tuple[str, ...]:
    """One rank's cells, in the order of ``_HEADINGS``."""
    ranks = frame["ranks"]
    mark, sync, epoch, memory = ranks["mark"][i], ranks["sync"][i], ranks["epoch"][i], ranks["memory"][i]
    last, since, took = ranks["last"][i], ranks["last_since"][i], ranks["last_took"][i]
    if last:
        number = ranks["last_number"][i]
        last += f" #{number}" if number else ""
        if since is not None and at is not None:
            last += f", in it {age(max(0.0, at - since))}"
        elif since is None:
            last += ", not left" if took is None else f", {age(took)}"
    return (
        f"{SYMBOLS[mark]} {ranks['rank'][i]}" if mark else str(ranks["rank"][i]),
        ranks["device"][i],
        ranks["phase_text"][i],
        str(ranks["step"][i]),
        "" if epoch is None else str(epoch),
        "" if sync is None else ("sync" if sync else "accumulate"),
        ranks["strip"][i][-32:].replace("0", "▁").replace("1", "▇"),
        last,
        memory,
    )


def _history_html(frame: Frame) -> str:
    if not frame["history"]:
        return ""
    head = "".join(f'<th scope="col" style="{_CELL}">{name}</th>' for name in ("barrier", "where", "spread", "last"))
    rows = "".join(
        f'<tr><td style="{_CELL}">#{meeting["number"]}</td><td style="{_CELL}">{escape(meeting["where"])}</td>'
        f'<td style="{_CELL}">{escape(age(meeting["spread"]))}</td><td style="{_CELL}">rank {meeting["last"]}</td></tr>'
        for meeting in frame["history"]
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _output_html(frame: Frame) -> str:
    if not frame["lines"]:
        return ""
    text = "\n".join(f"[{rank}] {escape(without_colours(line))}" for rank, line in frame["lines"][-_LINES:])
    return f"<pre>{text}</pre>"


def _crowd(frame: Frame) -> list[tuple[str, int]]:
    """How many ranks are in each phase, in the order in which the first rank of each stands."""
    counts: dict[str, int] = {}
    for text in frame["ranks"]["phase_text"]:
        counts[text] = counts.get(text, 0) + 1
    return list(counts.items())


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]

"""The picture without a widget: complete, self-contained, and safe whatever a rank prints."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest

from nbstate.dashboard import LaunchFacts, build_frame, frame_to_html, frame_to_text
from nbstate.dashboard.snapshot import SYMBOLS, age
from nbstate.telemetry.board import Phase

SECOND = 1_000_000_000
Make = Callable[[int], Any]
NASTY = "<img src=x onerror=alert(1)>\"'&</pre></table><script>alert(2)</script>"


class Tags(HTMLParser):
    """Collects what a browser would see, and that every tag is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.seen.add(tag)
        self.attributes |= {name for name, _ in attributes}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def parse(html: str) -> Tags:
    tags = Tags()
    tags.feed(html)
    tags.close()
    assert tags.open == []
    return tags


@pytest.fixture
def late(stage: Make) -> Any:
    """Two ranks, one of which the other waits for."""
    board = stage(2).running()
    board.meet(6, [30 * SECOND, 30 * SECOND + 31_000_000])
    board.rank(1, phase=Phase.LOADER, phase_since=48 * SECOND, sync_history=0b0101, sync_count=4)
    board.wait(7, {0: 48 * SECOND})
    return board


def test_html_has_the_whole_picture(late: Any) -> None:
    frame = build_frame(late.facts, late.view(lines=[(1, "loss 0.5")]))
    text = parse(frame_to_html(frame, now=41.0)).text
    for part in (
        "train",
        "2 ranks · forkserver · local · In[5] · 00:41",
        "rank 1 is 3.0 s late for barrier #7 (In[5], line 14)",
        "■□",
        "1 of 2 · missing: rank 1 · waiting 3.0 s",
        "▲ 1",
        "in loader",
        "▁▇▁▇",
        "barrier #7, in it 3.0 s",
        "31 ms",
        "[1] loss 0.5",
    ):
        assert part in text


def test_html_is_self_contained(late: Any) -> None:
    tags = parse(frame_to_html(build_frame(late.facts, late.view(lines=[(0, NASTY)]))))
    assert tags.seen <= {"div", "p", "strong", "small", "span", "table", "thead", "tbody", "tr", "th", "td", "pre"}
    assert tags.attributes <= {"style", "role", "aria-label", "aria-hidden", "scope"}


def test_every_string_of_a_rank_is_escaped(stage: Make) -> None:
    board = stage(2).running()
    slot = board.board.slot(0)
    board.wait(3, {0: 40 * SECOND, 1: 41 * SECOND})
    slot.write_text(device="<b>cpu</b>", barrier_file="<b>file</b>", collective_name="<b>op</b>")
    board.rank(0, phase=Phase.COLLECTIVE, collective=1, collective_entered=45 * SECOND)
    facts = LaunchFacts("<b>f</b>", "<b>In</b>", "<b>m</b>", "<b>e</b>", 2, board.facts.started)
    view = board.view(state="failed", message=NASTY, lines=[(0, NASTY)], cells={})
    html = frame_to_html(build_frame(facts, view))
    tags = parse(html)
    assert not tags.seen & {"b", "img", "script"}
    assert tags.text.count("<b>") >= 6
    assert tags.text.count("<script>alert(2)</script>") == 2


@pytest.mark.parametrize("kind", sorted(SYMBOLS))
def test_no_meaning_by_colour_alone(late: Any, kind: str) -> None:
    frame = build_frame(late.facts, late.view())
    frame["verdict"]["kind"] = kind
    html = frame_to_html(frame)
    assert SYMBOLS[kind] in html
    assert not re.search(r"(?<![-\w])color\s*:|background", html)


def test_many_ranks_are_counted(stage: Make) -> None:
    board = stage(64).running()
    board.wait(1, dict.fromkeys(range(60), 48 * SECOND))
    frame = build_frame(board.facts, board.view())
    html, text = frame_to_html(frame), frame_to_text(frame)
    for picture in (html, text):
        assert "barrier #1: 60 ranks" in picture
        assert "running: 4 ranks" in picture
        assert "60 of 64" in picture
    assert len(html) < 20_000


def test_text_is_aligned_and_says_the_same(late: Any) -> None:
    frame = build_frame(late.facts, late.view(lines=[(0, "\x1b[31mhello\x1b[0m")]))
    assert "\x1b" not in frame_to_html(frame)
    lines = frame_to_text(frame, now=41.0).splitlines()
    assert lines[0] == "train  2 ranks · forkserver · local · In[5] · 00:41"
    assert lines[1].startswith("▲ rank 1 is 3.0 s late")
    head, first, second = lines[3:6]
    assert head.index("phase") == first.index("barrier #7") == second.index("in loader")
    assert lines[-1] == "[0] hello"


def test_ended_launch_needs_no_clock(late: Any) -> None:
    frame = build_frame(late.facts, late.view(state="finished"))
    assert frame_to_text(frame, now=999.0) == frame_to_text(frame)
    assert "00:41" in frame_to_text(frame)


def test_age() -> None:
    assert [age(s) for s in (0, 0.012, 0.0996, 3.14, 125)] == ["<1 ms", "12 ms", "0.1 s", "3.1 s", "02:05"]

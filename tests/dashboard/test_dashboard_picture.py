"""The picture as html: complete, self-contained, small, and safe whatever a rank says."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest

from nbstate.dashboard import LaunchFacts, Utilisation, build_frame, frame_to_html
from nbstate.dashboard.snapshot import SYMBOLS
from nbstate.telemetry.board import Flag, Phase
from nbstate.telemetry.diagnosis import Verdict

SECOND = 1_000_000_000
MILLI = 1_000_000
Make = Callable[[int], Any]
NASTY = "<img src=x onerror=alert(1)>\"'&</pre></table><script>alert(2)</script>"


class Tags(HTMLParser):
    """Collects what a browser would see, and that every tag is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: Counter[str] = Counter()
        self.attributes: dict[str, list[str]] = {}
        self.text = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag != "img":
            self.open.append(tag)
        self.seen[tag] += 1
        for name, value in attributes:
            self.attributes.setdefault(name, []).append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def draw(board: Any, now: float | None = None, **changes: Any) -> Tags:
    tags = Tags()
    tags.feed(frame_to_html(build_frame(board.facts, board.view(**changes)), now))
    tags.close()
    assert tags.open == []
    return tags


@pytest.fixture
def late(stage: Make) -> Any:
    """Two ranks, one of which the other waits for."""
    board = stage(2).running()
    board.meet(6, [30 * SECOND, 30 * SECOND + 31 * MILLI])
    board.rank(1, phase=Phase.LOADER, phase_since=48 * SECOND, sync_history=0b0101, sync_count=4)
    board.rank(1, memory_used=3 << 30, memory_total=12 << 30)
    board.wait(7, {0: 48 * SECOND})
    return board


def test_it_is_the_whole_picture(late: Any) -> None:
    tags = draw(late, now=41.0)
    for part in (
        "train 2 ranks · forkserver · local · In[5] · 00:41",
        "▲ late Rank 1 is 3.0 s late for barrier #7 (In[5], line 14)",
        "barrier #7 1 of 2",
        "missing: rank 1 · waiting 3.0 s",
        "▲ 1",
        "in loader 3.0 s",
        "barrier #73.0 s",
        "3.0 / 12 GB",
        "#6In[5], line 1431 msrank 1",
    ):
        assert part in tags.text
    assert tags.attributes["alt"] == ["last 4 steps: 2 synchronised"]
    assert tags.attributes["title"].count("rank 1: not yet here") == 1


def test_it_has_evidence_gradients_and_utilisation(late: Any) -> None:
    for rank in range(2):
        late.rank(rank, flags=Flag.KNOWN | Flag.SYNC_WITH_DATALOADER, skipped_steps=1, pending_count=rank)
    late.board.slot(1).write_text(pending_name="irecv")
    verdict = Verdict("lost", "rank 1 has lost the store", (1,), lines=("In[5], line 3",), evidence=(f"gone {NASTY}",))
    use = {0: Utilisation(device_percent=7.0), 1: Utilisation(cpu_percent=98.0)}
    tags = draw(late, now=41.0, verdict=verdict, utilisation=use)
    for part in (
        f"✕ lost Rank 1 has lost the storeGone {NASTY}In[5], line 3",
        "gradients: every 4 steps and at the end of the loader · optimizer steps skipped: 1",
        "1 pending: irecv",
        "7 %",
        "cpu 98 %",
    ):
        assert part in tags.text
    assert "script" not in tags.seen


def test_lines_of_output_are_left_to_the_cell(late: Any) -> None:
    assert "loss 0.5" not in draw(late, lines=[(1, "loss 0.5")]).text


def test_only_what_strangers_notebooks_may_hold(late: Any) -> None:
    tags = draw(late, state="failed", message=NASTY)
    assert set(tags.seen) <= {"div", "strong", "small", "span", "table", "thead", "tbody", "tr", "th", "td", "img"}
    assert set(tags.attributes) <= {"style", "class", "role", "aria-label", "scope", "title", "alt", "src"}
    assert all(address.startswith("data:image/svg+xml,%3Csvg ") for address in tags.attributes["src"])


def test_every_string_of_a_rank_is_escaped(stage: Make) -> None:
    board = stage(2).running()
    slot = board.board.slot(0)
    board.wait(3, {0: 40 * SECOND, 1: 41 * SECOND})
    slot.write_text(device="<b>cpu</b>", barrier_file="<b>file</b>", collective_name="<b>op</b>")
    board.rank(0, phase=Phase.COLLECTIVE, collective=1, collective_entered=45 * SECOND)
    board.facts = LaunchFacts("<b>f</b>", "<b>In</b>", "<b>m</b>", "<b>e</b>", 2, board.facts.started)
    tags = draw(board, state="failed", message=NASTY, cells={})
    assert not set(tags.seen) & {"b", "script"}
    assert tags.text.count("<b>") >= 6
    assert tags.text.count("<script>alert(2)</script>") == 1


@pytest.mark.parametrize("kind", sorted(SYMBOLS))
def test_no_meaning_by_colour_alone(late: Any, kind: str) -> None:
    frame = build_frame(late.facts, late.view())
    frame["verdict"]["kind"] = kind
    plain = re.sub(r'style="[^"]*"', "", frame_to_html(frame))
    word = {"well": "all well", "unknown": "unclear"}.get(kind, kind)
    assert f"{SYMBOLS[kind]} {word}" in plain


def test_a_column_that_says_nothing_is_left_out(stage: Make) -> None:
    board = stage(2)
    for rank in range(2):
        board.rank(rank, phase=Phase.FINISHED)
        board.board.slot(rank).write_text(device="cpu")
    text = draw(board, state="finished").text
    assert "rankdevicephasestep0cpufinished" in text
    assert "Barriers" not in text


def test_eight_ranks_are_small_and_five_hundred_are_a_map(stage: Make) -> None:
    few, many = stage(8).running(), stage(512).running()
    for board in (few, many):
        for rank in range(board.size):
            board.rank(rank, sync_history=0x8888_8888_8888, sync_count=470, memory_used=1 << 30, memory_total=80 << 30)
        for number in range(1, 7):
            board.meet(number, [number * SECOND + rank * MILLI // 50 for rank in range(board.size)])
    few_html, many_html = (frame_to_html(build_frame(b.facts, b.view(state="finished"))) for b in (few, many))
    assert len(few_html.encode()) < 30_000
    assert few_html.count("<img") == 8
    assert len(many_html.encode()) < 40_000
    assert many_html.count(">r</span>") == 512


def test_the_guilty_of_many_ranks_have_rows(stage: Make) -> None:
    board = stage(64).running()
    board.wait(1, dict.fromkeys(range(60), 48 * SECOND))
    board.rank(61, phase=Phase.FAILED)
    text = draw(board, state="failed", message="rank 61 died", guilty=(61,)).text
    assert "60 of 64" in text
    for counted in ("b  was in barrier #1: 60", "r  was running: 3", "✕  failed: 1"):
        assert counted in text
    assert "✕ 61" in text
    assert "✕ 60" not in text


def test_what_differs_from_the_crowd_is_said(stage: Make) -> None:
    board = stage(3).running()
    board.rank(1, step=50, epoch=4)
    assert draw(board).text.count("≠") == 2
    assert "1cuda:1running 1.0 s≠ 50≠ 4" in draw(board, now=41.0).text


def test_ended_launch_needs_no_clock(late: Any) -> None:
    frame = build_frame(late.facts, late.view(state="finished"))
    assert frame_to_html(frame, now=999.0) == frame_to_html(frame)
    assert "00:41" in frame_to_html(frame)

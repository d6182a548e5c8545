"""The page about a launch: complete, self-contained, escaped, and silent about the machine."""

from __future__ import annotations

import getpass
import os
import re
import socket
import sys
from collections.abc import Callable
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import nbstate
from nbstate.dashboard.chart import ACROSS, draw_chart, pick_rows, show_seconds
from nbstate.dashboard.model import LaunchFacts, LaunchView
from nbstate.dashboard.privacy import without_machine
from nbstate.dashboard.report import Report, build_report
from nbstate.telemetry.board import Flag, Phase

MakeStage = Callable[[int], Any]

EVIL = "</title><script>alert(1)</script>&amp;\"'"
VOID = {"meta", "br", "link", "img"}


def event(kind: str, rank: int, at: float, seconds: float | None = None, **more: Any) -> dict[str, Any]:
    blank = {"attempt": 0, "name": "", "number": 0, "where": "", "line": 0}
    return {"time": at, "rank": rank, "kind": kind, "seconds": seconds, **blank, **more}


def story(size: int, late: int = 1, barriers: int = 3) -> list[dict[str, Any]]:
    """Ranks that run for 41 s and meet a few times; one comes 2 s after the others."""
    events = []
    for rank in range(size):
        events += [event("phase", rank, 0.1, 40.0, name="running"), event("phase", rank, 40.1, name="finished")]
        for number in range(1, barriers + 1):
            at = 10.0 * number
            came = at + 2 if rank == late else at
            events.append(event("barrier", rank, came, at + 2.1 - came, number=number, where="In[5], line 14"))
        events.append(event("waited", rank, 41.0, 0.3 if rank == late else 6.3, number=barriers))
        events.append(event("last", rank, 41.0, 6.0 if rank == late else 0.0, number=3 if rank == late else 0))
    return events


class Page(HTMLParser):
    """What is in a page, and whether every element is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.addresses: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data + " "


def finished(stage: Any, **changes: Any) -> LaunchView:
    for rank in range(stage.size):
        stage.rank(
            rank, phase=Phase.FINISHED, step=120, barrier=3, optimizer_steps=30, sync_history=0b1000, sync_count=9
        )
        stage.rank(rank, flags=Flag.KNOWN | Flag.SYNC_GRADIENTS, num_steps=4)
    return stage.view(**{"state": "finished", **changes})


def test_a_page_tells_how_it_went(stage: MakeStage) -> None:
    scene = stage(4)
    page = Page(
        build_report(scene.facts, finished(scene), story(4), tails={2: ["loss 0.5\n", "\x1b[31mloss 0.4\x1b[0m"]}).html
    )
    assert not page.open
    for said in (
        "train",
        "4 ranks · forkserver · local · In[5] · 00:41",
        "inished in 41.0 s",
        "120",
        "Rank 1 came last 3 of 3 times by more than 1 ms, and held up the others for 6 s in all.",
        "In[5], line 14",
        "loss 0.5\nloss 0.4",
        "every 4 steps",
        f"nbstate {nbstate.__version__}",
        f"Python {sys.version.split()[0]}",
        "torch ",
    ):
        assert said in page.text
    assert "rank 3" in page.text
    assert "What was raised" not in page.text


def test_a_page_needs_nothing_but_itself(stage: MakeStage) -> None:
    scene = stage(2)
    report = build_report(scene.facts, finished(scene), story(2))
    page = Page(report.html)
    assert not page.addresses
    assert not page.tags & {"script", "link", "img", "iframe", "object", "form"}
    assert "url(" not in report.html
    assert "default-src 'none'" in report.html
    assert {"prefers-color-scheme: dark", "@media print"} <= set(
        re.findall(r"prefers-color-scheme: dark|@media print", report.html)
    )


def test_everything_from_ranks_is_escaped(stage: MakeStage) -> None:
    scene = stage(2)
    facts = LaunchFacts(EVIL, EVIL, "fork", "local", 2, scene.facts.started)
    view = finished(scene, state="failed", message=EVIL, guilty=(1,))
    scene.board.slot(0).write_text(device=EVIL[-20:], collective_name=EVIL[:30])
    events = [*story(2), event("phase", 0, 3.0, 1.0, name=EVIL), event("note", -1, 41.0, name=EVIL, number=2)]
    events += [event("barrier", rank, 5.0 + 3 * rank, 0.1, number=9, where=EVIL) for rank in range(2)]
    report = build_report(facts, view, events, tails={0: [EVIL]}, error=EVIL, versions={EVIL: EVIL})
    page = Page(report.html)
    assert not page.open
    assert "script" not in page.tags
    assert page.text.count("alert(1)") >= 6


def test_an_error_stands_near_the_top(stage: MakeStage) -> None:
    scene = stage(2)
    view = finished(scene, state="failed", message="rank 1 raised ValueError: boom (In[5], line 3)", guilty=(1,))
    text = Page(build_report(scene.facts, view, story(2), error="Traceback\n  boom\nValueError: boom").html).text
    assert (
        text.index("What was raised")
        < text.index("ValueError: boom", text.index("What was raised"))
        < text.index("Timeline")
    )
    assert "✕ 1" in text


def test_nothing_tells_of_the_machine(stage: MakeStage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "secretbox.example.org")
    monkeypatch.setattr(getpass, "getuser", lambda: "wilhelmina")
    scene = stage(2)
    here = str(Path(__file__).resolve())
    error = f'File "{here}", line 3\nFile "{os.__file__}", line 9\nsecretbox.example.org wilhelmina on secretbox'
    view = finished(scene, state="failed", message=error, guilty=(0,))
    html = build_report(scene.facts, view, story(2), tails={0: [f"saved {here} wilhelmina"]}, error=error).html
    assert not re.search("secretbox|wilhelmina", html)
    assert str(Path(here).parent) not in html
    assert "test_dashboard_report.py" in html
    assert 'File "os.py"' in unescape(html)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("https://example.org/srv/data/x", "https://example.org/srv/data/x"),
        ("half 1/2/3 and a/b/c", "half 1/2/3 and a/b/c"),
        ("/srv/ann/site-packages/torch/nn/x.py", "torch/nn/x.py"),
        ("[/srv/third_party/gloo/pair.cc:544] closed", "[pair.cc:544] closed"),
        ("/api/v1/models", "/api/v1/models"),
        ("'/srv/ann/runs/'", "'runs'"),
    ],
)
def test_paths_of_the_machine_are_shortened_and_others_are_not(text: str, left: str) -> None:
    assert without_machine(folder_exists=lambda folder: folder == "/srv")(text) == left


def test_a_name_that_is_everybodys_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    monkeypatch.setattr(getpass, "getuser", lambda: "root")
    assert without_machine()("the root cause on localhost") == "the root cause on localhost"


def test_a_notebook_gets_a_page_of_its_own_and_a_constant_text(stage: MakeStage, tmp_path: Path) -> None:
    scene = stage(2)
    report = build_report(scene.facts, finished(scene), story(2))
    shown = report._repr_html_()
    assert shown.startswith("<div")
    assert 'sandbox=""' in shown
    assert unescape(re.search(r'srcdoc="([^"]*)"', shown)[1]) == report.html  # type: ignore[index]
    assert repr(report) == repr(Report("")) == "nbstate report"
    report.save(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == report.html


def test_a_report_of_a_launch_that_runs_says_so_far(stage: MakeStage) -> None:
    scene = stage(2).running()
    text = Page(build_report(scene.facts, scene.view(), story(2)).html).text
    assert "so far" in text
    assert "training, step 120" in text


def test_a_launch_without_a_past_has_a_page(stage: MakeStage) -> None:
    scene = stage(1)
    page = Page(build_report(scene.facts, scene.view(state="starting", now=scene.facts.started), []).html)
    assert not page.open
    assert "Barriers" not in page.text


def test_512_ranks_stay_a_page_that_can_be_mailed(stage: MakeStage) -> None:
    scene = stage(512)
    html = build_report(scene.facts, finished(scene, guilty=(300,)), story(512, late=77)).html
    assert len(html) < 300_000
    text = Page(html).text
    assert "32 of 512 ranks are shown" in text
    assert "Rank 77 came last" in text
    assert "rank 77" in text


def test_a_row_is_bounded_however_often_it_changes() -> None:
    names = ("running", "loader", "collective")
    phases = [event("phase", 0, i / 1000, 0.001, name=names[i % 3]) for i in range(10_000)]
    bars = re.findall(r'<path class="(\w+)" d="(M[^"]*z)"', draw_chart(phases, [0], 10.0))
    assert sum(path.count("M") for _, path in bars) <= ACROSS


def test_a_short_barrier_is_drawn_where_it_was() -> None:
    events = [event("phase", 0, 0.0, 10.0, name="running"), event("barrier", 0, 5.0, 1.0, number=1)]
    bars = dict(re.findall(r'<path class="(\w+)" d="(M[^"]*z)"', draw_chart(events, [0], 10.0)))
    left, wide = re.search(r"M(\d+) [\d.]+h(\d+)v", bars["barrier"]).groups()  # type: ignore[union-attr]
    assert (int(left) - 64, int(wide)) == (ACROSS // 2, ACROSS // 10)


def test_the_rows_that_matter_are_among_those_drawn() -> None:
    assert pick_rows(8, [3]) == list(range(8))
    rows = pick_rows(512, [511, 77, 77])
    assert {0, 77, 511} <= set(rows)
    assert max(set(rows) - {511}) > 450
    assert len(rows) == 32
    assert rows == sorted(set(rows))


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0"), (0.0012, "1.2 ms"), (0.25, "250 ms"), (2.5, "2.5 s"), (200, "3:20 min"), (7300, "2:01:40 h")],
)
def test_times_are_told_as_people_tell_them(seconds: float, said: str) -> None:
    assert show_seconds(seconds) == said

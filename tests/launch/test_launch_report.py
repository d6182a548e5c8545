"""A launch's own timeline and report, from real ranks."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from nbstate import PartialState, RankError, notebook_launcher


def train() -> None:
    state = PartialState()
    for _ in range(3):
        time.sleep(0.1 * state.process_index)
        state.wait_for_everyone()
    print("hello <b>")
    if state.process_index:
        raise ValueError("boom")
    time.sleep(5)


def test_the_report_of_a_launch_that_failed_and_its_timeline(tmp_path: Path) -> None:
    launch = notebook_launcher(train, num_processes=2, device="cpu", dashboard=False, block=False)
    assert "so far" in launch.report().html
    with pytest.raises(RankError):
        launch.results()
    page = launch.report(tmp_path / "launch.html").html
    assert (tmp_path / "launch.html").read_text() == page
    assert "What was raised" in page
    assert "ValueError: boom" in page
    assert "hello &lt;b&gt;" in page
    events = launch.timeline()
    barriers = [event for event in events if event["kind"] == "barrier"]
    assert [event["number"] for event in barriers if event["rank"] == 1] == [1, 2, 3]
    assert {event["where"] for event in barriers} == {"test_launch_report.py:17"}
    assert {event["rank"]: event["number"] for event in events if event["kind"] == "last"} == {0: 0, 1: 3}


def test_the_report_of_a_launch_that_finished() -> None:
    launch = notebook_launcher(lambda: print("done"), num_processes=2, device="cpu", dashboard=False, block=False)
    launch.results()
    page = launch.report().html
    assert "done" in page
    assert "What was raised" not in page

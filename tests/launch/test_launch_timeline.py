"""What a timeline keeps of looks at the board: exact where it says so, sampled elsewhere, and bounded."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest

import nbstate
from nbstate.launch.meetings import Ledger
from nbstate.launch.timeline import EVERY, Event, Timeline
from nbstate.telemetry import probe
from nbstate.telemetry.board import HISTORY, Board, Flag, Phase

SECOND = 1_000_000_000
CELL = "/tmp/ipykernel_7/42.py"
CELLS = {CELL: "In[5]"}


@pytest.fixture
def board() -> Iterator[Board]:
    made = Board.create(2)
    yield made
    made.close()


def of_kind(events: list[Event], kind: str, rank: int | None = None) -> list[Event]:
    return [event for event in events if event["kind"] == kind and rank in (None, event["rank"])]


def pass_barrier(board: Board, number: int, arrivals: list[int], left: int = 0) -> None:
    for rank, entered in enumerate(arrivals):
        slot = board.slot(rank)
        slot.open_barrier(number, entered, CELL, 14)
        slot.close_barrier(number, Phase.RUNNING, left or max(arrivals))


def test_a_phase_lasts_until_the_next_one_that_is_seen(board: Board) -> None:
    timeline = Timeline(2, started=SECOND)
    for number, (phase, since) in enumerate(
        [(Phase.STARTING, 1.0), (Phase.RUNNING, 1.5), (Phase.RUNNING, 1.9), (Phase.LOADER, 2.2), (Phase.FINISHED, 3.0)]
    ):
        board.slot(0).write_phase(phase, int(since * SECOND))
        timeline.record(board.snapshot(), SECOND + number * SECOND // 2)
    told = [(e["time"], e["name"], e["seconds"]) for e in of_kind(timeline.events(), "phase", 0)]
    assert told == [(0, "starting", 0.5), (0.5, "running", 0.7), (1.2, "loader", 0.8), (2, "finished", None)]
    timeline.record(board.snapshot(), 5 * SECOND, last=True)
    assert of_kind(timeline.events(), "phase", 0)[-1]["seconds"] == 2
    assert not of_kind(timeline.events(), "phase", 1)


def test_every_barrier_that_the_ring_still_holds_is_exact(board: Board) -> None:
    timeline = Timeline(2, started=0)
    entered = {number: [number * 1000, number * 1000 + 7] for number in range(1, HISTORY + 1)}
    for number, arrivals in entered.items():
        pass_barrier(board, number, arrivals, left=arrivals[1] + 3)
    timeline.record(board.snapshot(), EVERY)
    board.slot(1).open_barrier(HISTORY + 1, 40_000, CELL, 15)
    timeline.record(board.snapshot(), 2 * EVERY)
    events = of_kind(timeline.events(CELLS), "barrier")
    assert {e["where"] for e in events if e["number"] <= HISTORY} == {"In[5], line 14"}
    for rank in range(2):
        mine = [e for e in events if e["rank"] == rank and e["number"] <= HISTORY]
        assert [e["number"] for e in mine] == list(range(1, HISTORY + 1))
        assert [round(e["time"] * 1e9) for e in mine] == [arrivals[rank] for arrivals in entered.values()]
        assert {round((e["seconds"] or 0) * 1e9) for e in mine} == {10 - 7 * rank}
    waiting = events[-1]
    assert (waiting["rank"], waiting["number"], waiting["line"], waiting["seconds"]) == (1, HISTORY + 1, 15, None)
    board.slot(1).close_barrier(HISTORY + 1, Phase.RUNNING, 45_000)
    timeline.record(board.snapshot(), 3 * EVERY)
    assert of_kind(timeline.events(), "barrier")[-1]["seconds"] == 5e-6
    assert not of_kind(timeline.events(), "note")


def test_barriers_that_went_by_between_two_looks_are_counted(board: Board) -> None:
    timeline = Timeline(2, started=0)
    for number in range(1, HISTORY + 11):
        pass_barrier(board, number, [number * 10, number * 10])
    timeline.record(board.snapshot(), EVERY)
    (note,) = of_kind(timeline.events(), "note")
    assert note["number"] == 2 * 10
    assert note["rank"] == -1


def test_who_came_last_is_added_up_over_all_barriers(board: Board) -> None:
    timeline = Timeline(2, started=0)
    for number in range(1, 8):
        late = number % 3 == 0
        begin = number * SECOND
        pass_barrier(board, number, [begin, begin + (SECOND // 4 if late else 500)])
        timeline.record(board.snapshot(), begin + SECOND // 2)
    events = timeline.events()
    last = {e["rank"]: (e["number"], e["seconds"]) for e in of_kind(events, "last")}
    assert last == {0: (0, 0), 1: (2, 0.5)}
    waited = {e["rank"]: (e["number"], round(e["seconds"] or 0, 5)) for e in of_kind(events, "waited")}
    assert waited == {0: (7, 0.5), 1: (7, 0)}


def test_a_barrier_that_raised_has_no_end(board: Board) -> None:
    timeline = Timeline(2, started=0)
    slot = board.slot(0)
    slot.open_barrier(1, 100, CELL, 14)
    slot.write_phase(Phase.RUNNING, 200)
    slot.open_barrier(2, 300, CELL, 15)
    slot.close_barrier(2, Phase.RUNNING, 400)
    timeline.record(board.snapshot(), EVERY)
    assert [e["seconds"] for e in of_kind(timeline.events(), "barrier")] == [None, 1e-7]


def test_steps_carry_the_flags_of_all_that_went_by(board: Board) -> None:
    probe.attach(board.slot(0))
    try:
        timeline = Timeline(2, started=0)
        for step in range(1, 6):
            probe.step(step % 4 == 0)
        probe.epoch(1)
        timeline.record(board.snapshot(), EVERY)
        probe.step(True)
        probe.optimizer_step(skipped=True)
        timeline.record(board.snapshot(), 3 * EVERY)
    finally:
        probe.detach()
    events = timeline.events()
    assert [(e["number"], e["name"], e["seconds"]) for e in of_kind(events, "step")] == [
        (5, "00010", None),
        (6, "1", 0.2),
    ]
    assert [e["number"] for e in of_kind(events, "epoch")] == [1]
    assert [e["number"] for e in of_kind(events, "skipped")] == [1]


def test_a_collective_is_told_once_and_gets_its_end_later(board: Board) -> None:
    timeline = Timeline(2, started=0)
    slot = board.slot(1)
    slot.open_collective(3, 1000, CELL, 9, "all_reduce", 64, False)
    timeline.record(board.snapshot(), EVERY)
    (event,) = of_kind(timeline.events(CELLS), "collective")
    assert (event["name"], event["number"], event["where"], event["seconds"]) == (
        "all_reduce",
        3,
        "In[5], line 9",
        None,
    )
    slot.close_collective(Phase.RUNNING, 5000)
    slot.open_collective(3, 6000, CELL, 9, "send", 64, True)
    slot.close_collective(Phase.RUNNING, 7000)
    timeline.record(board.snapshot(), 2 * EVERY)
    told = [(e["name"], e["number"], e["seconds"]) for e in of_kind(timeline.events(), "collective")]
    assert told == [("all_reduce", 3, None), ("send", 0, 1e-6)]


def test_no_more_than_ten_looks_a_second_are_taken_in(board: Board) -> None:
    timeline = Timeline(2, started=0)
    seen = 0
    for tick in range(100):  # one second in steps of 10 ms
        now = tick * EVERY // 10
        seen += timeline.is_due(now)
        board.slot(0).write(step=tick + 1)
        timeline.record(board.snapshot(), now)
    assert seen == len(of_kind(timeline.events(), "step")) == 10
    timeline.record(board.snapshot(), now + 1, last=True)
    assert len(of_kind(timeline.events(), "step")) == 11


def test_a_restart_begins_anew(board: Board) -> None:
    timeline = Timeline(2, started=0)
    pass_barrier(board, 1, [1000, 2000])
    board.slot(0).write_phase(Phase.FAILED, 3000)
    board.slot(0).write(step=50)
    timeline.record(board.snapshot(), EVERY)
    again = Board.create(2)
    try:
        for rank in range(2):
            again.slot(rank).write(attempt=1)
        again.slot(0).write_phase(Phase.RUNNING, 2 * EVERY)
        again.slot(0).write(step=7)
        pass_barrier(again, 1, [2 * EVERY, 2 * EVERY])
        timeline.record(again.snapshot(), 3 * EVERY)
    finally:
        again.close()
    events = timeline.events()
    assert [(e["number"], e["rank"]) for e in of_kind(events, "restart")] == [(1, -1)]
    assert [(e["attempt"], e["number"]) for e in of_kind(events, "barrier", 0)] == [(0, 1), (1, 1)]
    assert [(e["attempt"], e["number"]) for e in of_kind(events, "step", 0)] == [(0, 50), (1, 7)]


@pytest.mark.parametrize("size", [2, 64])
def test_a_long_launch_is_thinned_out_and_says_so(size: int) -> None:
    board = Board.create(size)
    timeline = Timeline(size, started=0)
    try:
        for look in range(1, 3 * 20_000 // size):
            for rank in range(size):
                phase = Phase.LOADER if look % 3 else Phase.RUNNING
                board.slot(rank).write_phase(phase, look * EVERY - 1)
                board.slot(rank).write(step=look)
            timeline.record(board.snapshot(), look * EVERY)
        events = timeline.events()
    finally:
        board.close()
    assert 5_000 < len(of_kind(events, "phase")) + len(of_kind(events, "step")) <= 20_000
    (note,) = of_kind(events, "note")
    assert "looks 0." in note["name"]
    steps = [e["number"] for e in of_kind(events, "step", 1)]
    apart = [after - before for before, after in itertools.pairwise(steps)]
    assert max(apart) <= 2 * min(apart)  # the whole launch in steps alike, no hole
    assert steps[-1] > 0.95 * look


def test_what_lasts_is_not_thinned_out(board: Board) -> None:
    timeline = Timeline(2, started=0)
    looks = 45_001
    probe.attach(board.slot(1))
    try:
        for look in range(1, looks + 1):
            now = look * EVERY
            if look % 1001 == 1:  # of rank 0 a phase now and then, at odd looks mostly
                board.slot(0).write_phase(Phase.LOADER if look // 1001 % 2 else Phase.RUNNING, now - 5)
            probe.step(look % 5 == 0)
            timeline.record(board.snapshot(), now)
    finally:
        probe.detach()
    events = timeline.events()
    phases = [(round(e["time"] * 1e9), e["name"]) for e in of_kind(events, "phase", 0)]
    assert phases == [(i * EVERY - 5, ("running", "loader")[i // 1001 % 2]) for i in range(1, looks + 1, 1001)]
    steps = of_kind(events, "step", 1)
    assert len(steps) < 20_000
    assert "".join(e["name"] for e in steps) == "00001" * (steps[-1]["number"] // 5) + "0" * (steps[-1]["number"] % 5)
    assert sum(e["seconds"] or 0 for e in steps) == pytest.approx((steps[-1]["number"] - 1) / 10, abs=2)


def test_of_many_barriers_the_widest_are_kept() -> None:
    board = Board.create(2)
    ledger = Ledger(2)
    total = 40_000
    wide = {20_000, 20_002, 25_000}
    try:
        for number in range(1, total + 1):
            begin = number * 1_000_000_000
            pass_barrier(board, number, [begin, begin + (5_000_000 if number in wide else number % 7)])
            if number % 20 == 0:
                for snapshot in board.snapshot():
                    ledger.add(snapshot)
    finally:
        board.close()
    kept = {meeting.number for meeting in ledger}
    assert len(kept) <= 32_768 // 2
    assert {1, total} | wide <= kept
    assert ledger.left_out == total - len(kept)
    assert ledger.unseen == 0
    assert [tally.passed for tally in ledger.tallies] == [total, total]
    assert ledger.tallies[1].last == len(wide)


def test_events_make_a_table() -> None:
    pandas = pytest.importorskip("pandas")
    board = Board.create(2)
    timeline = Timeline(2, started=0)
    try:
        pass_barrier(board, 1, [1000, 2000])
        board.slot(0).write_phase(Phase.RUNNING, 3000)
        board.slot(0).write(flags=Flag.KNOWN, epoch=2)
        timeline.record(board.snapshot(), EVERY)
    finally:
        board.close()
    table = pandas.DataFrame(timeline.events())
    assert list(table.columns) == ["time", "rank", "attempt", "kind", "name", "number", "where", "line", "seconds"]
    assert str(table.seconds.dtype) == str(table.time.dtype) == "float64"


def test_real_ranks_leave_a_story() -> None:
    def train() -> None:
        from nbstate import PartialState

        state = PartialState()
        for _ in range(3):
            time.sleep(0.2 * state.process_index)
            state.wait_for_everyone()

    launch: Any = nbstate.notebook_launcher(train, num_processes=2, device="cpu", dashboard=False, block=False)
    timeline = Timeline(2, started=time.monotonic_ns())
    while not launch.wait(0.02):
        timeline.record(*launch._attempts.current.look())
    timeline.record(*launch._attempts.current.look(), last=True)
    launch.results()
    events = timeline.events()
    for rank in range(2):
        assert [e["number"] for e in of_kind(events, "barrier", rank)] == [1, 2, 3]
        assert of_kind(events, "phase", rank)[-1]["name"] == "finished"
    last = {e["rank"]: e for e in of_kind(events, "last")}
    assert (last[0]["number"], last[1]["number"]) == (0, 3)
    assert last[1]["seconds"] >= 0.5

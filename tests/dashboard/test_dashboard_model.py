"""What a frame says of a board: pure values in, pure values out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbstate.dashboard import Utilisation, build_frame
from nbstate.dashboard.kinds import KINDS
from nbstate.dashboard.lines import (
    APART,
    MERGED,
    OF_A_RANK,
    WIDTH,
    clean_line,
    pick_lines,
    pick_tails,
    without_colours,
)
from nbstate.dashboard.model import show_elapsed
from nbstate.dashboard.ranks import STRIP, show_bytes, strip
from nbstate.telemetry.board import Barrier, Flag, Phase
from nbstate.telemetry.diagnosis import Kind, Verdict

SECOND = 1_000_000_000
MILLI = 1_000_000
Make = Callable[[int], Any]
CELL = "/tmp/ipykernel_7/42.py"


def frame_of(stage: Any, **changes: Any) -> Any:
    return build_frame(stage.facts, stage.view(**changes))


class TestFrame:
    @pytest.mark.parametrize("size", [1, 2, 8, 32, 33, 64, 512])
    def test_every_size_is_json_with_one_entry_a_rank(self, stage: Make, size: int) -> None:
        frame = frame_of(stage(size).running(), lines=[(size - 1, "hello")])
        assert {len(column) for column in frame["ranks"].values()} == {size}
        assert json.loads(json.dumps(frame))["world_size"] == size

    def test_unchanged_board_gives_an_equal_frame_whatever_the_time(self, stage: Make) -> None:
        board = stage(2).running()
        later = replace(board.view(), now=board.now + 17 * SECOND + 123)
        assert build_frame(board.facts, board.view()) == build_frame(board.facts, later)

    def test_lasting_trouble_makes_no_frames(self, stage: Make) -> None:
        board = stage(2).running()
        board.wait(1, {0: 45 * SECOND})
        moments = [board.now + tenth * 100 * MILLI for tenth in range(20)]
        frames = [build_frame(board.facts, replace(board.view(), now=now)) for now in moments]
        assert frames[0]["verdict"]["kind"] == "late"
        assert all(frame == frames[0] for frame in frames)

    @pytest.mark.parametrize(
        "words",
        [
            {"step": 121},
            {"phase": Phase.LOADER},
            {"epoch": 3},
            {"flags": Flag.KNOWN},
            {"memory_used": 9 << 30},
            {"skipped_steps": 1},
            {"sync_history": 1, "sync_count": 1},
        ],
    )
    def test_each_change_on_the_board_changes_the_frame(self, stage: Make, words: dict[str, int]) -> None:
        board = stage(2).running()
        before = frame_of(board)
        board.rank(1, **words)
        assert frame_of(board) != before

    def test_times_are_seconds_after_the_start_and_elapsed_waits_for_the_end(self, stage: Make) -> None:
        board = stage(2).running()
        frame = frame_of(board)
        assert frame["elapsed"] is None
        assert frame["ranks"]["phase_since"] == [40.0, 40.0]
        assert frame_of(board, state="finished")["elapsed"] == 41.0

    def test_controls_are_offered_only_while_it_runs(self, stage: Make) -> None:
        board = stage(2).running()
        assert frame_of(board, state="starting")["actions"] == ["diagnose", "stacks", "interrupt", "stop"]
        assert frame_of(board)["actions"] == ["diagnose", "stacks", "interrupt", "stop"]
        assert frame_of(board, state="stopped")["actions"] == []

    def test_show_elapsed(self) -> None:
        assert [show_elapsed(s) for s in (0, 41.9, 125, 3723)] == ["00:00", "00:41", "02:05", "1:02:03"]


class TestVerdict:
    def test_well_while_all_train(self, stage: Make) -> None:
        verdict = frame_of(stage(4).running())["verdict"]
        assert verdict["kind"] == "well"
        assert "120" in verdict["sentence"]

    def test_late_rank_is_named_with_its_cell_and_marked(self, stage: Make) -> None:
        board = stage(4).running()
        board.wait(1, dict.fromkeys((0, 1, 3), 48 * SECOND))
        frame = frame_of(board)
        assert frame["verdict"]["ranks"] == [2]
        assert frame["verdict"]["sentence"].startswith("rank 2 is {age} late for barrier #1 (In[5], line 14)")
        assert frame["verdict"]["since"] == frame["barrier"]["since"] == 38.0
        assert frame["ranks"]["mark"] == ["", "", "late", ""]

    @pytest.mark.parametrize(
        ("state", "says"), [("finished", "finished in 41.0 s"), ("stopped", "stopped after 41.0 s")]
    )
    def test_end_without_a_message_says_how_long(self, stage: Make, state: str, says: str) -> None:
        verdict = frame_of(stage(2).running(), state=state)["verdict"]
        assert (verdict["kind"], verdict["sentence"], verdict["ranks"], verdict["since"]) == (state, says, [], None)

    def test_failed_says_the_message_and_marks_failed_ranks(self, stage: Make) -> None:
        board = stage(3).running()
        board.rank(1, phase=Phase.FAILED)
        frame = frame_of(board, state="failed", message="rank 1 raised ValueError: boom (In[5], line 3)")
        assert frame["verdict"]["sentence"] == "rank 1 raised ValueError: boom (In[5], line 3)"
        assert frame["ranks"]["mark"] == ["", "failed", ""]

    def test_every_kind_of_verdict_has_its_looks(self) -> None:
        assert set(get_args(Kind)) < set(KINDS)
        assert {look.tone for look in KINDS.values()} == {"plain", "good", "warn", "bad"}

    def test_one_that_is_given_stands_in_place_of_the_boards_own(self, stage: Make) -> None:
        board = stage(3).running()
        verdict = Verdict(
            "blocked",
            "rank 1 has slept for 12.3 s (In[5], line 9)",
            (1,),
            since=38 * SECOND,
            lines=("In[5], line 9", "In[5], line 14"),
            evidence=("it used no CPU",),
        )
        frame = frame_of(board, verdict=verdict)
        assert frame["verdict"] == {
            "kind": "blocked",
            "symbol": "▲",
            "word": "blocked",
            "tone": "warn",
            "sentence": "rank 1 has slept for {age} (In[5], line 9)",
            "ranks": [1],
            "since": 28.0,
            "lines": ["In[5], line 14"],
            "evidence": ["it used no CPU"],
        }
        assert frame["ranks"]["mark"] == ["", "blocked", ""]
        assert frame_of(board, verdict=verdict, state="stopped")["verdict"]["kind"] == "stopped"

    def test_named_guilt_is_believed_over_phases(self, stage: Make) -> None:
        board = stage(3).running()
        board.rank(0, phase=Phase.FAILED)  # its connection broke when rank 2 was killed
        assert frame_of(board, state="failed", message="rank 2 died", guilty=(2,))["ranks"]["mark"] == [
            "",
            "",
            "failed",
        ]

    def test_nobody_is_marked_when_stopped(self, stage: Make) -> None:
        board = stage(2).running()
        board.rank(0, phase=Phase.FAILED)
        assert frame_of(board, state="stopped")["ranks"]["mark"] == ["", ""]


class TestBarrier:
    def test_none_before_the_first(self, stage: Make) -> None:
        frame = frame_of(stage(2).running())
        assert frame["barrier"] is None
        assert frame["history"] == []

    def test_open_with_a_rank_missing(self, stage: Make) -> None:
        board = stage(2).running()
        board.wait(1, {0: 48 * SECOND})
        assert frame_of(board)["barrier"] == {
            "number": 1,
            "open": True,
            "arrived": 1,
            "missing": [1],
            "missing_text": "rank 1",
            "since": 38.0,
            "where": "In[5], line 14",
            "spread": None,
            "last": None,
        }

    def test_since_is_the_first_arrival(self, stage: Make) -> None:
        board = stage(4).running()
        board.wait(1, {3: 47 * SECOND, 0: 48 * SECOND})
        barrier = frame_of(board)["barrier"]
        assert (barrier["since"], barrier["arrived"], barrier["missing"]) == (37.0, 2, [1, 2])

    def test_complete_says_spread_and_who_was_last(self, stage: Make) -> None:
        board = stage(3).running()
        board.meet(1, [30 * SECOND, 30 * SECOND + 31 * MILLI, 30 * SECOND + 4 * MILLI])
        barrier = frame_of(board)["barrier"]
        assert (barrier["open"], barrier["arrived"], barrier["missing_text"]) == (False, 3, "")
        assert (barrier["spread"], barrier["last"]) == (0.031, 1)

    def test_a_rank_that_has_left_the_barrier_has_arrived(self, stage: Make) -> None:
        board = stage(2).running()
        board.wait(1, {0: 48 * SECOND, 1: 49 * SECOND})
        board.board.slot(1).close_barrier(1, int(Phase.RUNNING), 49 * SECOND + 1)
        barrier = frame_of(board)["barrier"]
        assert (barrier["open"], barrier["arrived"], barrier["last"]) == (False, 2, 1)

    def test_newest_is_shown_when_a_rank_is_two_behind(self, stage: Make) -> None:
        board = stage(3).running()
        board.meet(1, [20 * SECOND] * 3)
        board.wait(2, {0: 40 * SECOND, 1: 40 * SECOND})
        board.board.slot(0).close_barrier(2, int(Phase.RUNNING), 41 * SECOND)
        board.wait(3, {0: 42 * SECOND})
        barrier = frame_of(board)["barrier"]
        assert (barrier["number"], barrier["arrived"], barrier["missing"]) == (3, 1, [1, 2])


class TestHistory:
    def test_spread_and_who_was_last(self, stage: Make) -> None:
        board = stage(3).running()
        board.meet(1, [20 * SECOND, 20 * SECOND + 4 * MILLI, 20 * SECOND])
        board.meet(2, [25 * SECOND + 9 * MILLI, 25 * SECOND, 25 * SECOND])
        assert frame_of(board)["history"] == [
            {"number": 1, "where": "In[5], line 14", "spread": 0.004, "last": 1},
            {"number": 2, "where": "In[5], line 14", "spread": 0.009, "last": 0},
        ]

    def test_open_barrier_is_not_history(self, stage: Make) -> None:
        board = stage(2).running()
        board.meet(1, [20 * SECOND, 21 * SECOND])
        board.wait(2, {1: 48 * SECOND})
        assert [meeting["number"] for meeting in frame_of(board)["history"]] == [1]

    def test_only_the_last_six_and_past_the_ring(self, stage: Make) -> None:
        board = stage(2).running()
        for number in range(1, 41):
            board.meet(number, [number * SECOND, number * SECOND + number * MILLI])
        history = frame_of(board)["history"]
        assert [meeting["number"] for meeting in history] == [35, 36, 37, 38, 39, 40]
        assert history[-1]["spread"] == 0.04

    def test_an_older_line_has_its_own_file(self, stage: Make) -> None:
        board = stage(2).running()
        for rank in range(2):
            slot = board.board.slot(rank)
            slot.write_barrier(Barrier(1, 20 * SECOND, 21 * SECOND, 9, "other.py"))
            slot.write(barrier=1, barrier_entered=20 * SECOND, barrier_left=21 * SECOND, barrier_line=9)
        board.meet(2, [22 * SECOND, 23 * SECOND], line=14)
        assert [meeting["where"] for meeting in frame_of(board)["history"]] == ["other.py:9", "In[5], line 14"]

    def test_an_older_line_is_not_pinned_to_the_newest_file(self, stage: Make) -> None:
        board = stage(2).running()
        board.meet(1, [20 * SECOND, 21 * SECOND], line=9)
        board.meet(2, [22 * SECOND, 23 * SECOND], line=14)
        assert [meeting["where"] for meeting in frame_of(board)["history"]] == ["line 9", "In[5], line 14"]

    def test_straggler_is_named_only_when_it_is_a_habit(self, stage: Make) -> None:
        board = stage(4).running()
        for number, last in enumerate((3, 3, 0), start=1):
            board.meet(number, [number * SECOND + 5 * MILLI * (rank == last) for rank in range(4)])
        assert frame_of(board)["straggler"] is None  # three are too few
        board.meet(4, [4 * SECOND + 5 * MILLI * (rank == 3) for rank in range(4)])
        assert frame_of(board)["straggler"] == {"rank": 3, "times": 3, "of": 4}
        for number, last in enumerate((0, 1, 2, 1, 0, 2), start=5):
            board.meet(number, [number * SECOND + 5 * MILLI * (rank == last) for rank in range(4)])
        assert frame_of(board)["straggler"] is None

    def test_being_last_by_chance_or_by_nothing_is_no_habit(self, stage: Make) -> None:
        of_two, hardly = stage(2).running(), stage(4).running()
        for number in range(1, 7):
            last = number % 2 if number < 6 else 0  # of two ranks, one is always last in half of all barriers
            of_two.meet(number, [number * SECOND + 5 * MILLI * (rank == last) for rank in range(2)])
            hardly.meet(number, [number * SECOND + MILLI // 2 * (rank == 3) for rank in range(4)])
        assert frame_of(of_two)["straggler"] is None
        assert frame_of(hardly)["straggler"] is None


class TestRanks:
    def test_at_the_end_a_phase_is_where_the_rank_was(self, stage: Make) -> None:
        board = stage(4).running()
        board.wait(7, {1: 48 * SECOND})
        board.rank(2, phase=Phase.FINISHED)
        board.rank(3, phase=Phase.COLLECTIVE)
        board.board.slot(3).write_text(collective_name="init_process_group")
        ranks = frame_of(board, state="stopped")["ranks"]
        assert ranks["phase_text"] == ["was running", "was in barrier #7", "finished", "was in init group"]
        assert ranks["phase_since"] == [None] * 4

    def test_phases_in_words(self, stage: Make) -> None:
        board = stage(4).running()
        board.wait(7, {1: 48 * SECOND})
        board.rank(2, phase=Phase.COLLECTIVE)
        board.rank(3, phase=Phase.LOADER)
        assert frame_of(board)["ranks"]["phase_text"] == ["running", "barrier #7", "in all_reduce", "in loader"]

    def test_unknown_gradient_state_is_none_not_false(self, stage: Make) -> None:
        ranks = frame_of(stage(2))["ranks"]
        assert (ranks["sync"], ranks["epoch"], ranks["phase_since"]) == ([None] * 2, [None] * 2, [None] * 2)

    def test_gradient_detail(self, stage: Make) -> None:
        board = stage(2).running()
        flags = Flag.KNOWN | Flag.END_OF_DATALOADER | Flag.SYNC_WITH_DATALOADER
        board.rank(0, flags=flags, num_steps=4, remainder=3, skipped_steps=2)
        assert frame_of(board)["ranks"]["detail"][0] == (
            "every 4 steps · last batch, remainder 3 · optimizer steps skipped: 2"
        )

    def test_last_collective_ticks_while_the_rank_is_in_it(self, stage: Make) -> None:
        board = stage(2).running()
        board.rank(0, collective=9, collective_entered=40 * SECOND, collective_left=40 * SECOND + 12 * MILLI)
        board.rank(1, phase=Phase.COLLECTIVE, collective=10, collective_entered=49 * SECOND)
        ranks = frame_of(board)["ranks"]
        assert (ranks["last"], ranks["last_number"]) == (["all_reduce"] * 2, [9, 10])
        assert (ranks["last_since"], ranks["last_took"]) == ([None, 39.0], [0.012, None])

    def test_a_barrier_newer_than_the_collective_is_the_last(self, stage: Make) -> None:
        board = stage(1).running()
        board.rank(0, collective=9, collective_entered=40 * SECOND, collective_left=41 * SECOND)
        board.wait(2, {0: 42 * SECOND})
        ranks = frame_of(board)["ranks"]
        assert (ranks["last"], ranks["last_number"], ranks["last_since"]) == (["barrier"], [2], [32.0])

    def test_stopped_inside_a_barrier_neither_waits_nor_took(self, stage: Make) -> None:
        board = stage(1).running()
        board.wait(2, {0: 42 * SECOND})
        board.rank(0, phase=Phase.STOPPED)
        ranks = frame_of(board)["ranks"]
        assert (ranks["last"], ranks["last_since"], ranks["last_took"]) == (["barrier"], [None], [None])

    def test_a_collective_of_a_part_of_the_world_has_no_number(self, stage: Make) -> None:
        board = stage(1).running()
        board.rank(0, collective=9, collective_entered=SECOND, collective_left=2 * SECOND, collective_partial=1)
        assert frame_of(board)["ranks"]["last_number"] == [0]

    def test_last_collective_with_shape_group_peer_and_line(self, stage: Make) -> None:
        board = stage(3).running()
        for rank in range(3):
            board.rank(rank, collective=9, collective_entered=40 * SECOND, collective_left=41 * SECOND)
            board.rank(rank, collective_line=3)
            board.board.slot(rank).write_text(collective_file=CELL, collective_shape="4x8 float32")
        board.board.slot(1).write_text(collective_group="0,1,2")
        board.board.slot(2).write_text(collective_group="1,2")
        board.rank(2, collective_peer=1)
        ranks = frame_of(board)["ranks"]
        assert ranks["last_what"] == ["4x8 float32", "4x8 float32 · of ranks 0 to 2", "4x8 float32 · with rank 1"]
        assert ranks["last_where"] == ["In[5], line 3"] * 3

    def test_shape_of_an_older_collective_is_not_a_barriers(self, stage: Make) -> None:
        board = stage(1).running()
        board.rank(0, collective=9, collective_entered=40 * SECOND, collective_left=41 * SECOND)
        board.board.slot(0).write_text(collective_shape="4x8 float32")
        board.wait(2, {0: 42 * SECOND})
        ranks = frame_of(board)["ranks"]
        assert (ranks["last_what"], ranks["last_where"]) == ([""], ["In[5], line 14"])

    def test_an_operation_of_torchs_own_is_the_last(self, stage: Make) -> None:
        board = stage(3).running()
        for rank in range(3):
            board.rank(rank, collective=9, collective_entered=40 * SECOND, collective_left=41 * SECOND)
            board.rank(rank, heartbeat=41 * SECOND)
        snapshots = [
            replace(s, native_name="all_reduce", native_shape="9 float32", native_since=since * SECOND)
            for s, since in zip(board.board.snapshot(), (45, 39, 45), strict=True)
        ]
        snapshots[2] = replace(snapshots[2], phase=Phase.STOPPED)
        ranks = frame_of(board, snapshots=snapshots)["ranks"]
        assert ranks["last_number"] == [0, 9, 0]
        assert ranks["last_since"] == [35.0, None, None]
        assert ranks["last_what"] == ["torch's own · 9 float32", "", "torch's own · 9 float32"]

    def test_an_operation_of_torchs_own_that_the_rank_has_left_is_not(self, stage: Make) -> None:
        board = stage(1).running()
        board.rank(0, barrier=2, barrier_entered=40 * SECOND, barrier_left=43 * SECOND, heartbeat=43 * SECOND)
        [snapshot] = board.board.snapshot()
        stale = replace(snapshot, native_name="barrier", native_since=40 * SECOND + 1000)
        ranks = frame_of(board, snapshots=[stale])["ranks"]
        assert (ranks["last_number"], ranks["last_what"]) == ([2], [""])

    def test_handles_that_nobody_has_waited_for(self, stage: Make) -> None:
        board = stage(2).running()
        board.rank(1, pending_count=2, pending_since=48 * SECOND, pending_line=9)
        board.board.slot(1).write_text(pending_file=CELL, pending_name="irecv")
        ranks = frame_of(board)["ranks"]
        assert ranks["pending"] == [0, 2]
        assert ranks["pending_what"] == ["", "irecv (In[5], line 9)"]
        assert ranks["pending_since"] == [None, 38.0]

    def test_utilisation_while_it_runs(self, stage: Make) -> None:
        board = stage(3).running()
        board.rank(1, memory_used=1 << 30, memory_total=8 << 30)
        use = {0: Utilisation(97.6, 3.2, 2 << 30, 80 << 30), 1: Utilisation(device_memory_used=5 << 30)}
        ranks = frame_of(board, utilisation=use)["ranks"]
        assert (ranks["cpu"], ranks["device_use"]) == ([98, None, None], [3, None, None])
        assert ranks["memory"] == ["2.0 / 80 GB", "1.0 / 8.0 GB", ""]  # a rank's own number before its device's
        assert frame_of(board, utilisation=use, state="finished")["ranks"]["cpu"] == [None] * 3

    @pytest.mark.parametrize(
        ("used", "total", "text", "share"),
        [
            (37 << 30, 80 << 30, "37 / 80 GB", 46),
            (300 << 20, 16 << 30, "0.3 / 16 GB", 2),
            (100 << 20, 512 << 20, "100 / 512 MB", 20),
            (100 << 20, 0, "100 MB", None),
            (0, 0, "", None),
        ],
    )
    def test_memory(self, stage: Make, used: int, total: int, text: str, share: int | None) -> None:
        board = stage(1).running()
        board.rank(0, memory_used=used, memory_total=total)
        ranks = frame_of(board)["ranks"]
        assert (ranks["memory"], ranks["memory_share"]) == ([text], [share])

    def test_show_bytes(self) -> None:
        assert [show_bytes(n) for n in (0, 5 << 20, 3 << 30, 80 << 30)] == ["0 MB", "5 MB", "3.0 GB", "80 GB"]


class TestDiffers:
    def test_one_step_apart_is_normal_two_are_not(self, stage: Make) -> None:
        board = stage(4).running(step=120)
        board.rank(1, step=121)
        board.rank(2, step=118)
        assert frame_of(board)["ranks"]["differs"] == [[], [], ["step"], []]

    def test_epoch_apart_from_the_crowd(self, stage: Make) -> None:
        board = stage(4).running()
        board.rank(3, epoch=1)
        assert frame_of(board)["ranks"]["differs"] == [[], [], [], ["epoch"]]

    def test_flags_are_compared_in_the_same_step_only(self, stage: Make) -> None:
        board = stage(5).running(step=120)
        board.rank(1, flags=Flag.KNOWN)
        board.rank(2, flags=Flag.KNOWN, step=119)
        assert frame_of(board)["ranks"]["differs"] == [[], ["sync"], [], [], []]

    def test_two_ranks_are_no_crowd(self, stage: Make) -> None:
        board = stage(2).running()
        board.rank(1, epoch=1, flags=Flag.KNOWN)
        assert frame_of(board)["ranks"]["differs"] == [[], []]


class TestStrip:
    def test_oldest_first_newest_last(self) -> None:
        assert strip(0b0001, 4) == "0001"
        assert strip(0b0110, 3) == "110"
        assert strip(0, 0) == ""

    @given(st.lists(st.booleans(), max_size=100))
    def test_is_what_was_pushed(self, steps: list[bool]) -> None:
        history = 0
        for sync in steps:
            history = ((history << 1) | sync) & ((1 << 64) - 1)
        assert strip(history, len(steps)) == "".join("01"[sync] for sync in steps[-STRIP:])

    def test_a_heat_map_carries_none(self, stage: Make) -> None:
        for size, expected in ((32, "1"), (33, "")):
            board = stage(size).running()
            board.rank(0, sync_history=1, sync_count=1)
            assert frame_of(board)["ranks"]["strip"][0] == expected


class TestLines:
    @pytest.mark.parametrize(
        ("raw", "clean"),
        [
            ("plain", "plain"),
            ("\x1b[32mgreen\x1b[0m \x1b[1;38;5;9mred\x1b[m", "\x1b[32mgreen\x1b[0m \x1b[1;38;5;9mred\x1b[m"),
            ("\x1b[2K\x1b[1Aup\x1b[?25l", "up"),
            (" 10 %\r 50 %\r100 %", "100 %"),
            ("100 %\r", "100 %"),
            ("\x1b]0;title\x07text", "text"),
            ("tab\tstays, bell\x07 goes", "tab\tstays, bell goes"),
            ("<script>alert(1)</script>", "<script>alert(1)</script>"),
            ("é 漢 🚀", "é 漢 🚀"),
        ],
    )
    def test_clean(self, raw: str, clean: str) -> None:
        assert clean_line(raw) == clean

    def test_a_long_line_is_cut(self) -> None:
        assert clean_line("x" * 10_000_000) == "x" * WIDTH + "…"
        assert clean_line("x" * 10_000_000 + "\rdone") == "done"
        assert clean_line("\x1b[31m" + "x" * WIDTH + "\x1b[0m") == "\x1b[31m" + "x" * WIDTH + "\x1b[0m"
        assert without_colours(clean_line("\x1b[31m" + "x" * 500 + "\x1b[0m")) == "x" * WIDTH + "…"

    @given(st.text(st.sampled_from("\x1b[]m0;\r\n\x07\x9bA") | st.characters()))
    def test_nothing_that_moves_a_cursor_is_left(self, raw: str) -> None:
        assert not any(ord(c) < 32 and c != "\t" for c in without_colours(clean_line(raw)))

    def test_the_last_of_all(self) -> None:
        lines = [(0, str(i)) for i in range(500)]
        assert pick_lines(lines) == lines[-MERGED:]

    def test_a_noisy_rank_does_not_silence_the_others(self) -> None:
        quiet, noisy = [(1, f"quiet {i}") for i in range(20)], [(0, f"noise {i}") for i in range(500)]
        tails = pick_tails([*quiet, *noisy], world_size=32)
        assert tails[:3] == [[], [f"quiet {i}" for i in range(20 - OF_A_RANK, 20)], []]
        assert len(pick_tails([*noisy], world_size=1)[0]) == APART - MERGED

    def test_no_line_is_in_a_frame_twice(self, stage: Make) -> None:
        lines = [(i % 2, f"line {i}") for i in range(100)]
        frame = frame_of(stage(2), lines=lines)
        tails = [(rank, text) for rank in range(2) for text in frame["tails"][rank]]
        assert sorted([*frame["lines"], *tails]) == sorted(lines)
        assert frame_of(stage(33), lines=lines)["tails"] == []


class TestGradients:
    def write(self, board: Any, rank: int, **words: int) -> None:
        board.rank(rank, **{"flags": Flag.KNOWN | Flag.SYNC_WITH_DATALOADER, "num_steps": 4, **words})

    def test_one_line_for_all(self, stage: Make) -> None:
        board = stage(3).running()
        for rank in range(3):
            self.write(board, rank, skipped_steps=2)
        expected = ["every 4 steps and at the end of the loader", "optimizer steps skipped: 2"]
        assert frame_of(board)["gradients"] == expected

    def test_who_differs_is_named(self, stage: Make) -> None:
        board = stage(3).running()
        for rank in range(3):
            self.write(board, rank)
        self.write(board, 2, flags=Flag.KNOWN, skipped_steps=1)
        assert frame_of(board)["gradients"] == [
            "every 4 steps and at the end of the loader (ranks 0 and 1)",
            "every 4 steps across the end of the loader (rank 2)",
            "optimizer steps skipped: 1 (rank 2)",
        ]

    def test_nothing_where_no_rank_tells(self, stage: Make) -> None:
        assert frame_of(stage(2))["gradients"] == []

    def test_the_last_batch_and_what_is_over(self, stage: Make) -> None:
        board = stage(3).running()
        board.rank(1, flags=Flag.KNOWN | Flag.END_OF_DATALOADER, remainder=3)
        board.rank(2, flags=Flag.KNOWN | Flag.END_OF_DATALOADER, remainder=-1)
        assert frame_of(board)["ranks"]["end"] == [-1, 3, 0]

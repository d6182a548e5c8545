from __future__ import annotations

import sysconfig
import time
from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from nbstate.telemetry.board import Board, Phase, RankSnapshot
from nbstate.telemetry.diagnosis import ALARMS, FINDINGS, Verdict, World, diagnose, name_ranks
from nbstate.telemetry.observed import Observed, StackFrame

CELL = "/tmp/ipykernel_1/99.py"
CELLS = {CELL: "In[5]"}
SECOND = 1_000_000_000
LIBRARY = sysconfig.get_paths()["stdlib"]
START = 1_000 * SECOND


@pytest.fixture
def board():
    made = Board.create(4)
    for rank in range(4):
        made.slot(rank).write_phase(Phase.RUNNING, START)
    yield made
    made.close()


def run_to(board: Board, **step_of_rank: int) -> None:
    for rank, step in step_of_rank.items():
        board.slot(int(rank[1:])).write(step=step)


def at(board: Board, seconds: float = 0.0) -> Verdict:
    return diagnose(board.snapshot(), START + round(seconds * SECOND), CELLS)


def wait_in_barrier(board: Board, *ranks: int, number: int = 7, line: int = 14, after: float = 0.0) -> None:
    for rank in ranks:
        board.slot(rank).open_barrier(number, START + round(after * SECOND), CELL, line)


def wait_in(board: Board, rank: int, name: str, number: int, line: int, *, partial: bool = False) -> None:
    board.slot(rank).open_collective(number, START, CELL, line, name, 8, partial)


def test_no_ranks_are_unknown():
    assert diagnose([], 0) == Verdict("unknown", "nothing is known about the ranks")


def test_starting():
    board = Board.create(4)
    assert at(board) == Verdict("starting", "all 4 ranks starting")
    board.slot(0).write_phase(Phase.STARTING, START)
    assert at(board) == Verdict("starting", "all 4 ranks starting")
    board.slot(0).write_phase(Phase.RUNNING, START)
    board.slot(2).write_phase(Phase.RUNNING, START)
    wait_in(board, 0, "init_process_group", 1, 3)
    assert at(board, 30) == Verdict("starting", "2 of 4 ranks up, ranks 1 and 3 starting")
    board.close()


def test_everyone_runs(board):
    assert at(board) == Verdict("well", "all 4 ranks running")
    run_to(board, r0=120, r1=120, r2=120, r3=120)
    assert at(board) == Verdict("well", "all 4 ranks training, step 120")
    run_to(board, r2=118)
    board.slot(1).write_phase(Phase.LOADER, START)
    assert at(board, 3_600) == Verdict("well", "all 4 ranks training, steps 118 to 120")


def test_some_have_finished(board):
    run_to(board, r0=9, r1=9, r2=9, r3=9)
    board.slot(3).write_phase(Phase.FINISHED, START)
    assert at(board) == Verdict("well", "ranks 0 to 2 training, step 9; rank 3 has finished")
    for rank in range(3):
        board.slot(rank).write_phase(Phase.RETURNING, START)
    assert at(board) == Verdict("well", "all 4 ranks returning")
    for rank in range(3):
        board.slot(rank).write_phase(Phase.FINISHED, START)
    assert at(board) == Verdict("finished", "all 4 ranks finished")


def test_a_barrier_is_well_until_someone_is_late(board):
    run_to(board, r0=120, r1=120, r2=119, r3=120)
    wait_in_barrier(board, 0, 1, 3)
    assert at(board, 0.4) == Verdict("well", "all 4 ranks training, steps 119 to 120")
    sentence = "rank 2 is 3.1 s late for barrier #7 (In[5], line 14); it is in step 119"
    assert at(board, 3.1) == Verdict("late", sentence, (2,))
    wait_in_barrier(board, 2, after=5)
    assert at(board, 5.2).kind == "well"
    for rank in range(4):
        board.slot(rank).close_barrier(7, Phase.RUNNING, START + 6 * SECOND)
    assert at(board, 6).kind == "well"


def test_late_ranks_are_told_apart(board):
    wait_in_barrier(board, 1)
    board.slot(0).write_phase(Phase.LOADER, START)
    wait_in(board, 2, "recv", 0, 9, partial=True)
    verdict = at(board, 2)
    assert verdict.kind == "late"
    assert verdict.ranks == (0, 2, 3)
    assert verdict.sentence == (
        "ranks 0, 2 and 3 are 2.0 s late for barrier #7 (In[5], line 14); "
        "rank 0 is waiting for the data loader, rank 2 is in recv (In[5], line 9), rank 3 is running"
    )


def test_late_for_a_collective(board):
    for rank in range(3):
        wait_in(board, rank, "all_reduce", 4, 21)
    assert at(board, 1.5).sentence == "rank 3 is 1.5 s late for all_reduce #4 (In[5], line 21); it is running"


def test_a_rank_held_in_an_earlier_barrier_is_late_for_the_next(board):
    wait_in_barrier(board, 0, 1, 2, 3)
    for rank in range(3):
        board.slot(rank).close_barrier(7, Phase.RUNNING, START + SECOND)
    wait_in_barrier(board, 0, 1, 2, number=8, line=20, after=2)
    assert at(board, 4) == Verdict(
        "late", "rank 3 is 2.0 s late for barrier #8 (In[5], line 20); it is in barrier #7 (In[5], line 14)", (3,)
    )


def test_a_barrier_inside_a_one_rank_branch(board):
    wait_in_barrier(board, 0, number=1)
    for rank in (1, 2, 3):
        board.slot(rank).write_phase(Phase.FINISHED, START)
    assert at(board) == Verdict(
        "missing",
        "rank 0 waits in barrier #1 (In[5], line 14), but ranks 1 to 3 have finished without it",
        (1, 2, 3),
    )
    board.slot(2).write_phase(Phase.RUNNING, START)
    board.slot(2).write(step=3)
    verdict = at(board)
    assert verdict.ranks == (1, 3)
    assert verdict.sentence.endswith("but ranks 1 and 3 have finished without it; rank 2 is in step 3")


def test_who_passed_a_barrier_and_finished_is_not_missing(board):
    wait_in_barrier(board, 0, 1, 2, 3)
    for rank in (1, 2, 3):
        board.slot(rank).close_barrier(7, Phase.RUNNING, START)
        board.slot(rank).write_phase(Phase.FINISHED, START)
    assert at(board, 2).kind == "well"


def test_a_finished_rank_is_missing_from_a_collective(board):
    wait_in(board, 0, "all_gather", 5, 30)
    for rank in (1, 2):
        wait_in(board, rank, "all_gather", 5, 30)
    board.slot(3).write_phase(Phase.RETURNING, START)
    verdict = at(board)
    assert (verdict.kind, verdict.ranks) == ("missing", (3,))
    assert "ranks 0 to 2 wait in all_gather #5 (In[5], line 30), but rank 3 has finished" in verdict.sentence


def test_different_collectives_in_the_same_place(board):
    for rank in range(3):
        wait_in(board, rank, "all_reduce", 3, 4)
    wait_in(board, 3, "broadcast", 3, 8)
    assert at(board, 0.9).kind == "well"
    assert at(board, 1.1) == Verdict(
        "mismatch",
        "different collectives meet: ranks 0 to 2 in all_reduce #3 (In[5], line 4), "
        "rank 3 in broadcast #3 (In[5], line 8)",
        (3,),
    )


def test_a_mismatch_without_a_crowd_blames_nobody_alone():
    board = Board.create(2)
    wait_in_barrier(board, 0, number=1)
    wait_in(board, 1, "all_reduce", 1, 5)
    assert at(board, 2).ranks == (0, 1)
    # The other way to be stuck: a broadcast may let its root go on before anyone has received.
    board.slot(1).close_collective(Phase.RUNNING, START)
    verdict = at(board, 2)
    assert verdict.kind == "mismatch"
    assert verdict.sentence.endswith(
        "rank 0 in barrier #1 (In[5], line 14), rank 1 called all_reduce #1 (In[5], line 5)"
    )
    board.close()


def test_operations_of_a_part_of_the_world_are_not_compared():
    board = Board.create(2)
    wait_in(board, 0, "send", 3, 4, partial=True)
    wait_in(board, 1, "recv", 3, 8, partial=True)
    assert at(board, 5).kind == "well"
    assert at(board, 12) == Verdict(
        "unknown",
        "both ranks waiting, rank 0 is in send (In[5], line 4), rank 1 is in recv (In[5], line 8), for 12.0 s; "
        "whether slow or stuck is unknown",
    )
    board.close()


def test_all_in_one_operation_for_long_is_unknown(board):
    wait_in_barrier(board, 0, 1, 2, 3)
    assert at(board, 9).kind == "well"
    assert at(board, 12.3) == Verdict(
        "unknown", "all 4 ranks in barrier #7 (In[5], line 14) for 12.3 s; whether slow or stuck is unknown"
    )


def test_a_failure_explains_a_wait(board):
    run_to(board, r1=12)
    wait_in_barrier(board, 0, 2)
    board.slot(1).write_phase(Phase.FAILED, START + 5)
    assert at(board, 20) == Verdict(
        "failed", "rank 1 failed after step 12; ranks 0 and 2 wait in barrier #7 (In[5], line 14)", (1,)
    )
    board.slot(0).write_phase(Phase.FAILED, START + 9)
    assert at(board, 20).sentence.startswith("ranks 0 and 1 failed, rank 1 first; rank 2 waits in barrier")
    assert at(board, 20).ranks == (0, 1)


def test_stopped(board):
    board.slot(2).write_phase(Phase.STOPPED, START)
    assert at(board) == Verdict("stopped", "rank 2 stopped", (2,))


def test_a_wait_that_raised_is_no_wait(board):
    wait_in_barrier(board, 0)
    board.slot(0).write_phase(Phase.RUNNING, START)  # what the probe writes for leave(completed=False)
    assert board.snapshot()[0].in_barrier
    assert at(board, 30).kind == "well"


def test_without_cells_a_line_is_a_file(board):
    wait_in_barrier(board, 0, 1, 3)
    assert "late for barrier #7 (99.py:14)" in diagnose(board.snapshot(), START + SECOND).sentence


def test_a_clock_behind_the_ranks_is_no_negative_wait(board):
    wait_in_barrier(board, 0, after=9)
    assert at(board, 1).kind == "well"


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([2], "rank 2"),
        ([3, 1], "ranks 1 and 3"),
        ([0, 1], "ranks 0 and 1"),
        ([1, 2, 3], "ranks 1 to 3"),
        ([9, 0, 2, 3, 4, 5], "ranks 0, 2 to 5 and 9"),
        (range(0, 40, 2), "ranks 0, 2, 4, 6, 8, 10 and 14 more"),
        (range(512), "ranks 0 to 511"),
    ],
)
def test_ranks_are_named_shortly(ranks, said):
    assert name_ranks(ranks) == said


def test_findings_can_be_asked_alone(board):
    world = World(tuple(board.snapshot()), START, {})
    assert [finding(world) for finding in FINDINGS if finding(world) is not None] == [at(board)]


# What was seen of the processes

USERS = StackFrame(CELL, 9, "train")


def seen(board: Board, seconds: float, **observed: Observed) -> Verdict:
    now = START + round(seconds * SECOND)
    return diagnose(board.snapshot(), now, CELLS, {int(rank[1:]): each for rank, each in observed.items()})


def test_a_late_rank_that_sleeps_is_blocked_and_its_line_is_named(board):
    wait_in_barrier(board, 0, 1, 3)
    verdict = seen(board, 3, r2=Observed(2, "sleeping", stack=(USERS,)))
    assert verdict == Verdict(
        "blocked", "rank 2 is 3.0 s late for barrier #7 (In[5], line 14); it is blocked at In[5], line 9", (2,)
    )
    assert verdict.lines == ("In[5], line 14", "In[5], line 9")
    assert verdict.alarming
    verdict = seen(board, 3, r2=Observed(2, "running", stack=(USERS,)))
    assert verdict == Verdict(
        "late", "rank 2 is 3.0 s late for barrier #7 (In[5], line 14); it is computing at In[5], line 9", (2,)
    )
    assert not verdict.alarming
    assert seen(board, 3, r2=Observed(2, "sleeping")).sentence.endswith("; it is asleep")


@pytest.mark.parametrize(
    ("above", "what"),
    [
        ([("/lib/python3.11/threading.py", "wait"), ("/lib/python3.11/queue.py", "get")], "a queue"),
        ([("/lib/python3.11/threading.py", "wait")], "a lock"),
        ([("/lib/python3.11/threading.py", "_wait_for_tstate_lock")], "a thread"),
        ([("/lib/python3.11/selectors.py", "select"), ("/lib/python3.11/subprocess.py", "run")], "another process"),
        (
            [
                ("/lib/python3.11/queue.py", "get"),
                ("/lib/python3.11/site-packages/torch/utils/data/dataloader.py", "__next__"),
            ],
            "the data loader",
        ),
    ],
)
def test_what_a_rank_waits_for_is_told_from_its_innermost_frames(board, above, what):
    wait_in_barrier(board, 0, 1, 3)
    library = tuple(StackFrame(file.replace("/lib/python3.11", LIBRARY), 7, name) for file, name in above)
    verdict = seen(board, 3, r2=Observed(2, "sleeping", stack=(*library, USERS)))
    assert verdict.sentence.endswith(f"; it is blocked, waiting for {what}, at In[5], line 9")


def test_a_rank_stopped_by_a_signal_is_halted_and_tells_nothing_of_its_operation(board):
    wait_in_barrier(board, 0, 1, 3)
    verdict = seen(board, 3, r2=Observed(2, "stopped"))
    assert verdict == Verdict(
        "halted",
        "rank 2 is stopped by a signal, such as SIGSTOP; SIGCONT continues; "
        "ranks 0, 1 and 3 wait in barrier #7 (In[5], line 14)",
        (2,),
    )
    board.slot(2).write_phase(Phase.FINISHED, START)
    assert seen(board, 3, r2=Observed(2, "stopped")).kind == "missing"


def test_a_rank_whose_process_has_gone_has_died(board):
    wait_in_barrier(board, 0, 1, 3)
    verdict = seen(board, 3, r2=Observed(2, "gone"))
    assert (verdict.kind, verdict.ranks) == ("missing", (2,))
    assert verdict.sentence.endswith("but rank 2 has died without it")


def test_a_rank_that_could_run_and_gets_no_processor_is_starved(board):
    wait_in_barrier(board, 0, 1, 3)
    board.slot(2).write(heartbeat=START - SECOND)
    starved = Observed(2, "running", stack=(USERS,), cpu_used=0.01, cpu_window=5.0)
    assert seen(board, 3, r2=starved) == Verdict(
        "starved", "rank 2 could run but gets no processor; last heard of 4.0 s ago", (2,)
    )
    assert seen(board, 3, r2=replace(starved, cpu_used=1.0)).kind == "late"
    assert seen(board, 3, r2=replace(starved, cpu_window=0.0)).kind == "late"
    assert seen(board, 3, r0=replace(starved, rank=0)).kind == "late"


def test_a_rank_that_does_not_reach_the_store_is_lost(board):
    for rank in (0, 1, 3):
        wait_in(board, rank, "init_process_group", 1, 3)
    connecting = StackFrame("/x/site-packages/torch/distributed/rendezvous.py", 189, "_create_c10d_store")
    verdict = seen(board, 3, r2=Observed(2, "sleeping", stack=(connecting, USERS)))
    assert (verdict.kind, verdict.ranks) == ("lost", (2,))
    assert verdict.sentence.endswith("; ranks 0, 1 and 3 wait in init_process_group (In[5], line 3)")
    assert seen(board, 0.5, r2=Observed(2, "sleeping", stack=(connecting, USERS))).kind != "lost"


# Groups and pairs


def wait_in_part(board: Board, rank: int, name: str, group: str, sequence: int = 1, line: int = 4, **more) -> None:
    board.slot(rank).open_collective(0, START, CELL, line, name, 8, True, members=group, sequence=sequence, **more)


def test_a_group_entered_with_different_collectives_or_sizes(board):
    wait_in_part(board, 0, "all_reduce", "0,2")
    wait_in_part(board, 2, "all_gather", "0,2", line=8)
    assert at(board, 2) == Verdict(
        "mismatch",
        "different collectives meet: rank 0 in all_reduce of ranks 0 and 2 (In[5], line 4), "
        "rank 2 in all_gather of ranks 0 and 2 (In[5], line 8)",
        (0, 2),
    )
    wait_in_part(board, 0, "all_reduce", "0,2", shape="2 float32")
    wait_in_part(board, 2, "all_reduce", "0,2", shape="2 int32")
    assert at(board, 2).sentence.startswith("different dtypes meet: rank 0 in all_reduce of ranks 0 and 2")


def test_of_a_group_that_is_not_complete_or_not_fully_known_nothing_is_said(board):
    wait_in_part(board, 0, "all_reduce", "0,2")
    wait_in_part(board, 2, "all_reduce", "0,2", sequence=2)
    assert at(board, 2).kind == "well"
    wait_in_part(board, 2, "all_gather", "0,1,...")
    wait_in_part(board, 0, "all_reduce", "0,1,...")
    assert at(board, 2).kind == "well"
    wait_in_part(board, 0, "all_reduce", "0,2")
    wait_in_part(board, 2, "all_reduce", "1,2")
    board.slot(2).write(pending_count=1)  # it may have issued the other
    assert at(board, 2).kind != "order"


def test_who_has_handles_open_may_have_sent_already(board):
    for rank in (0, 1):
        wait_in_part(board, rank, "recv", "", peer=1 - rank)
    assert at(board, 2).kind == "deadlock"
    board.slot(1).write(pending_count=1)
    assert at(board, 2).kind == "well"


def test_a_member_that_is_in_its_own_code_is_late_for_its_group(board):
    wait_in_part(board, 0, "all_reduce", "0,2")
    assert at(board, 2) == Verdict(
        "late", "rank 2 is 2.0 s late for all_reduce of ranks 0 and 2 (In[5], line 4); it is running", (2,)
    )
    board.slot(2).write_phase(Phase.FINISHED, START)
    assert at(board, 2) == Verdict(
        "missing",
        "rank 0 waits in all_reduce of ranks 0 and 2 (In[5], line 4), but rank 2 has finished without it",
        (2,),
    )


def test_an_operation_that_some_may_leave_early_proves_nothing(board):
    wait_in_part(board, 0, "broadcast", "0,2")
    board.slot(2).write_phase(Phase.FINISHED, START)
    assert at(board, 2).kind == "well"


# What torch issues by itself


def in_backward(board: Board, rank: int, sequence: int = 5, step: int = 3, name: str = "all_reduce"):
    return replace(
        board.slot(rank).snapshot(),
        step=step,
        native_name=name,
        native_sequence=sequence,
        native_since=START + SECOND,
    )


def test_a_rank_in_ddps_own_all_reduce_waits_for_the_others(board):
    ranks = [in_backward(board, 0), in_backward(board, 1), *board.snapshot()[2:]]
    said = "ranks 2 and 3 are 4.0 s late for torch's own all_reduce; they are running"
    assert diagnose(ranks, START + 5 * SECOND, CELLS) == Verdict("late", said, (2, 3))
    assert diagnose([in_backward(board, rank) for rank in range(4)], START + 5 * SECOND, CELLS).kind == "well"
    wrote_since = replace(ranks[0], heartbeat=START + 4 * SECOND)
    assert diagnose([wrote_since, *board.snapshot()[1:]], START + 5 * SECOND, CELLS).kind == "well"


def test_uneven_batches_in_plain_ddp(board):
    finished = replace(board.slot(3).snapshot(), phase=Phase.FINISHED, phase_since=START, step=2)
    ranks = [in_backward(board, rank) for rank in range(3)]
    said = (
        "ranks 0 to 2 wait in torch's own all_reduce, but rank 3 has finished without it: "
        "uneven loops, 2 steps against 3"
    )
    assert diagnose([*ranks, finished], START + 5 * SECOND, CELLS) == Verdict("uneven", said, (3,))
    same = replace(finished, step=3)
    assert diagnose([*ranks, same], START + 5 * SECOND, CELLS).kind == "missing"


def test_ddps_own_all_reduce_meets_a_barrier(board):
    wait_in_barrier(board, 3, number=1)
    waits = in_backward(board, 3, step=2, name="barrier")
    ranks = [in_backward(board, rank) for rank in range(3)]
    verdict = diagnose([*ranks, waits], START + 5 * SECOND, CELLS)
    assert (verdict.kind, verdict.ranks) == ("uneven", (3,))
    assert verdict.sentence.endswith("rank 3 in barrier #1 (In[5], line 14) after 2 steps")
    other = in_backward(board, 3, sequence=4, name="barrier")
    assert diagnose([*ranks, other], START + 5 * SECOND, CELLS).kind != "mismatch"


# Evidence


def play_barriers(board: Board, count: int, last: int, line: int = 14, odd: int = 14) -> None:
    for number in range(1, count + 1):
        for rank in range(4):
            now = START + number * SECOND + (rank == last) * SECOND // 2
            board.slot(rank).open_barrier(number, now, CELL, odd if rank == last and number == count else line)
        for rank in range(4):
            board.slot(rank).close_barrier(number, Phase.RUNNING, START + number * SECOND + SECOND // 2)


def test_a_straggler_was_often_last(board):
    play_barriers(board, 5, last=2)
    wait_in_barrier(board, 0, 1, 3, number=6, after=10)
    assert at(board, 13).evidence == ("rank 2 was the last at 5 of the last 5 barriers, 0.50 s after the one before",)


def test_barriers_entered_from_different_lines_are_evidence(board):
    play_barriers(board, 2, last=2, odd=99)
    for rank in (0, 1, 3):
        board.slot(rank).write_phase(Phase.FINISHED, START + 4 * SECOND)
    wait_in_barrier(board, 2, number=3, after=4)
    assert at(board, 9).evidence == (
        "barrier #2 was entered from different lines: ranks 0, 1 and 3 from In[5], line 14, rank 2 from In[5], line 99",
    )


def test_uneven_loops_are_told_from_a_branch_by_their_steps(board):
    run_to(board, r0=5, r1=5, r2=5, r3=4)
    wait_in_barrier(board, 0, 1, 2, number=6)
    board.slot(3).write_phase(Phase.FINISHED, START)
    assert at(board) == Verdict(
        "uneven",
        "ranks 0 to 2 wait in barrier #6 (In[5], line 14), but rank 3 has finished without it: "
        "uneven loops, 4 steps against 5",
        (3,),
    )


def test_what_is_alarming():
    assert {"late", "well", "unknown", "starting", "finished", "failed", "stopped"}.isdisjoint(ALARMS)
    assert Verdict("deadlock", "").alarming
    assert not Verdict("late", "").alarming


@dataclass
class HealthyRun:
    """A run that is slow in every way a healthy one can be, played on a board at times of its own.

    ``pace[rank][i]`` is how long, in milliseconds, a rank takes before operation ``i`` and ``lag[rank][i]`` how long
    it takes to notice that the operation has ended.
    """

    program: list[str]
    pace: list[list[int]]
    lag: list[list[int]]
    events: list[tuple[int, int, str, int]] = field(default_factory=list)  # ms, rank, what, index

    def __post_init__(self) -> None:
        size = len(self.pace)
        clock = [0] * size
        for i, operation in enumerate(self.program):
            arrived = [clock[rank] + self.pace[rank][i] for rank in range(size)]
            for rank in range(size):
                together = max(arrived)
                # A root may go on before the others have come; the others of a reduce may go on before its root.
                goes_on = (operation == "broadcast" and rank == 0) or (operation == "reduce" and rank != 0)
                needs_root = operation == "broadcast" and rank != 0
                done = max(arrived[rank], arrived[0]) if needs_root else arrived[rank] if goes_on else together
                if operation in ("loader", "send"):
                    done = arrived[rank]
                clock[rank] = done + 1 + self.lag[rank][i]
                self.events += [(arrived[rank], rank, "enter", i), (clock[rank], rank, "leave", i)]
        self.events += [(clock[rank] + 5, rank, "finish", 0) for rank in range(size)]
        self.events.sort(key=lambda event: (event[0], event[2] == "enter"))

    @property
    def length(self) -> int:
        return self.events[-1][0]

    def play(self, board: Board, until: int, only: int) -> RankSnapshot:
        """What rank ``only`` has left on the board at a moment, in milliseconds."""
        slot = board.slot(only)
        slot.write_phase(Phase.RUNNING, START)
        barrier = collective = step = 0
        for moment, rank, what, i in self.events:
            if rank != only or moment > until:
                continue
            now, operation = START + moment * 1_000_000, self.program[i]
            if what == "finish":
                slot.write_phase(Phase.FINISHED, now)
            elif operation == "loader":
                step += what == "leave"
                slot.write(step=step)
                slot.write_phase(Phase.LOADER if what == "enter" else Phase.RUNNING, now)
            elif operation == "barrier" and what == "enter":
                barrier += 1
                slot.open_barrier(barrier, now, CELL, i)
            elif operation == "barrier":
                slot.close_barrier(barrier, Phase.RUNNING, now)
            elif what == "enter":
                collective += operation != "send"
                slot.open_collective(collective, now, CELL, i, operation, 8, operation == "send")
            else:
                slot.close_collective(Phase.RUNNING, now)
        return slot.snapshot()


@st.composite
def healthy_runs(draw) -> HealthyRun:
    program = draw(
        st.lists(
            st.sampled_from(["barrier", "all_reduce", "broadcast", "reduce", "loader", "send"]), min_size=1, max_size=8
        )
    )
    size = draw(st.integers(1, 4))
    slow = st.sampled_from([0, 1, 40, 600, 3_000, 20_000])
    short = st.sampled_from([0, 1, 200])
    row = {"min_size": len(program), "max_size": len(program)}
    return HealthyRun(
        program,
        draw(st.lists(st.lists(slow, **row), min_size=size, max_size=size)),
        draw(st.lists(st.lists(short, **row), min_size=size, max_size=size)),
    )


@settings(max_examples=150, deadline=None)
@given(healthy_runs(), st.data())
def test_a_slow_but_healthy_run_is_never_accused(run, data):
    size = len(run.pace)
    moment = data.draw(st.integers(0, run.length + 10))
    # Slots are read one after the other, and the kernel may take the time before, between or after.
    read_at = sorted(data.draw(st.lists(st.integers(0, 30), min_size=size, max_size=size)))
    now = START + (moment + data.draw(st.integers(0, 30))) * 1_000_000
    board = Board.create(size)
    snapshots = [run.play(board, moment + read_at[rank], rank) for rank in range(size)]
    board.close()
    verdict = diagnose(snapshots, now, CELLS)
    assert verdict.kind in {"well", "late", "finished"}, verdict
    assert bool(verdict.ranks) == (verdict.kind == "late")
    if verdict.kind == "late":
        reached = {s.rank: s.barrier + s.collective for s in snapshots}
        waiting = [s for s in snapshots if s.phase in (Phase.BARRIER, Phase.COLLECTIVE)]
        behind = {rank for rank in reached if reached[rank] < max(reached.values())}
        # One that is behind and waits itself may be named with those it waits for, or left out.
        assert behind - {s.rank for s in waiting} <= set(verdict.ranks) <= behind, verdict
        assert any(now - max(s.barrier_entered, s.collective_entered) >= SECOND // 2 for s in waiting)


def in_both_open(snapshots: list[RankSnapshot]) -> bool:
    return all(s.phase in (Phase.BARRIER, Phase.COLLECTIVE) and s.collective == 2 for s in snapshots)


def test_real_ranks_that_call_different_collectives(world):
    def mixed_up(rank, board):
        x = torch.ones(4)
        if rank == 0:
            dist.all_reduce(x)
        else:
            dist.all_gather([torch.ones(4), torch.ones(4)], x)

    world.start(mixed_up)
    snapshots = world.wait_until(in_both_open)
    verdict = diagnose(snapshots, max(s.collective_entered for s in snapshots) + 2 * SECOND)
    first = mixed_up.__code__.co_firstlineno
    assert verdict == Verdict(
        "mismatch",
        f"different collectives meet: rank 0 in all_reduce #2 (test_diagnosis.py:{first + 3}), "
        f"rank 1 in all_gather #2 (test_diagnosis.py:{first + 5})",
        (0, 1),
    )


def test_a_real_barrier_inside_a_one_rank_branch(world):
    def main_only(rank, board):
        if rank == 0:
            dist.barrier()

    world.start(main_only)
    snapshots = world.wait_until(lambda seen: seen[0].in_barrier and seen[1].phase is Phase.FINISHED)
    line = main_only.__code__.co_firstlineno + 2
    assert diagnose(snapshots, time.monotonic_ns()) == Verdict(
        "missing",
        f"rank 0 waits in barrier #1 (test_diagnosis.py:{line}), but rank 1 has finished without it",
        (1,),
    )


def test_a_real_late_rank_and_all_well_again(world):
    def one_is_late(rank, board):
        if rank == 1:
            board.slot(1).write_text(device="late")
            while board.slot(0).snapshot().device != "go":
                time.sleep(0.005)
        dist.barrier()

    world.start(one_is_late)
    snapshots = world.wait_until(lambda seen: seen[0].in_barrier and seen[1].device == "late")
    late = diagnose(snapshots, snapshots[0].barrier_entered + 3 * SECOND)
    line = one_is_late.__code__.co_firstlineno + 5
    assert late == Verdict(
        "late", f"rank 1 is 3.0 s late for barrier #1 (test_diagnosis.py:{line}); it is running", (1,)
    )
    world.board.slot(0).write_text(device="go")
    world.results()
    snapshots = world.wait_until(lambda seen: all(s.phase is Phase.FINISHED for s in seen))
    assert diagnose(snapshots, time.monotonic_ns()) == Verdict("finished", "both ranks finished")

from __future__ import annotations

import pytest

from nbstate.telemetry.board import Board, Phase
from nbstate.telemetry.diagnosis import diagnose
from nbstate.telemetry.hindsight import explain

CELL = "/tmp/ipykernel_1/99.py"
CELLS = {CELL: "In[5]"}
SECOND = 1_000_000_000
START = 1_000 * SECOND


@pytest.fixture
def board():
    made = Board.create(3)
    for rank in range(3):
        made.slot(rank).write_phase(Phase.RUNNING, START)
    yield made
    made.close()


def reduce(board: Board, rank: int, line: int, shape: str, nbytes: int, name: str = "all_reduce") -> None:
    board.slot(rank).open_collective(2, START, CELL, line, name, nbytes, False, shape)


def why(board: Board, seconds: float = 0.0) -> tuple[str, tuple[int, ...]] | None:
    verdict = explain(board.snapshot(), START + round(seconds * SECOND), CELLS)
    return None if verdict is None else (verdict.sentence, verdict.ranks)


def test_nothing_is_explained_where_all_do_the_same(board):
    assert why(board) is None
    for rank in range(3):
        reduce(board, rank, 7, "4 float32", 16)
    board.slot(1).write_phase(Phase.FAILED, START)
    assert why(board, 60) is None


def test_a_rank_that_failed_in_a_collective_counts_as_one_that_waits_there(board):
    reduce(board, 0, 7, "4 float32", 16)
    board.slot(1).open_collective(2, START, CELL, 9, "broadcast", 16, False, "4 float32")
    reduce(board, 2, 7, "4 float32", 16)
    board.slot(0).write_phase(Phase.FAILED, START)
    said = (
        "different collectives meet: ranks 0 and 2 in all_reduce #2 (In[5], line 7), "
        "rank 1 in broadcast #2 (In[5], line 9)"
    )
    assert why(board) == (said, (1,))


def test_an_older_failure_says_nothing_of_a_rank_that_went_on(board):
    board.slot(0).open_barrier(1, START, CELL, 3)
    board.slot(0).close_collective(Phase.RUNNING, START)
    board.slot(0).open_collective(1, START + 5, CELL, 4, "all_reduce", 16, False)
    board.slot(0).close_collective(Phase.RUNNING, START + 9)
    board.slot(0).write_phase(Phase.FAILED, START + 10)
    for rank in (1, 2):
        board.slot(rank).write_phase(Phase.FINISHED, START)
    assert why(board, 5) is None


def test_different_sizes_are_told_with_their_shapes(board):
    reduce(board, 0, 7, "4x8 float32", 128)
    reduce(board, 1, 7, "4x8 float32", 128)
    reduce(board, 2, 9, "5x8 float32", 160)
    said = (
        "different shapes meet: ranks 0 and 1 in all_reduce #2 (In[5], line 7) with 4x8 float32, "
        "rank 2 in all_reduce #2 (In[5], line 9) with 5x8 float32"
    )
    assert why(board) == (said, (2,))
    assert diagnose(board.snapshot(), START, CELLS).kind == "well"  # while ranks run they are given a second
    assert diagnose(board.snapshot(), START + 2 * SECOND, CELLS).sentence == said


def test_another_shape_of_the_same_size_is_no_fault_but_another_dtype_is(board):
    reduce(board, 0, 7, "4x8 float32", 128)
    reduce(board, 1, 7, "8x4 float32", 128)
    reduce(board, 2, 7, "32 float32", 128)
    assert why(board) is None
    reduce(board, 2, 7, "32 int32", 128)
    assert why(board)[1] == (2,)


def test_operations_whose_parts_may_differ_are_not_compared(board):
    for rank in range(3):
        reduce(board, rank, 7, f"{rank + 1} float32", 4 * rank + 4, "all_to_all_single")
    assert why(board) is None


def test_the_waiters_and_those_who_left_are_told_first(board):
    board.slot(0).open_barrier(1, START, CELL, 3)
    board.slot(0).write_phase(Phase.FAILED, START)
    board.slot(1).write_phase(Phase.FINISHED, START)
    board.slot(2).write(step=4)
    said = "rank 0 waits in barrier #1 (In[5], line 3), but rank 1 has finished without it; rank 2 is in step 4"
    assert why(board) == (said, (1,))


def test_who_waits_for_a_part_that_has_gone_is_explained(board):
    board.slot(0).open_collective(0, START, CELL, 3, "recv", 8, True, peer=1, sequence=1)
    board.slot(0).write_phase(Phase.FAILED, START)
    board.slot(1).write_phase(Phase.FINISHED, START)
    assert why(board) == ("rank 0 waits in recv from rank 1 (In[5], line 3), but rank 1 has finished without it", (1,))


def test_who_waits_for_each_other_is_explained(board):
    for rank in (0, 1):
        board.slot(rank).open_collective(0, START, CELL, 3, "recv", 8, True, peer=1 - rank, sequence=1)
        board.slot(rank).write_phase(Phase.FAILED, START)
    assert why(board)[1] == (0, 1)
    assert "wait for each other" in why(board)[0]

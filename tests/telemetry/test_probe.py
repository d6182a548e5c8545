from __future__ import annotations

import sys
import threading

import multiprocess
import pytest

from nbstate.telemetry import probe
from nbstate.telemetry.board import Board, Flag, Phase

GRADIENT = {
    "sync_gradients": True,
    "end_of_dataloader": True,
    "in_dataloader": False,
    "sync_with_dataloader": True,
    "adjust_scheduler": False,
    "num_steps": 4,
    "remainder": -1,
}


@pytest.fixture
def board():
    made = Board.create(1)
    probe.attach(made.slot(0))
    probe.phase(Phase.RUNNING)
    yield made
    probe.detach()
    made.close()


def line() -> int:
    return sys._getframe(1).f_lineno


def test_outside_a_launch_nothing_happens():
    assert not probe.attached()
    assert probe.enter("all_reduce", 8) is False
    assert probe.enter_barrier() is False
    probe.enter_loader()
    probe.leave()
    probe.step(True)
    probe.optimizer_step()
    probe.phase(Phase.RUNNING)
    probe.epoch(3)
    probe.device("cpu")
    probe.memory_source(lambda: (1, 2))
    probe.gradient(**GRADIENT)


def test_a_detached_probe_writes_nothing(board):
    probe.detach()
    before = board.snapshot()[0]
    probe.step(True)
    assert board.snapshot()[0] is before


def test_phase_and_device(board):
    probe.device("cuda:1")
    snapshot = board.snapshot()[0]
    assert (snapshot.phase, snapshot.device) == (Phase.RUNNING, "cuda:1")
    assert snapshot.phase_since == snapshot.heartbeat > 0


def test_a_collective_is_written_with_its_line(board):
    entered, at = probe.enter("all_reduce", 64), line()
    inside = board.snapshot()[0]
    probe.leave()
    after = board.snapshot()[0]
    assert entered is True
    assert inside.phase is Phase.COLLECTIVE
    assert inside.in_collective
    assert (inside.collective, inside.collective_name, inside.collective_bytes) == (1, "all_reduce", 64)
    assert (inside.collective_file, inside.collective_line) == (__file__[-200:], at)
    assert after.phase is Phase.RUNNING
    assert not after.in_collective
    assert after.collective_left >= after.collective_entered == inside.collective_entered


def test_only_operations_of_the_whole_world_are_numbered(board):
    for partial in (False, True, True, False):
        assert probe.enter("broadcast", partial=partial)
        assert board.snapshot()[0].collective_partial == partial
        probe.leave()
    assert board.snapshot()[0].collective == 2


def test_a_barrier_is_numbered_and_kept(board):
    for _ in range(2):
        entered, at = probe.enter_barrier(), line()
        inside = board.snapshot()[0]
        probe.leave()
        assert entered
    after = board.snapshot()[0]
    assert inside.phase is Phase.BARRIER
    assert inside.in_barrier
    assert (inside.barrier, inside.barrier_line, inside.barrier_file) == (2, at, __file__[-200:])
    assert inside.barriers[-1].left == 0
    assert not after.in_barrier
    assert [barrier.number for barrier in after.barriers] == [1, 2]
    assert after.barriers[-1].left == after.barrier_left >= after.barriers[-1].entered


@pytest.mark.parametrize("outer", [probe.enter_barrier, lambda: probe.enter("all_gather_object")])
def test_what_a_collective_calls_itself_is_not_counted(board, outer):
    assert outer()
    before = board.snapshot()[0]
    assert not probe.enter("all_gather")
    assert not probe.enter_barrier()
    assert board.snapshot()[0] is before
    probe.leave()
    assert board.snapshot()[0].phase is Phase.RUNNING


def test_leave_returns_to_the_phase_before(board):
    probe.enter_loader()
    assert board.snapshot()[0].phase is Phase.LOADER
    assert probe.enter("broadcast")
    assert board.snapshot()[0].phase is Phase.COLLECTIVE
    probe.leave()
    assert board.snapshot()[0].phase is Phase.LOADER
    probe.leave()
    assert board.snapshot()[0].phase is Phase.RUNNING
    probe.leave()
    assert board.snapshot()[0].phase is Phase.RUNNING


def test_what_raised_stays_readable(board):
    probe.enter_barrier()
    probe.leave(completed=False)
    probe.enter("reduce")
    probe.leave(completed=False)
    snapshot = board.snapshot()[0]
    assert snapshot.phase is Phase.RUNNING
    assert snapshot.in_barrier
    assert snapshot.in_collective
    assert snapshot.barriers[-1].left == 0


def test_a_new_phase_ends_what_was_open(board):
    probe.enter_loader()
    probe.phase(Phase.FINISHED)
    probe.leave()
    assert board.snapshot()[0].phase is Phase.FINISHED


def test_other_threads_are_not_the_rank(board):
    answers: list[bool] = []

    def elsewhere() -> None:
        answers.extend([probe.enter("send"), probe.enter_barrier()])
        probe.enter_loader()
        probe.leave()

    for entered, inside in ((probe.enter_barrier, Phase.BARRIER), (lambda: None, Phase.RUNNING)):
        entered()
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert board.snapshot()[0].phase is inside
        probe.leave()
    assert answers == [False] * 4
    assert board.snapshot()[0].barriers[-1].left > 0


def test_a_child_of_a_rank_does_not_write_for_it(board):
    def child() -> None:
        probe.step(True)
        probe.phase(Phase.FAILED)

    process = multiprocess.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert probe.attached()
    assert (board.snapshot()[0].step, board.snapshot()[0].phase) == (0, Phase.RUNNING)


def test_steps_and_their_flags(board):
    for sync in (False, True, False):
        probe.step(sync)
    snapshot = board.snapshot()[0]
    assert (snapshot.step, snapshot.sync_count, snapshot.sync_history) == (3, 3, 0b010)
    assert snapshot.flag(Flag.KNOWN)
    assert not snapshot.flag(Flag.SYNC_GRADIENTS)
    probe.step(True)
    assert board.snapshot()[0].flag(Flag.SYNC_GRADIENTS)


def test_the_history_holds_the_last_64_flags(board):
    for i in range(100):
        probe.step(i >= 90)
    snapshot = board.snapshot()[0]
    assert snapshot.sync_history == (1 << 10) - 1
    for _ in range(70):
        probe.step(True)
    assert board.snapshot()[0].sync_history == (1 << 64) - 1


def test_no_step_counts_twice(board):
    def steps() -> int:
        return board.snapshot()[0].step

    probe.step(True, source="optimizer")
    assert steps() == 1
    probe.step(True, source="ddp")
    probe.step(True, source="optimizer")
    assert steps() == 2
    probe.step(False, source="accumulate")
    probe.step(True, source="ddp")
    probe.step(True, source="optimizer")
    assert steps() == 3
    assert board.snapshot()[0].sync_history == 0b110


def test_the_gradient_state_is_written_whole(board):
    probe.gradient(**GRADIENT)
    probe.epoch(2)
    snapshot = board.snapshot()[0]
    set_flags = {flag for flag in Flag if snapshot.flag(flag)}
    assert set_flags == {Flag.KNOWN, Flag.SYNC_GRADIENTS, Flag.END_OF_DATALOADER, Flag.SYNC_WITH_DATALOADER}
    assert (snapshot.num_steps, snapshot.remainder, snapshot.epoch) == (4, -1, 2)
    probe.step(False)
    assert board.snapshot()[0].flag(Flag.END_OF_DATALOADER)


def test_optimizer_steps(board):
    for skipped in (False, True, False):
        probe.optimizer_step(skipped=skipped)
    snapshot = board.snapshot()[0]
    assert (snapshot.optimizer_steps, snapshot.skipped_steps) == (2, 1)


def test_memory_is_looked_at_now_and_then(board):
    looks = []
    probe.memory_source(lambda: looks.append(1) or (5, 10))
    for _ in range(1_000):
        probe.step(True)
    snapshot = board.snapshot()[0]
    assert (snapshot.memory_used, snapshot.memory_total) == (5, 10)
    assert 1 <= len(looks) < 500


def test_a_device_that_cannot_be_asked_does_not_end_the_step(board):
    looks = []

    def broken() -> tuple[int, int]:
        looks.append(1)
        raise RuntimeError("driver gone")

    probe.memory_source(broken)
    probe.step(True)
    probe.enter("reduce")
    probe.leave()
    assert len(looks) == 1
    assert board.snapshot()[0].step == 1

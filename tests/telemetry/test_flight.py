from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from nbstate.telemetry import flight, probe
from nbstate.telemetry.board import Board, Phase


def test_the_recorder_knows_what_no_public_function_saw(world):
    def train(rank, board):
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
        model(torch.ones(2, 3)).sum().backward()
        pair = dist.new_group([0, 1])
        before = time.monotonic_ns()
        dist.all_reduce(torch.ones(2, 5, dtype=torch.int64), group=pair)
        while flight.oldest_open() is not None:  # gloo wakes who waits before it puts the operation down as over
            time.sleep(0.001)
        gradients, mine = flight.last_operations()[-2:]
        assert len(flight.last_operations(1)) == 1
        assert before - 10**9 < mine.since < time.monotonic_ns() + 10**9
        return [(op.name, op.shape, op.group, op.over) for op in (gradients, mine)], mine.sequence

    expected = [("all_reduce", "4 float32", "", True), ("all_reduce", "2x5 int64", "0,1", True)]
    assert world.run(train) == [(expected, 1)] * 2


def test_a_gradient_reduction_that_hangs_is_named_and_gone_when_it_ends(world, tmp_path):
    go = tmp_path / "go"

    def train(rank, board):
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
        loss = model(torch.ones(2, 3)).sum()
        if rank == 1:
            while not go.exists():
                time.sleep(0.01)
        loss.backward()
        while board.snapshot()[rank].native_name:
            time.sleep(0.05)
        return board.snapshot()[rank].native_since

    world.start(train)
    waiting, late = world.wait_until(lambda snapshots: snapshots[0].native_name != "")
    assert (waiting.native_name, waiting.native_shape, waiting.native_group) == ("all_reduce", "4 float32", "")
    assert waiting.native_sequence > 0
    assert waiting.phase_since < waiting.native_since < time.monotonic_ns()
    assert not waiting.in_collective
    assert late.native_name == ""
    assert world.board.snapshot()[0] is waiting
    go.touch()
    assert world.results() == [0, 0]


def test_the_watch_begins_with_a_process_group_and_ends_with_the_probe(world):
    def live(rank, board):
        watch = flight._watching
        flight.watch()
        assert flight._watching is watch
        probe.detach()
        watch.join(30)
        assert not watch.is_alive()
        flight.watch()
        assert flight._watching is watch
        return watch.daemon

    assert world.run(live) == [True] * 2


def test_a_closed_board_ends_the_watch(tmp_path):
    board = Board.create(1)
    probe.attach(board.slot(0))
    try:
        flight.watch()
        watch = flight._watching
        board.close()
        watch.join(30)
        assert not watch.is_alive()
    finally:
        probe.detach()


def test_a_child_of_a_rank_does_not_watch(world):
    def live(rank, board):
        child = os.fork()
        if child == 0:
            flight.watch()
            os._exit(0 if probe.slot() is None and not flight._watching.is_alive() else 1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), board.snapshot()[rank].phase

    assert world.run(live) == [(0, Phase.RUNNING)] * 2

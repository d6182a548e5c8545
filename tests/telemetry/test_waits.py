from __future__ import annotations

import gc
import sys
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from nbstate.telemetry import collectives
from nbstate.telemetry.board import Phase
from nbstate.telemetry.handles import Handles
from nbstate.telemetry.slot import Issued

HERE = __file__[-200:]
BARE_ISEND, BARE_IRECV = dist.isend, dist.irecv


def line() -> int:
    return sys._getframe(1).f_lineno


def pending(snapshot):
    return snapshot.pending_count, snapshot.pending_name, snapshot.pending_line


def test_a_handle_is_pending_until_it_is_waited_for(world):
    def handles(rank, board):
        def now():
            return board.snapshot()[rank]

        x = torch.ones(4)
        first, at = dist.all_reduce(x, async_op=True), line()
        issued = now()
        second = dist.broadcast(x, 0, async_op=True)
        both = pending(now())
        second.wait()
        waited, wait_line = now(), line() - 1
        assert (waited.collective_name, waited.collective_line) == ("broadcast", wait_line)
        assert (waited.collective_sequence, waited.collective_place, waited.collective) == (3, 3, 3)
        one = pending(now())
        assert first.wait()
        last = now()
        assert (last.collective_name, last.collective_place, last.collective) == ("all_reduce", 2, 3)
        assert not last.in_collective
        assert last.phase is Phase.RUNNING
        assert (issued.pending_file, issued.pending_since) == (HERE, issued.collective_entered)
        return [pending(issued), both, one, pending(last)], at

    for seen, at in world.run(handles):
        assert seen == [(1, "all_reduce", at), (2, "all_reduce", at), (1, "all_reduce", at), (0, "", 0)]


def test_who_waits_for_a_handle_is_in_its_collective(world, tmp_path):
    go = tmp_path / "go"

    def handles(rank, board):
        group = dist.new_group([0, 1])
        if rank == 1:
            while not go.exists():
                time.sleep(0.01)
        handle = dist.all_reduce(torch.ones(4, 2), group=group, async_op=True)
        issue_line = line() - 1
        handle.wait()
        return issue_line, line() - 1

    world.start(handles)
    waiting = world.wait_until(lambda snapshots: snapshots[0].phase is Phase.COLLECTIVE and snapshots[0].pending_count)[
        0
    ]
    go.touch()
    issue_line, wait_line = world.results()[0]
    assert (waiting.collective_name, waiting.collective_line, waiting.in_collective) == ("all_reduce", wait_line, True)
    assert (waiting.collective_shape, waiting.collective_bytes) == ("4x2 float32", 32)
    assert (waiting.collective_group, waiting.collective_sequence, waiting.collective_partial) == ("0,1", 1, 1)
    assert pending(waiting) == (1, "all_reduce", issue_line)


def test_sends_and_receives_name_the_other_side(world):
    def exchange(rank, board):
        seen = []

        def note(_=None):
            now = board.snapshot()[rank]
            seen.append((now.collective_name, now.collective_peer, now.collective_sequence, now.collective_group))

        x, other = torch.ones(4), 2 - rank
        group = dist.new_group([0, 2])
        note()
        if rank == 1:
            return seen
        if rank == 0:
            note(dist.send(x, 2))
            note(dist.send(x, group_dst=1, group=group))
            handle = dist.isend(x, dst=2)
            note()
            handle.wait()
            note(dist.send_object_list([1], 2))
        else:
            note(dist.recv(x, 0))
            note(dist.recv(x, group_src=0, group=group))
            handle = dist.irecv(x)
            note()
            handle.wait()
            note(dist.recv_object_list([None], 0))
        peer = (dist.isend, BARE_IRECV) if rank == 0 else (dist.irecv, BARE_ISEND)
        works = dist.batch_isend_irecv([dist.P2POp(op, x, other) for op in peer])
        note()
        count = board.snapshot()[rank].pending_count
        for work in works:
            work.wait()
            note()
        assert count == 2
        assert board.snapshot()[rank].pending_count == 0
        return seen

    sender, outsider, receiver = world.run(exchange, size=3)
    assert outsider == [("new_group", -1, 2, "")]
    assert sender[1:] == [
        ("send", 2, 1, ""),
        ("send", 2, 1, "0,2"),
        ("isend", 2, 2, ""),
        ("send_object_list", 2, 3, ""),
        ("batch_isend_irecv", 2, 0, ""),
        ("isend", 2, 4, ""),
        ("irecv", 2, 1, ""),
    ]
    assert receiver[1:] == [
        ("recv", 0, 1, ""),
        ("recv", 0, 1, "0,2"),
        ("irecv", -1, 1, ""),
        ("recv_object_list", 0, 2, ""),
        ("batch_isend_irecv", 0, 0, ""),
        ("irecv", 0, 3, ""),
        ("isend", 0, 1, ""),
    ]


def test_a_handle_that_nobody_waits_for_is_forgotten(world):
    def careless(rank, board):
        def count():
            dist.barrier()
            return board.snapshot()[rank].pending_count

        x, counts = torch.ones(4), []
        for _ in range(3):
            dist.all_reduce(x, async_op=True)
        counts.append(count())
        handle = dist.all_reduce(x, async_op=True)
        watch = weakref.ref(handle)
        counts.append(count())
        while not handle.is_completed():
            time.sleep(0.001)
        counts.append(count())
        future = dist.all_reduce(x, async_op=True).get_future()
        counts.append(count())
        assert future.wait()
        handle = dist.barrier(async_op=True)
        counts.append((board.snapshot()[rank].pending_name, count()))
        handle.wait()
        last = board.snapshot()[rank]
        assert (last.collective_name, last.collective_place) == ("barrier", last.barrier + last.collective - 1)
        del handle
        gc.collect()
        counts.append(count())
        return counts, watch() is None

    assert world.run(careless) == [([0, 1, 0, 0, ("barrier", 1), 0], True)] * 2


def test_a_handle_is_what_torch_made_of_it(world):
    def same(rank, board):
        handle = dist.all_reduce(torch.ones(4), async_op=True)
        assert type(handle) is dist.Work
        wait = dist.Work.wait
        collectives.uninstall()
        assert dist.Work.wait is wait.__wrapped__
        return handle.wait()

    assert world.run(same) == [True] * 2


def test_a_wait_that_fails_is_still_pending_and_raises_the_same(world):
    def fail(rank, board):
        from datetime import timedelta

        if rank == 1:
            return None
        handle = dist.irecv(torch.ones(1), 1)
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            handle.wait(timedelta(milliseconds=50))
        now = board.snapshot()[rank]
        return now.phase, now.in_collective, now.pending_count, now.collective_name

    assert world.run(fail)[0] == (Phase.RUNNING, True, 1, "irecv")


def test_an_unknown_handle_is_a_wait_without_a_name(world, tmp_path):
    go = tmp_path / "go"

    def unknown(rank, board):
        options = dist.AllreduceOptions()
        options.asyncOp = True
        if rank == 1:
            while not go.exists():
                time.sleep(0.01)
        handle = dist.group.WORLD.allreduce([torch.ones(2)], options)
        handle.wait()
        before = board.snapshot()[rank]
        handle.wait()
        return board.snapshot()[rank] == before, before.collective

    world.start(unknown)
    waiting = world.wait_until(lambda snapshots: snapshots[0].collective_name == "wait")[0]
    assert (waiting.phase, waiting.in_collective, waiting.collective_partial) == (Phase.COLLECTIVE, True, 1)
    go.touch()
    assert world.results() == [(True, 1)] * 2


def test_another_threads_handles_are_not_the_ranks(world):
    def elsewhere(rank, board):
        before = board.snapshot()[rank]
        seen = []

        def other():
            handle = dist.all_reduce(torch.ones(2), async_op=True)
            seen.append(handle.wait())

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return seen, board.snapshot()[rank] == before

    assert world.run(elsewhere) == [([True], True)] * 2


def test_a_dropped_handle_is_not_taken_for_the_next_at_its_place():
    class Work:
        __slots__ = ("__weakref__",)

    def issued(number):
        return Issued(b"", number, number, "a.py", "all_reduce", "", "")

    handles = Handles()
    for number in range(1_000):
        work = Work()
        handles.add(work, issued(number))
        assert handles.get(work).line == handles.oldest().line == number
        assert len(handles) == 1
        del work
    kept = [Work() for _ in range(5)]
    for number, work in enumerate(kept):
        handles.add(work, issued(number))
    assert handles.remove(kept[0])
    assert not handles.remove(kept[0])
    assert handles.oldest().line == 1
    kept.clear()
    del work
    assert len(handles) == 4
    handles.forget_dropped()
    assert (len(handles), handles.oldest()) == (0, None)


def test_what_is_no_send_is_refused_as_before():
    collectives.install()
    try:
        with pytest.raises(ValueError, match="Invalid ``op``"):
            dist.P2POp(print, torch.ones(1), 0)
    finally:
        collectives.uninstall()
    assert distributed_c10d._check_op(dist.isend) is None
    assert dist.isend is BARE_ISEND

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import multiprocess
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.optim.optimizer import _global_optimizer_post_hooks

from nbstate.telemetry import calls, collectives, probe
from nbstate.telemetry.board import Flag, Phase

HERE = __file__[-200:]


def line() -> int:
    return sys._getframe(1).f_lineno


@pytest.fixture
def instrumented():
    collectives.install()
    yield
    collectives.uninstall()


def test_every_operation_is_written_with_name_bytes_and_line(world):
    def operations(rank, board):
        wrong, names = [], []

        def note(at, name, nbytes, *_):
            seen = board.snapshot()[rank]
            names.append(name)
            found = (seen.collective_name, seen.collective_bytes, seen.collective_line, seen.collective_file)
            if found != (name, nbytes, at, HERE) or seen.phase is not Phase.RUNNING or seen.in_collective:
                wrong.append((name, nbytes, at, seen))

        x, y, pair = torch.ones(4), torch.zeros(4), [torch.zeros(4), torch.zeros(4)]
        long, other = torch.zeros(8), 1 - rank
        peer = dist.isend if rank == 0 else dist.irecv
        objects = [None, None]
        note(line(), "all_reduce", 16, dist.all_reduce(x))
        note(line(), "all_reduce", 16, dist.all_reduce(tensor=x, op=dist.ReduceOp.MAX))
        note(line(), "reduce", 16, dist.reduce(x, 0))
        note(line(), "broadcast", 16, dist.broadcast(x, src=0))
        note(line(), "all_gather", 16, dist.all_gather(pair, x))
        note(line(), "all_gather_into_tensor", 16, dist.all_gather_into_tensor(long, x))
        note(line(), "gather", 16, dist.gather(x, pair if rank == 0 else None, dst=0))
        note(line(), "scatter", 16, dist.scatter(y, pair if rank == 0 else None, src=0))
        note(line(), "reduce_scatter", 32, dist.reduce_scatter(y, pair))
        note(line(), "reduce_scatter_tensor", 32, dist.reduce_scatter_tensor(y, long))
        note(line(), "all_to_all_single", 16, dist.all_to_all_single(y, x))
        note(line(), "broadcast_object_list", 0, dist.broadcast_object_list(objects, src=0))
        note(line(), "all_gather_object", 0, dist.all_gather_object(objects, rank))
        note(line(), "gather_object", 0, dist.gather_object(rank, objects if rank == 0 else None, dst=0))
        note(line(), "scatter_object_list", 0, dist.scatter_object_list([None], objects if rank == 0 else None, src=0))
        numbered = board.snapshot()[rank].collective
        if rank == 0:
            note(line(), "send", 16, dist.send(x, 1))
        else:
            note(line(), "recv", 16, dist.recv(x, 0))
        works = []
        note(line(), "batch_isend_irecv", 16, works.extend(dist.batch_isend_irecv([dist.P2POp(peer, x, other)])))
        note(line(), peer.__name__, 16, works[0].wait())
        works = [peer(x, other)]
        note(line() - 1, peer.__name__, 16)
        note(line(), peer.__name__, 16, works[0].wait())
        handle = dist.all_reduce(x, async_op=True)
        seen = board.snapshot()[rank]
        handle.wait()
        return wrong, len(names), numbered, (seen.in_collective, seen.collective, objects)

    for rank, (wrong, count, numbered, last) in enumerate(world.run(operations)):
        assert wrong == []
        assert count == 20
        assert numbered == 16  # init_process_group and the fifteen that concern the whole world
        assert last[:2] == (False, 17)
        if rank == 0:
            assert last[2] == [0, 1]


def test_barriers_of_the_world_are_numbered(world):
    def barriers(rank, board):
        all_of_them = dist.new_group([0, 1])
        dist.barrier()
        lines = [(line(), dist.barrier(group=dist.group.WORLD))[0]]
        dist.monitored_barrier()
        dist.barrier(all_of_them)
        lines.append(line() - 1)
        return board.snapshot()[rank], lines

    for snapshot, (whole, partial) in world.run(barriers):
        assert snapshot.barrier == 3
        assert [barrier.number for barrier in snapshot.barriers] == [1, 2, 3]
        assert snapshot.barriers[1].line == whole
        assert all(barrier.left >= barrier.entered for barrier in snapshot.barriers)
        assert (snapshot.collective_name, snapshot.collective_partial) == ("barrier", 1)
        assert (snapshot.collective, snapshot.collective_line) == (2, partial)  # init_process_group and new_group


def test_collectives_of_a_smaller_group_are_not_numbered(world):
    def in_groups(rank, board):
        mine, theirs = dist.new_group([0]), dist.new_group([1])
        x, group = torch.ones(4), mine if rank == 0 else theirs
        seen = []
        dist.all_reduce(x, group=group)
        seen.append(board.snapshot()[rank])
        dist.all_gather([torch.zeros(4)], x, group)
        seen.append(board.snapshot()[rank])
        dist.all_reduce(x, group=dist.group.WORLD)
        seen.append(board.snapshot()[rank])
        return [(s.collective_name, s.collective, s.collective_partial) for s in seen]

    assert world.run(in_groups) == [[("all_reduce", 3, 1), ("all_gather", 3, 1), ("all_reduce", 4, 0)]] * 2


def test_what_a_rank_puts_in_is_written_as_a_shape(world):
    def shapes(rank, board):
        seen = []

        def note(*_):
            seen.append(board.snapshot()[rank].collective_shape)

        note(dist.all_reduce(torch.ones(4, 8)))
        note(dist.all_reduce(torch.ones(4, 8)))
        note(dist.all_reduce(torch.tensor(1)))
        note(dist.broadcast(torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)).data, src=0))
        note(dist.reduce_scatter(torch.ones(2, 3), [torch.ones(2, 3), torch.ones(2, 3)]))
        note(dist.all_gather_object([None, None], rank))
        note(dist.all_reduce(torch.ones(4, 8)))
        return seen

    expected = ["4x8 float32"] * 2 + ["scalar int64", "2 bfloat16", "2 of 2x3 float32", "", "4x8 float32"]
    assert world.run(shapes) == [expected] * 2


def test_init_process_group_is_seen(world):
    def nothing(rank, board):
        return board.snapshot()[rank].collective_name

    assert world.run(nothing) == ["init_process_group"] * 2


def test_an_operation_that_raises_is_left_and_raises_the_same(world):
    def fail(rank, board):
        with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
            dist.all_reduce(torch.ones(1), nonsense=1)
        first = board.snapshot()[rank]
        with pytest.raises(RuntimeError, match="invalid root rank: 7"):
            dist.broadcast(torch.ones(2, 3), src=7)
        return first, board.snapshot()[rank]

    for first, second in world.run(fail):
        assert (first.collective_name, second.collective_name) == ("all_reduce", "broadcast")
        for snapshot in (first, second):
            assert snapshot.phase is Phase.RUNNING
            assert snapshot.in_collective


def test_payloads_without_a_size_count_nothing(world):
    def strange(rank, board):
        sparse = torch.sparse_coo_tensor([[0]], [1.0], (3,), check_invariants=False)
        dist.all_reduce(sparse)
        size = board.snapshot()[rank].collective_bytes
        with pytest.raises(TypeError):
            dist.all_reduce(None)
        with pytest.raises(TypeError):
            dist.all_gather([3], "text")
        return size, board.snapshot()[rank].collective_bytes, sparse.to_dense().tolist()

    assert world.run(strange) == [(0, 0, [2.0, 0.0, 0.0])] * 2


def test_plain_ddp_shows_steps_and_sync_flags(world):
    def train(rank, board):
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(1, 7):
            if step % 3:
                with model.no_sync():
                    model(torch.ones(2, 3)).sum().backward()
            else:
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        model(torch.ones(2, 3))
        trained = board.snapshot()[rank]
        model.eval()
        model(torch.ones(2, 3))
        model.train()
        with torch.no_grad():
            model(torch.ones(2, 3))
        return trained, board.snapshot()[rank].step

    for trained, step_after_evaluation in world.run(train):
        assert trained.step == 7
        assert trained.sync_history == 0b0010011
        assert trained.flag(Flag.SYNC_GRADIENTS)
        assert trained.optimizer_steps == 2
        assert step_after_evaluation == 7


def test_without_ddp_the_optimizer_counts(world):
    def train(rank, board):
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.Adam([weight], lr=0.1)
        for _ in range(3):
            weight.sum().backward()
            dist.all_reduce(weight.grad)
            optimizer.step()
        return board.snapshot()[rank]

    for snapshot in world.run(train):
        assert (snapshot.step, snapshot.optimizer_steps, snapshot.sync_history) == (3, 3, 0b111)


def test_a_name_imported_after_install_is_instrumented(world):
    def imported(rank, board):
        from torch.distributed import barrier
        from torch.distributed.distributed_c10d import all_reduce

        barrier()
        all_reduce(torch.ones(1))
        return board.snapshot()[rank].barrier, board.snapshot()[rank].collective_name

    assert world.run(imported) == [(1, "all_reduce")] * 2


def _places() -> dict[str, object]:
    names = calls.NAMES
    places = {f"{m.__name__}.{n}": getattr(m, n, None) for m in (dist, distributed_c10d) for n in names}
    places["ddp"] = torch.nn.parallel.DistributedDataParallel.forward
    places["hooks"] = tuple(_global_optimizer_post_hooks)
    return places


def test_uninstall_puts_everything_back():
    before = _places()
    collectives.uninstall()
    collectives.install()
    between = _places()
    collectives.install()
    assert _places() == between
    assert collectives.installed()
    changed = {name for name in before if before[name] is not None and between[name] is not before[name]}
    assert changed == {name for name in before if before[name] is not None}
    collectives.uninstall()
    collectives.uninstall()
    assert _places() == before
    assert not collectives.installed()


def test_a_place_taken_by_someone_else_is_left_to_them():
    bare = dist.barrier
    collectives.install()

    def theirs() -> None: ...

    dist.barrier = theirs
    try:
        collectives.uninstall()
        assert dist.barrier is theirs
        assert distributed_c10d.barrier is bare
    finally:
        dist.barrier = bare


def test_wrappers_look_and_pickle_like_the_bare_functions(instrumented):
    assert dist.all_reduce.__name__ == "all_reduce"
    assert dist.all_reduce.__doc__ == dist.all_reduce.__wrapped__.__doc__
    assert dist.all_reduce is distributed_c10d.all_reduce
    data = pickle.dumps([dist.all_reduce, dist.barrier])
    assert pickle.loads(data) == [dist.all_reduce, dist.barrier]
    collectives.uninstall()
    assert pickle.loads(data) == [dist.all_reduce, dist.barrier]


def test_without_a_probe_the_functions_work_as_before(world):
    def unseen(rank, board):
        probe.detach()
        x = torch.full((2,), float(rank))
        dist.all_reduce(x)
        dist.barrier()
        return x.tolist(), board.snapshot()[rank].collective

    assert world.run(unseen) == [([1.0, 1.0], 1)] * 2


COMPILE = """
import sys, tempfile, warnings
import torch, torch.distributed as dist
from nbstate.telemetry import calls, collectives, probe
from nbstate.telemetry.board import Board, Phase

def prepare():
    collectives.install()
    board = Board.create(1)
    probe.attach(board.slot(0))
    probe.phase(Phase.RUNNING)

def traced(x):
    y = x * 2
    dist.all_reduce(y, op=dist.ReduceOp.MAX)
    return y + 1

def broken_in_two(x):
    y = x * 2
    dist.barrier()
    dist.broadcast(y, 0)
    return y + 1

warnings.simplefilter("ignore")
if sys.argv[1] == "first":
    prepare()
import torch._dynamo
import torch.distributed._functional_collectives as functional
if sys.argv[1] == "last":
    prepare()
with tempfile.TemporaryDirectory() as folder:
    store = dist.FileStore(folder + "/store", 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    ones, threes = torch.ones(3), [3.0, 3.0, 3.0]
    assert torch.compile(traced, backend="eager", fullgraph=True)(ones).tolist() == threes
    assert torch.compile(broken_in_two, backend="eager")(ones).tolist() == threes
    assert functional.all_reduce(ones, "sum", dist.group.WORLD).tolist() == [1.0] * 3
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.compile(model, backend="eager")(ones).sum().backward()
    optimizer.step()
    collectives.uninstall()
    torch._dynamo.reset()
    assert torch.compile(traced, backend="eager", fullgraph=True)(ones).tolist() == threes
    table = functional.traceable_collective_remaps
    assert dist.all_reduce in table
    assert not any("nbstate" in function.__code__.co_filename for function in table)
    dist.destroy_process_group()
print("compiled")
"""


def test_torch_compile_traces_as_before():
    def compiled():
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        sys.argv[1:] = ["last"]
        exec(COMPILE, {})

    # Dynamo is imported here, so a fork instruments last.
    process = multiprocess.get_context("fork").Process(target=compiled)
    process.start()
    process.join(100)
    process.kill()
    process.join()
    assert process.exitcode == 0


def test_torch_compile_traces_as_before_where_it_is_imported_after_us():
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, "first"],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment,
        check=False,
    )
    assert done.stdout == "compiled\n", done.stderr

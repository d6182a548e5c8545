"""The states in real ranks: forked processes with the launch variables set, over gloo."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import pickle
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, values
from torch.utils.data import DataLoader, Dataset

from nbstate.errors import ArgumentValueError, MainProcessFailedError, MissingRankError, StateConflictError
from nbstate.state import (
    AcceleratorState,
    DistributedType,
    GradientState,
    InitProcessGroupKwargs,
    ParallelismConfig,
    PartialState,
    reset_inherited,
)
from nbstate.telemetry import probe
from nbstate.telemetry.board import Board


def world():
    state = PartialState()
    return state.process_index, state.local_process_index, state.num_processes, state.backend, state.distributed_type


def total(number):
    tensor = torch.tensor([float(number)])
    dist.all_reduce(tensor)
    return int(tensor)


def two_servers(rank):
    """Launch variables of four ranks on two machines of two."""
    return {"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"}


def test_a_cpu_launch_is_one_world_without_asking_for_the_cpu():
    def function(rank):
        return world(), total(rank), PartialState().device.type, PartialState().fork_launched

    for rank, (place, summed, device, forked) in enumerate(values(run_ranks(function, 3))):
        assert place == (rank, rank, 3, "gloo", DistributedType.MULTI_CPU)
        assert (summed, device, forked) == (3, "cpu", True)


def test_the_second_instance_makes_no_second_group():
    def function(rank):
        first, group = PartialState(), dist.group.WORLD
        again = PartialState(), AcceleratorState(), PartialState()
        return first == again[0] == again[2] and dist.group.WORLD is group

    assert values(run_ranks(function, 2)) == [True, True]


def test_attributes_of_the_main_and_the_last_rank_on_two_servers():
    def function(rank):
        state = PartialState()
        return state.is_main_process, state.is_local_main_process, state.is_last_process, state.local_process_index

    assert values(run_ranks(function, 4, per_rank=two_servers)) == [
        (True, True, False, 0),
        (False, False, False, 1),
        (False, True, False, 0),
        (False, False, True, 1),
    ]


def test_a_state_built_before_the_fork_answers_for_the_rank():
    kernels = PartialState(cpu=True), AcceleratorState(mixed_precision="fp16"), GradientState()
    assert kernels[0].num_processes == 1

    def function(rank):
        partial, accelerator, gradient = kernels
        shown = repr(partial), repr(accelerator)
        # The instances of the kernel's cell are read first: they, too, must build the rank's own state.
        return partial.process_index, accelerator.num_processes, accelerator.mixed_precision, gradient.num_steps, shown

    outcomes = values(run_ranks(function, 2, env={"ACCELERATE_MIXED_PRECISION": "bf16"}))
    unbuilt = ("PartialState(not built)", "AcceleratorState(not built)")
    assert outcomes == [(0, 2, "bf16", 1, unbuilt), (1, 2, "bf16", 1, unbuilt)]
    assert kernels[0].num_processes == 1
    assert kernels[1].mixed_precision == "fp16"


def test_a_state_that_arrives_by_pickle_answers_for_the_rank():
    packed = pickle.dumps((PartialState(cpu=True), GradientState()))

    def function(rank):
        PartialState._inherited = GradientState._inherited = False
        partial, gradient = pickle.loads(packed)
        return partial.process_index, partial.num_processes, gradient.sync_gradients

    assert values(run_ranks(function, 2)) == [(0, 2, True), (1, 2, True)]


def test_a_process_group_of_the_kernel_is_forgotten_and_lives_on(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        state = PartialState(cpu=True)
        assert state.distributed_type is DistributedType.NO

        def function(rank):
            return world()[:3], total(1)

        assert values(run_ranks(function, 2)) == [((0, 0, 2), 2), ((1, 1, 2), 2)]
        assert total(5) == 5
        PartialState.reset()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_more_ranks_than_devices_in_a_launch_leaves_nothing_behind(monkeypatch):
    """FakeCuda: one device, which two ranks ask for."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)

    def function(rank):
        with pytest.raises(ArgumentValueError, match="2 ranks on this machine, but 1 cuda device;"):
            PartialState()
        clean = not PartialState._shared_state and not dist.is_initialized()
        state = PartialState(cpu=True)
        return clean, state.num_processes, str(state.device), total(1)

    assert values(run_ranks(function, 2, env={"NBSTATE_DEVICE": ""})) == [(True, 2, "cpu", 2)] * 2


def test_a_group_that_cannot_be_made_leaves_nothing_behind():
    def function(rank):
        with pytest.raises(Exception, match=r"(?i)backend"):
            PartialState(backend="carrier_pigeon")
        clean = not PartialState._shared_state and not dist.is_initialized()
        return clean, world()[:3], total(1)

    assert values(run_ranks(function, 2)) == [(True, (0, 0, 2), 2), (True, (1, 1, 2), 2)]


def test_a_group_that_was_made_is_destroyed_when_the_rest_fails():
    class Unbuildable(ParallelismConfig):
        def build_device_mesh(self, device_type):
            dist.barrier()
            raise RuntimeError("no mesh")

    def function(rank):
        with pytest.raises(RuntimeError, match="no mesh"):
            AcceleratorState(parallelism_config=Unbuildable(tp_size=2))
        clean = not PartialState._shared_state and not dist.is_initialized()
        return clean, AcceleratorState().num_processes, total(1)

    assert values(run_ranks(function, 2)) == [(True, 2, 2)] * 2


def test_a_layout_that_does_not_fill_the_world_is_refused_before_a_group_is_made():
    def function(rank):
        with pytest.raises(ArgumentValueError, match=r"tp_size=4 = 4 ranks, but there are 2"):
            AcceleratorState(parallelism_config=ParallelismConfig(tp_size=4))
        clean = not PartialState._shared_state and not dist.is_initialized()
        return clean, AcceleratorState().num_processes, total(1)

    assert values(run_ranks(function, 2)) == [(True, 2, 2)] * 2


def test_reset_destroys_our_group_and_the_next_one_is_made_anew():
    def function(rank):
        got = []
        for _ in range(3):
            state = PartialState()
            with state.main_process_first():
                pass
            got.append(total(rank + 1))
            state.wait_for_everyone()
            PartialState.reset()
            got.append(dist.is_initialized())
        return got

    assert values(run_ranks(function, 2)) == [[3, False] * 3] * 2


def test_a_users_group_is_adopted_and_left_alone():
    def function(rank):
        dist.init_process_group("gloo")
        place = world()
        PartialState().wait_for_everyone()
        PartialState.reset()
        kept = dist.is_initialized()
        # The turn's words of the first state are still in the store; the second must not mistake them for its own.
        order = []
        for _ in range(2):
            with PartialState().main_process_first():
                order.append(time.monotonic_ns())
                time.sleep(0.05 * (rank == 0))
                order.append(time.monotonic_ns())
            PartialState.reset()
        return place, kept, order

    first, second = values(run_ranks(function, 2))
    assert first[0] == (0, 0, 2, "gloo", DistributedType.MULTI_CPU)
    assert second[0] == (1, 1, 2, "gloo", DistributedType.MULTI_CPU)
    assert first[1]
    assert second[1]
    for turn in (0, 2):
        assert second[2][turn] >= first[2][turn + 1]


def test_a_users_group_decides_over_the_variables(tmp_path):
    def function(rank):
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=1 - rank, world_size=2)
        return world()[:3]

    assert values(run_ranks(function, 2)) == [(1, 1, 2), (0, 0, 2)]


def test_the_timeout_is_honoured_and_the_error_names_the_absent_ranks():
    def function(rank):
        state = PartialState(**InitProcessGroupKwargs(timeout=timedelta(seconds=1)).to_kwargs())
        state.wait_for_everyone()
        if rank in (1, 3):
            return None  # the process stays until all have reported
        started = time.monotonic()
        with pytest.raises(MissingRankError, match="barrier #2: ranks 1, 3 are missing, 2 of 4 ranks came") as caught:
            state.wait_for_everyone()
        assert isinstance(caught.value.__cause__, RuntimeError)
        return caught.value.missing, time.monotonic() - started < 30

    outcomes = values(run_ranks(function, 4))
    assert outcomes[0] == outcomes[2] == ((1, 3), True)
    assert outcomes[1] == outcomes[3] is None


def test_the_barrier_names_a_rank_that_died():
    def function(rank):
        state = PartialState(timeout=10)
        state.wait_for_everyone()
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(MissingRankError, match="rank 2 is missing") as caught:
            state.wait_for_everyone()
        return caught.value.missing

    outcomes = run_ranks(function, 3)
    assert outcomes[2] is None
    assert [outcome.value for outcome in outcomes[:2]] == [(2,), (2,)], outcomes


def test_a_barrier_that_fails_with_everyone_there_keeps_its_own_error(monkeypatch):
    def function(rank):
        state = PartialState()

        def broken(**given):
            raise RuntimeError("the cable")

        dist.barrier = broken
        with pytest.raises(RuntimeError, match="the cable") as caught:
            state.wait_for_everyone()
        return type(caught.value) is RuntimeError

    assert values(run_ranks(function, 2)) == [True, True]


def test_barriers_are_on_the_board():
    board = Board.create(2)
    try:

        def function(rank):
            probe.attach(board.slot(rank))
            state = PartialState()
            state.wait_for_everyone()
            with state.main_process_first():
                pass
            state.wait_for_everyone()

        values(run_ranks(function, 2))
        for snapshot in board.snapshot():
            assert [barrier.number for barrier in snapshot.barriers] == [1, 2, 3]
            assert all(barrier.left >= barrier.entered for barrier in snapshot.barriers)
            assert snapshot.barrier_file.endswith("test_state_ranks.py")
    finally:
        board.close()


def test_everyone_is_awaited():
    def function(rank):
        state = PartialState()
        if state.is_main_process:
            time.sleep(0.3)
        before = time.monotonic_ns()
        state.wait_for_everyone()
        return before, time.monotonic_ns()

    outcomes = values(run_ranks(function, 3))
    assert min(after for _, after in outcomes) >= max(before for before, _ in outcomes)


def test_main_process_first():
    def function(rank):
        with PartialState().main_process_first():
            started = time.monotonic_ns()
            time.sleep(0.1 if rank == 0 else 0)
            return started, time.monotonic_ns()

    main, *others = values(run_ranks(function, 3))
    assert all(started >= main[1] for started, _ in others)


def test_local_main_process_first_is_one_turn_for_each_server():
    def function(rank):
        with PartialState().local_main_process_first():
            started = time.monotonic_ns()
            time.sleep(0.1 * (rank % 2 == 0) + 0.3 * (rank == 2))
            return started, time.monotonic_ns()

    times = values(run_ranks(function, 4, per_rank=two_servers))
    assert times[1][0] >= times[0][1]
    assert times[3][0] >= times[2][1]
    # Rank 1 does not wait for the other server.
    assert times[1][0] < times[2][1]


@pytest.mark.parametrize("name", ["main_process_first", "local_main_process_first"])
def test_the_first_ranks_failure_reaches_the_others_and_nobody_runs_or_hangs(name):
    def function(rank):
        ran = []
        try:
            with getattr(PartialState(), name)():
                ran.append(rank)
                raise ValueError(f"disk full on {rank} \udcff")
        except Exception as error:
            return type(error).__name__, str(error), ran

    main, *others = values(run_ranks(function, 3))
    assert main == ("ValueError", "disk full on 0 \udcff", [0])
    for kind, text, ran in others:
        assert kind == MainProcessFailedError.__name__
        assert text == f"{name}: rank 0, which goes first, failed: ValueError: disk full on 0 ?"
        assert ran == []


def test_a_failure_on_one_server_stays_there():
    def function(rank):
        try:
            with PartialState().local_main_process_first():
                if rank == 2:
                    raise KeyboardInterrupt
        except BaseException as error:
            return type(error).__name__
        return "well"

    outcomes = values(run_ranks(function, 4, per_rank=two_servers))
    assert outcomes == ["well", "well", "KeyboardInterrupt", "MainProcessFailedError"]


def test_a_failure_after_turns_within_a_turn_leaves_the_next_turn_in_order():
    def function(rank):
        state = PartialState()
        caught, times = "", []
        try:
            with state.main_process_first():
                for _ in range(2):
                    with state.local_main_process_first():
                        pass
                if rank == 0:
                    raise ValueError("after the inner turns")
        except Exception as error:
            caught = type(error).__name__
        with state.main_process_first():
            times.append(time.monotonic_ns())
            with state.main_process_first():
                time.sleep(0.1 * (rank == 0))
                times.append(time.monotonic_ns())
        return caught, times

    main, *others = values(run_ranks(function, 3))
    assert main[0] == "ValueError"
    for caught, times in others:
        assert caught == "MainProcessFailedError"
        assert times[0] >= main[1][1]


def test_a_first_rank_that_never_comes_is_given_up_after_the_timeout():
    def function(rank):
        state = PartialState(timeout=1)
        if rank == 0:
            return None  # the process, and the store in it, stay until all have reported
        told = r"main_process_first: .* not done within 0:00:01"
        with pytest.raises(MissingRankError, match=told), state.main_process_first():
            pass
        return "given up"

    assert values(run_ranks(function, 2)) == [None, "given up"]


def test_a_first_rank_that_dies_leaves_nobody_hanging():
    def function(rank):
        told = "main_process_first: the rank that goes first, or the store, has gone"
        state = PartialState()
        state.wait_for_everyone()
        with pytest.raises(MissingRankError, match=told), state.main_process_first():
            os.kill(os.getpid(), signal.SIGKILL)
        return "told"

    outcomes = run_ranks(function, 2)
    assert outcomes[0] is None
    assert values(outcomes[1:]) == ["told"]


def test_the_decorators_choose_their_ranks():
    def function(rank):
        state = PartialState()

        class Trainer:
            def __init__(self, word):
                self.word = word

            @state.on_main_process
            def main(self):
                return self.word

            @state.on_last_process()
            def last(self):
                return self.word

            @state.on_main_process
            @classmethod
            def made(cls):
                return cls.__name__

            @classmethod
            @state.on_last_process
            def known(cls):
                return cls.__name__

            @state.on_process(process_index=1)
            @staticmethod
            def plain(value):
                return value

        def name():
            return "ran"

        @state.on_last_process
        async def awaited():
            return "awaited"

        trainer = Trainer("method")
        of_all_kinds = trainer.made(), Trainer.known(), trainer.plain(rank), asyncio.run(awaited())
        assert of_all_kinds == (
            "Trainer" if rank == 0 else None,
            "Trainer" if rank == 3 else None,
            1 if rank == 1 else None,
            "awaited" if rank == 3 else None,
        )
        return (
            trainer.main(),
            trainer.last(),
            state.on_local_main_process(name)(),
            state.on_process(process_index=2)(name)(),
            state.on_local_process(local_process_index=1)(name)(),
            AcceleratorState().on_process(name, process_index=3)(),
        )

    assert values(run_ranks(function, 4, per_rank=two_servers)) == [
        ("method", None, "ran", None, None, None),
        (None, None, None, None, "ran", None),
        (None, None, "ran", "ran", None, None),
        (None, "method", None, None, "ran", "ran"),
    ]


def test_a_decoration_in_an_earlier_cell_asks_the_rank():
    @PartialState(cpu=True).on_process(process_index=1)
    def function(rank):
        return rank

    assert function("alone") == "alone"
    assert values(run_ranks(function, 3)) == [None, 1, None]


def test_print_is_for_the_first_rank_of_each_server():
    def function(rank):
        with contextlib.redirect_stdout(io.StringIO()) as heard:
            PartialState().print("from", rank)
        return heard.getvalue()

    assert values(run_ranks(function, 4, per_rank=two_servers)) == ["from 0\n", "", "from 2\n", ""]


@pytest.mark.parametrize("state", [PartialState, AcceleratorState])
def test_split_between_processes(state):
    def function(rank):
        with state().split_between_processes(["A", "B", "C"]) as plain:
            pass
        with state().split_between_processes(("A", "B", "C"), apply_padding=True) as padded:
            pass
        with state().split_between_processes({"x": torch.arange(3)}, apply_padding=True) as tensors:
            return plain, padded, tensors["x"].tolist()

    assert values(run_ranks(function, 2)) == [
        (["A", "B"], ("A", "B"), [0, 1]),
        (["C"], ("C", "C"), [2, 2]),
    ]


def test_the_launchs_precision_is_every_ranks():
    def function(rank):
        return PartialState().mixed_precision, AcceleratorState().mixed_precision

    assert values(run_ranks(function, 2, env={"ACCELERATE_MIXED_PRECISION": "bf16"})) == [("bf16", "bf16")] * 2


def test_other_group_options_once_built_are_a_conflict():
    def function(rank):
        state = PartialState(timeout=30)
        PartialState(timeout=timedelta(seconds=30))
        with pytest.raises(StateConflictError, match=r"timeout=.*reset"):
            PartialState(timeout=40)
        with pytest.raises(StateConflictError, match=r"timeout=.*reset"):
            AcceleratorState(timeout=40)
        return state.num_processes, total(1)

    assert values(run_ranks(function, 2)) == [(2, 2)] * 2


def test_a_layout_becomes_a_mesh_with_the_axes_by_name():
    def function(rank):
        config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
        state = AcceleratorState(parallelism_config=config)
        mesh = state.device_mesh
        return (
            mesh.mesh_dim_names,
            tuple(mesh.shape),
            mesh["dp_replicate"].get_local_rank(),
            mesh["dp_shard"].get_local_rank(),
            state.distributed_type,
            PartialState().distributed_type,
            GradientState().is_xla_gradients_synced,
        )

    outcomes = values(run_ranks(function, 4))
    axes = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
    for rank, outcome in enumerate(outcomes):
        assert outcome[:4] == (axes, (2, 2, 1, 1, 1), rank // 2, rank % 2)
        assert outcome[4:] == (DistributedType.FSDP, DistributedType.MULTI_CPU, True)


def test_replicas_alone_are_not_fsdp():
    def function(rank):
        state = AcceleratorState(parallelism_config=ParallelismConfig(dp_replicate_size=2))
        return state.distributed_type, GradientState().is_xla_gradients_synced

    assert values(run_ranks(function, 2)) == [(DistributedType.MULTI_CPU, False)] * 2


def test_destroying_the_group():
    def function(rank):
        state = PartialState()
        small = dist.new_group([0, 1])
        state.destroy_process_group(small)
        kept = dist.is_initialized()
        AcceleratorState().destroy_process_group()
        gone = not dist.is_initialized()
        state.destroy_process_group()
        # A group that the user makes afterwards is the user's, whatever this state once made.
        dist.init_process_group("gloo")
        PartialState.reset()
        return kept, gone, dist.is_initialized()

    assert values(run_ranks(function, 2)) == [(True, True, True)] * 2


class Places(Dataset):
    """Tells, from inside a loader's worker, which rank it works for."""

    def __init__(self, state):
        self.state = state

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return self.state.process_index, self.state.num_processes, dist.is_initialized()


@pytest.mark.parametrize("fresh", [False, True], ids=["forked", "as if spawned"])
def test_a_loaders_worker_knows_its_rank_and_makes_no_group(fresh):
    def forget(worker):
        # A spawned worker has nothing but the rank's launch variables; this makes a forked one so, and is quicker.
        if fresh:
            reset_inherited()

    def function(rank):
        state = PartialState()
        loader = DataLoader(Places(state), num_workers=1, batch_size=None, worker_init_fn=forget)
        places = [tuple(place) for place in loader]
        state.wait_for_everyone()
        return places

    place = [(rank, 2, not fresh) for rank in range(2)]
    assert values(run_ranks(function, 2)) == [[place[0]] * 2, [place[1]] * 2]


def test_reset_inherited_leaves_the_parent_as_it_was():
    state = PartialState(cpu=True)
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            reset_inherited()
            code = 0 if not state.initialized and state.num_processes == 1 else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert state.initialized

"""PartialState in one process. What needs several is in ``test_state_ranks``."""

from __future__ import annotations

import copy
import pickle
import sys
from datetime import timedelta
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from nbstate.errors import ArgumentTypeError, ArgumentValueError, StateConflictError, StateNotBuiltError
from nbstate.state import DistributedType, InitProcessGroupKwargs, PartialState
from nbstate.state import partial as partial_module
from nbstate.telemetry import probe
from nbstate.telemetry.board import Board

ATTRIBUTES = [
    "device",
    "distributed_type",
    "backend",
    "local_process_index",
    "process_index",
    "num_processes",
    "mixed_precision",
    "is_last_process",
    "is_main_process",
    "is_local_main_process",
    "debug",
    "use_distributed",
    "fork_launched",
]


@pytest.fixture
def fake_cuda(monkeypatch):
    """FakeCuda: a machine with two CUDA devices; the calls that choose one are written down."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append(str(device)))
    return chosen


def test_alone():
    state = PartialState(cpu=True)
    assert state.device == torch.device("cpu")
    assert state.distributed_type is DistributedType.NO
    assert state.backend is None
    assert (state.process_index, state.local_process_index, state.num_processes) == (0, 0, 1)
    assert state.mixed_precision == "no"
    assert (state.is_main_process, state.is_local_main_process, state.is_last_process) == (True, True, True)
    assert (state.use_distributed, state.debug, state.fork_launched, state.initialized) == (False, False, False, True)
    assert not dist.is_initialized()


def test_a_launch_of_one_rank_needs_no_group(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "nowhere", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert PartialState(cpu=True).distributed_type is DistributedType.NO
    assert not dist.is_initialized()


def test_what_the_launch_said_is_read(monkeypatch):
    for name, value in {"ACCELERATE_MIXED_PRECISION": "fp16", "FORK_LAUNCHED": "1", "NBSTATE_DEBUG": "1"}.items():
        monkeypatch.setenv(name, value)
    state = PartialState(cpu=True)
    assert (state.mixed_precision, state.fork_launched, state.debug) == ("fp16", True, True)


def test_instances_share_everything_and_the_second_builds_nothing(monkeypatch):
    first = PartialState(cpu=True)

    def never(*args):
        raise AssertionError("built again")

    for name in ("read_environment", "pick_device_kind", "make_group"):
        monkeypatch.setattr(partial_module, name, never)
    second = PartialState()
    assert first == second
    assert vars(first) is vars(second)
    assert hash(first) == hash(second)
    assert first != 1


def test_copies_and_pickles_are_the_same_state():
    state = PartialState(cpu=True)
    assert copy.copy(state) is copy.deepcopy(state) is state
    for packed in (pickle.dumps(state), cloudpickle.dumps(state)):
        assert vars(pickle.loads(packed)) is vars(state)
        assert len(packed) < 300


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_access_after_reset_says_how_to_build_it_again(name):
    state = PartialState(cpu=True)
    getattr(state, name)
    PartialState.reset()
    with pytest.raises(StateNotBuiltError, match=rf"was reset.*'{name}'.*PartialState\(\)"):
        getattr(state, name)
    with pytest.raises(AttributeError):
        getattr(state, name)
    assert not state.initialized
    copied = pickle.loads(pickle.dumps(state))
    assert not hasattr(copied, name)


def test_an_unknown_attribute_is_no_reset():
    with pytest.raises(AttributeError, match="has no attribute 'rank'"):
        PartialState(cpu=True).rank


def test_repr_never_raises():
    state = PartialState(cpu=True)
    assert repr(state) == "PartialState(process 0 of 1, local 0, cpu, NO, precision no)"
    assert "num_processes" in state._repr_html_()
    state._reset_state()
    assert repr(state) == "PartialState(not built)"
    assert "not built" in state._repr_html_()


def test_it_can_be_built_otherwise_after_a_reset(monkeypatch):
    state = PartialState(cpu=True)
    state.reset()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    PartialState(cpu=True)
    assert state.mixed_precision == "bf16"


@pytest.mark.parametrize(
    ("variables", "options", "error"),
    [
        ({"RANK": "7", "WORLD_SIZE": "2"}, {}, ArgumentValueError),
        ({"ACCELERATE_MIXED_PRECISION": "x"}, {}, ArgumentValueError),
        ({"NBSTATE_DEVICE": "toaster"}, {}, ArgumentValueError),
        ({}, {"timeout": "soon"}, ArgumentTypeError),
        ({}, {"time_out": 3}, ArgumentTypeError),
    ],
)
def test_nothing_remains_of_a_constructor_that_raised(monkeypatch, variables, options, error):
    with monkeypatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        with pytest.raises(error):
            PartialState(**options)
    assert not PartialState._shared_state
    assert not dist.is_initialized()
    assert PartialState(cpu=True).num_processes == 1


def test_cpu_asked_for_after_an_accelerator_is_a_conflict(fake_cuda):
    state = PartialState()
    assert state.device == torch.device("cuda", 0)
    with pytest.raises(StateConflictError, match=r"cpu=True.*cuda:0.*reset"):
        PartialState(cpu=True)
    assert state.device == torch.device("cuda", 0)


def test_alone_on_an_accelerator_creates_no_context(fake_cuda):
    assert PartialState().device == torch.device("cuda", 0)
    assert PartialState().default_device == torch.device("cuda", 0)
    assert fake_cuda == []
    PartialState().set_device()
    assert fake_cuda == ["cuda:0"]


@pytest.mark.parametrize("variables", [{"ACCELERATE_USE_CPU": "true"}, {"NBSTATE_DEVICE": "cpu"}])
def test_the_launch_may_ask_for_the_cpu(fake_cuda, monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert PartialState().device == torch.device("cpu")


def test_more_ranks_than_devices_gives_both_numbers(fake_cuda, monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(partial_module, "make_group", lambda *given: None)
    with pytest.raises(ValueError, match=r"4 ranks on this machine, but 2 cuda devices"):
        PartialState()
    assert not PartialState._shared_state
    assert fake_cuda == []


def group_made(monkeypatch, rank, variables):
    """What ``make_group`` would be given by one rank of four."""
    made = []
    monkeypatch.setattr(partial_module, "make_group", lambda *given: made.append(given))
    for name, value in {"RANK": str(rank), "WORLD_SIZE": "4", **variables}.items():
        monkeypatch.setenv(name, value)
    state = PartialState()
    return state, made


def test_shared_devices_are_dealt_out_in_turn_over_gloo(fake_cuda, monkeypatch):
    state, made = group_made(monkeypatch, 3, {"NBSTATE_SHARE_DEVICES": "1"})
    assert (str(state.device), state.backend) == ("cuda:1", "gloo")
    assert fake_cuda == ["cuda:1"]
    assert made[0][1:4] == ("gloo", None, None)


def test_a_device_for_each_rank_goes_over_nccl_and_is_named(fake_cuda, monkeypatch):
    state, made = group_made(monkeypatch, 3, {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"})
    assert (str(state.device), state.backend, state.distributed_type) == ("cuda:1", "nccl", DistributedType.MULTI_GPU)
    assert made[0][1:4] == ("nccl", None, torch.device("cuda", 1))
    waited = []
    monkeypatch.setattr(dist, "barrier", lambda **given: waited.append(given))
    state.wait_for_everyone()
    assert waited == [{"device_ids": [1]}]


def test_slurm_that_shows_each_rank_one_device(fake_cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in {
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_ID": "0",
        "SLURM_GPUS_PER_TASK": "1",
    }.items():
        monkeypatch.setenv(name, value)
    made = []
    monkeypatch.setattr(partial_module, "make_group", lambda *given: made.append(given))
    state = PartialState()
    assert (str(state.device), state.backend) == ("cuda:0", "nccl")


def test_xla_asks_its_runtime(monkeypatch):
    """FakeXla: the second of four processes on one host, as the XLA runtime numbers them."""
    waited = []
    runtime = SimpleNamespace(
        addressable_device_count=lambda: 1,
        global_ordinal=lambda: 1,
        local_ordinal=lambda: 1,
        world_size=lambda: 4,
        local_device_count=lambda: 4,
    )
    fakes = {
        "torch_xla": SimpleNamespace(),
        "torch_xla.runtime": runtime,
        "torch_xla.distributed.xla_backend": SimpleNamespace(),
        "torch_xla.core.xla_model": SimpleNamespace(rendezvous=waited.append),
    }
    for name, module in fakes.items():
        monkeypatch.setitem(sys.modules, name, module)
    made = []
    monkeypatch.setattr(partial_module, "make_group", lambda *given: made.append(given))
    monkeypatch.setenv("NBSTATE_DEVICE", "xla")
    state = PartialState()
    assert (state.process_index, state.num_processes, state.backend) == (1, 4, "xla")
    assert (state.device.type, state.distributed_type) == ("xla", DistributedType.XLA)
    assert made[0][1:4] == ("xla", None, None)
    state.wait_for_everyone()
    assert waited == ["nbstate.wait_for_everyone"]


def test_waiting_and_going_first_alone_return_at_once(monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("a collective")

    monkeypatch.setattr(dist, "barrier", never)
    state = PartialState(cpu=True)
    state.wait_for_everyone()
    done = []
    for first in (state.main_process_first, state.local_main_process_first):
        with first():
            done.append(first)
        with pytest.raises(KeyError, match="boom"), first():
            raise KeyError("boom")
    assert len(done) == 2
    state.destroy_process_group()


def test_group_options_alone_are_accepted_and_have_no_effect():
    kwargs = InitProcessGroupKwargs(backend="gloo", timeout=timedelta(seconds=9)).to_kwargs()
    assert PartialState(cpu=True, **kwargs).backend is None
    assert PartialState(cpu=True, timeout=timedelta(seconds=3)).num_processes == 1


def test_alone_every_decorator_runs_and_returns():
    state = PartialState(cpu=True)
    for decorate in (
        state.on_main_process,
        state.on_main_process(),
        state.on_local_main_process,
        state.on_local_main_process(),
        state.on_last_process,
        state.on_last_process(),
        state.on_process(process_index=2),
        state.on_local_process(local_process_index=2),
    ):

        @decorate
        def add(left, right=1):
            """Add."""
            return left + right

        assert add(1, right=2) == 3
        assert (add.__name__, add.__doc__) == ("add", "Add.")
    assert state.on_process(add, process_index=3)(1) == 2


def test_decorators_that_make_no_sense_are_refused():
    state = PartialState(cpu=True)
    with pytest.raises(ArgumentTypeError, match=r"on_process\(process_index=2\)"):
        state.on_process(print)
    with pytest.raises(ArgumentTypeError, match="local_process_index"):
        state.on_local_process()
    with pytest.raises(ArgumentTypeError, match="only a function"):
        state.on_main_process(3)


def test_the_rank_is_looked_up_at_the_call(monkeypatch):
    state = PartialState(cpu=True)

    @state.on_process(process_index=2)
    def which():
        return state.process_index

    monkeypatch.setitem(PartialState._shared_state, "num_processes", 4)
    got = []
    for rank in range(4):
        monkeypatch.setitem(PartialState._shared_state, "process_index", rank)
        got.append(which())
    assert got == [None, None, 2, None]


def test_splitting_alone_is_whole_and_validated():
    state = PartialState(cpu=True)
    with state.split_between_processes([1, 2, 3], apply_padding=True) as part:
        assert part == [1, 2, 3]
    with pytest.raises(TypeError, match="cannot be split"), state.split_between_processes({1, 2}):
        pass


def test_print_alone(capsys):
    PartialState(cpu=True).print("here", 1, sep="-")
    assert capsys.readouterr().out == "here-1\n"


def test_the_board_shows_device_and_memory():
    board = Board.create(1)
    probe.attach(board.slot(0))
    try:
        PartialState(cpu=True)
        probe.step(True)
        snapshot = board.snapshot()[0]
        assert snapshot.device == "cpu"
        assert 0 < snapshot.memory_used < snapshot.memory_total
    finally:
        probe.detach()
        board.close()


def test_a_built_state_has_one_handle_and_arguments_are_still_checked():
    state = PartialState(cpu=True)
    assert PartialState() is PartialState()
    assert PartialState() == state

    class Mine(PartialState):
        pass

    assert type(Mine()) is Mine
    assert type(PartialState()) is PartialState
    with pytest.raises(ArgumentTypeError):
        PartialState(nonsense=1)
    kept = PartialState()
    PartialState.reset()
    with pytest.raises(StateNotBuiltError):
        _ = kept.device
    assert PartialState(cpu=True).device == kept.device

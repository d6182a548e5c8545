"""AcceleratorState in one process. What needs several is in ``test_state_ranks``."""

from __future__ import annotations

import pytest
import torch

from nbstate.errors import ArgumentValueError, StateConflictError, StateNotBuiltError
from nbstate.state import AcceleratorState, DistributedType, ParallelismConfig, PartialState, is_initialized


@pytest.fixture
def fake_cuda(monkeypatch):
    """FakeCuda: a machine with two CUDA devices."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)


def test_it_has_all_of_partial_state():
    state, partial = AcceleratorState(cpu=True), PartialState()
    for name in PartialState._names - {"_group_options"}:
        assert getattr(state, name) == getattr(partial, name), name
    for name in (name for name in dir(PartialState) if not name.startswith("_")):
        assert hasattr(state, name), name
    assert (state.parallelism_config, state.device_mesh, state.initialized) == (None, None, True)
    with state.split_between_processes(["A", "B", "C"]) as part:
        assert part == ["A", "B", "C"]
    assert state.on_main_process(lambda: 5)() == 5
    state.wait_for_everyone()


def test_the_same_or_no_arguments_give_the_existing_state():
    first = AcceleratorState(mixed_precision="bf16", cpu=True)
    assert AcceleratorState() == AcceleratorState(mixed_precision="bf16") == AcceleratorState(cpu=True) == first
    assert vars(AcceleratorState()) is vars(first)
    assert first.mixed_precision == "bf16"


def test_other_precision_is_a_conflict_that_changes_nothing():
    state = AcceleratorState(mixed_precision="bf16", cpu=True)
    before = dict(vars(state))
    with pytest.raises(StateConflictError, match=r"mixed_precision='fp16'.*'bf16'.*reset"):
        AcceleratorState(mixed_precision="fp16")
    assert vars(state) == before
    assert issubclass(StateConflictError, ValueError)


def test_cpu_on_an_accelerator_is_a_conflict_that_changes_nothing(fake_cuda):
    state = AcceleratorState()
    with pytest.raises(StateConflictError, match=r"cpu=True.*cuda:0"):
        AcceleratorState(cpu=True)
    assert state.device.type == "cuda"


def test_cpu_on_an_accelerators_partial_state_is_a_conflict(fake_cuda):
    PartialState()
    with pytest.raises(StateConflictError, match=r"cpu=True.*cuda:0"):
        AcceleratorState(cpu=True)
    assert not is_initialized()
    assert PartialState().device.type == "cuda"


def test_another_layout_is_a_conflict():
    AcceleratorState(cpu=True)
    with pytest.raises(StateConflictError, match="parallelism_config"):
        AcceleratorState(parallelism_config=ParallelismConfig())


def test_an_unknown_precision_lists_the_known_and_leaves_nothing():
    with pytest.raises(ArgumentValueError, match="'no', 'fp16', 'bf16', 'fp8'"):
        AcceleratorState(mixed_precision="float16", cpu=True)
    assert not is_initialized()
    assert not PartialState._shared_state


def test_the_launchs_precision_is_the_default(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert AcceleratorState(cpu=True).mixed_precision == "bf16"
    AcceleratorState.reset()
    assert AcceleratorState(mixed_precision="no", cpu=True).mixed_precision == "no"


def test_both_singletons_agree_on_the_precision():
    AcceleratorState(mixed_precision="fp8", cpu=True)
    assert PartialState().mixed_precision == "fp8"
    AcceleratorState._reset_state()
    assert PartialState().mixed_precision == "no"


def test_is_initialized_has_no_side_effect():
    assert not is_initialized()
    assert not AcceleratorState.is_initialized()
    assert not PartialState._shared_state
    assert not AcceleratorState._shared_state
    AcceleratorState(cpu=True)
    assert is_initialized()
    assert AcceleratorState.is_initialized()


def test_reset_lets_a_cell_be_run_again_with_other_settings():
    state = AcceleratorState(mixed_precision="bf16", cpu=True)
    AcceleratorState.reset()
    with pytest.raises(StateNotBuiltError, match=r"AcceleratorState was reset.*AcceleratorState\(\)"):
        state.mixed_precision
    with pytest.raises(StateNotBuiltError):
        state.device
    assert repr(state) == "AcceleratorState(not built)"
    assert "not built" in state._repr_html_()
    assert not PartialState._shared_state
    assert AcceleratorState(mixed_precision="fp16", cpu=True).mixed_precision == "fp16"
    assert state.mixed_precision == "fp16"


def test_the_private_reset_keeps_partial_state_unless_told():
    AcceleratorState(cpu=True)
    AcceleratorState._reset_state()
    assert PartialState._shared_state
    AcceleratorState(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert not PartialState._shared_state


def test_a_reset_of_partial_state_alone_does_not_leave_half_a_state():
    state = AcceleratorState(mixed_precision="bf16", cpu=True)
    PartialState.reset()
    assert not state.initialized
    assert repr(state) == "AcceleratorState(not built)"
    assert AcceleratorState(mixed_precision="fp16", cpu=True).mixed_precision == "fp16"


def test_a_layout_that_does_not_fill_the_world_leaves_nothing():
    with pytest.raises(ArgumentValueError, match="tp_size=2 = 2 ranks, but there are 1"):
        AcceleratorState(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))
    assert not is_initialized()
    assert not PartialState._shared_state


def test_a_layout_of_one_has_no_mesh():
    state = AcceleratorState(cpu=True, parallelism_config=ParallelismConfig())
    assert (state.device_mesh, state.distributed_type) == (None, DistributedType.NO)


@pytest.mark.parametrize(
    "plugin", ["dynamo_plugin", "deepspeed_plugin", "fsdp_plugin", "torch_tp_plugin", "megatron_lm_plugin"]
)
def test_plugins_that_are_not_served_are_refused_by_name(plugin):
    with pytest.raises(NotImplementedError, match=plugin):
        AcceleratorState(cpu=True, **{plugin: object()})
    assert not is_initialized()


def test_the_card_shows_precision_and_layout():
    state = AcceleratorState(mixed_precision="bf16", cpu=True, parallelism_config=ParallelismConfig())
    card = state._repr_html_()
    assert "bf16" in card
    assert "dp_shard 1" in card
    assert "precision bf16" in repr(state)

from __future__ import annotations

import gc

import pytest

from nbstate.errors import StateNotBuiltError
from nbstate.state import AcceleratorState, DistributedType, GradientAccumulationPlugin, GradientState, PartialState
from nbstate.telemetry import probe
from nbstate.telemetry.board import Board, Flag


class Loader:
    """What GradientState asks of a loader."""

    def __init__(self, end_of_dataloader=False, remainder=-1):
        self.end_of_dataloader = end_of_dataloader
        self.remainder = remainder


def test_alone_outside_a_loader():
    state = GradientState()
    assert state.sync_gradients is True
    assert (state.num_steps, state.adjust_scheduler, state.sync_with_dataloader) == (1, False, True)
    assert state.active_dataloader is None
    assert state.dataloader_references == [None]
    assert state.end_of_dataloader is False
    assert state.remainder == -1
    assert state.is_xla_gradients_synced is False
    assert (state.in_dataloader, state.sync_each_batch, state.plugin_kwargs) == (False, False, {})
    assert state.initialized


def test_instances_share_everything():
    first = GradientState(GradientAccumulationPlugin(num_steps=3))
    second = GradientState()
    assert first == second
    assert second.num_steps == 3
    second._set_sync_gradients(False)
    assert first.sync_gradients is False
    first.sync_gradients = True
    assert second.sync_gradients is True


def test_with_a_plugin_its_own_defaults_hold():
    state = GradientState(GradientAccumulationPlugin())
    assert (state.num_steps, state.adjust_scheduler, state.sync_with_dataloader) == (1, True, True)
    GradientState(GradientAccumulationPlugin(num_steps=4, adjust_scheduler=False, sync_with_dataloader=False))
    assert (state.num_steps, state.adjust_scheduler, state.sync_with_dataloader) == (4, False, False)
    assert state.plugin_kwargs == {"num_steps": 4, "adjust_scheduler": False, "sync_with_dataloader": False}


def test_sync_each_batch_leaves_sync_gradients_alone():
    state = GradientState(GradientAccumulationPlugin(num_steps=2, sync_each_batch=True))
    state._set_sync_gradients(False)
    assert (state.sync_each_batch, state.sync_gradients) == (True, False)


def test_the_innermost_loader_speaks():
    state = GradientState()
    outer, inner = Loader(remainder=3), Loader(end_of_dataloader=True, remainder=0)
    state._add_dataloader(outer)
    state._add_dataloader(inner)
    assert state.active_dataloader is inner
    assert state.dataloader_references == [None, outer, inner]
    assert (state.end_of_dataloader, state.remainder) == (True, 0)
    state._remove_dataloader(inner)
    assert state.active_dataloader is outer
    assert (state.end_of_dataloader, state.remainder) == (False, 3)
    state._remove_dataloader(outer)
    state._remove_dataloader(outer)
    assert state.dataloader_references == [None]


def test_the_outer_flags_are_as_they_were_after_an_inner_loader():
    state = GradientState(GradientAccumulationPlugin(num_steps=2))
    outer = Loader(remainder=1)
    state._add_dataloader(outer)
    state._set_sync_gradients(False)
    before = (state.sync_gradients, state.end_of_dataloader, state.remainder, state.active_dataloader)
    inner = Loader(end_of_dataloader=True, remainder=0)
    state._add_dataloader(inner)
    state._remove_dataloader(inner)
    assert (state.sync_gradients, state.end_of_dataloader, state.remainder, state.active_dataloader) == before


def test_a_loader_that_ends_out_of_turn_takes_only_itself_off():
    state = GradientState()
    outer, inner = Loader(), Loader()
    state._add_dataloader(outer)
    state._add_dataloader(inner)
    state._remove_dataloader(outer)
    assert state.dataloader_references == [None, inner]


def test_one_loader_iterated_twice_at_once():
    state, loader = GradientState(), Loader()
    state._add_dataloader(loader)
    state._add_dataloader(loader)
    state._remove_dataloader(loader)
    assert state.dataloader_references == [None, loader]


def test_a_loader_dropped_by_its_owner_is_collected_and_the_outer_one_is_active():
    state, outer, inner = GradientState(), Loader(remainder=5), Loader()
    state._add_dataloader(outer)
    state._add_dataloader(inner)
    del inner
    gc.collect()
    assert state.dataloader_references == [None, outer]
    assert state.active_dataloader is outer
    assert state.remainder == 5
    assert len(state._loaders) == 1


def test_a_loader_that_dies_after_a_reset_does_no_harm():
    loader = Loader()
    GradientState()._add_dataloader(loader)
    GradientState.reset()
    del loader
    gc.collect()
    assert GradientState().dataloader_references == [None]


def test_access_after_reset():
    state = GradientState(GradientAccumulationPlugin(num_steps=3))
    state._reset_state()
    for name in ("sync_gradients", "num_steps", "active_dataloader", "remainder", "is_xla_gradients_synced"):
        with pytest.raises(StateNotBuiltError, match=rf"GradientState was reset.*'{name}'"):
            getattr(state, name)
    for name in ("sync_gradients", "is_xla_gradients_synced", "anything"):
        with pytest.raises(StateNotBuiltError, match=rf"GradientState was reset.*'{name}'"):
            setattr(state, name, False)
    with pytest.raises(StateNotBuiltError):
        state._set_sync_gradients(False)
    assert not state.initialized
    assert repr(state) == "GradientState(not built)"
    assert "not built" in state._repr_html_()
    assert GradientState().num_steps == 1


def test_xla_gradients_are_set_and_cleared_by_who_reduces():
    state = GradientState()
    state.is_xla_gradients_synced = True
    assert GradientState().is_xla_gradients_synced is True
    state.is_xla_gradients_synced = False
    assert state.is_xla_gradients_synced is False
    assert not AcceleratorState.is_initialized()


def test_under_fsdp_xla_gradients_are_always_synced(monkeypatch):
    state = GradientState()
    AcceleratorState(cpu=True)
    assert state.is_xla_gradients_synced is False
    monkeypatch.setitem(AcceleratorState._shared_state, "distributed_type", DistributedType.FSDP)
    state.is_xla_gradients_synced = False
    assert state.is_xla_gradients_synced is True


def test_it_needs_no_other_singleton():
    GradientState()._set_sync_gradients(False)
    assert not PartialState._shared_state


def test_every_change_is_on_the_board():
    board = Board.create(1)
    probe.attach(board.slot(0))
    try:
        state = GradientState(GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False))

        def shown():
            snapshot = board.snapshot()[0]
            return {flag for flag in Flag if snapshot.flags & flag}, snapshot.num_steps, snapshot.remainder

        always = {Flag.KNOWN, Flag.ADJUST_SCHEDULER}
        assert shown() == (always | {Flag.SYNC_GRADIENTS}, 2, -1)
        state._set_sync_gradients(False)
        assert shown() == (always, 2, -1)
        loader = Loader(end_of_dataloader=True, remainder=3)
        state._add_dataloader(loader)
        assert shown() == (always | {Flag.END_OF_DATALOADER, Flag.IN_DATALOADER}, 2, 3)
        loader.remainder = 4
        state._publish()
        assert shown()[2] == 4
        state._remove_dataloader(loader)
        assert shown() == (always, 2, -1)
    finally:
        probe.detach()
        board.close()


def test_repr_and_card():
    state = GradientState(GradientAccumulationPlugin(num_steps=2))
    loader = Loader(remainder=1)
    state._add_dataloader(loader)
    assert repr(state) == (
        "GradientState(sync_gradients=True, num_steps=2, end_of_dataloader=False, remainder=1, loaders=1)"
    )
    assert "Loader" in state._repr_html_()

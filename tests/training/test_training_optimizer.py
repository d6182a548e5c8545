"""The optimizer acts on the steps that synchronise, and leaves out those that the scaler condemns."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any

import pytest
import torch

from nbstate.state import AcceleratorState, DistributedType, GradientState, PartialState
from nbstate.telemetry.board import Slot
from nbstate.training import Accelerator, GradScalerKwargs


def prepared(**options: Any) -> tuple[Accelerator, torch.nn.Parameter, Any]:
    accelerator = Accelerator(**options)
    weight = torch.nn.Parameter(torch.ones(1))
    return accelerator, weight, accelerator.prepare(torch.optim.SGD([weight], lr=0.5, momentum=0.5))


def test_it_rests_while_gradients_are_accumulated() -> None:
    accelerator, weight, optimizer = prepared(gradient_accumulation_steps=2)
    seen = []
    for _ in range(4):
        with accelerator.accumulate():
            accelerator.backward(weight.sum())
            optimizer.step()
            gradient = None if weight.grad is None else weight.grad.item()
            optimizer.zero_grad()
            seen.append((weight.item(), gradient, weight.grad is None))
    assert seen == [(1.0, 0.5, False), (0.5, 1.0, True), (0.5, 0.5, False), (-0.25, 1.0, True)]


def test_a_step_with_infinite_gradients_is_skipped_and_counted(slot: Slot) -> None:
    accelerator, weight, optimizer = prepared(
        mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=8.0)]
    )
    accelerator.backward((weight * float("inf")).sum())
    optimizer.step()
    assert (weight.item(), optimizer.step_was_skipped, accelerator.optimizer_step_was_skipped) == (1.0, True, True)
    assert accelerator.scaler is not None
    assert accelerator.scaler.get_scale() == 4.0
    assert slot.read("skipped_steps") == 1
    optimizer.zero_grad()
    accelerator.backward(weight.sum())
    optimizer.step()
    assert (weight.item(), optimizer.step_was_skipped, accelerator.optimizer_step_was_skipped) == (0.5, False, False)
    assert slot.read("skipped_steps") == 1


def test_clipping_sees_unscaled_gradients_and_may_be_done_twice() -> None:
    accelerator, weight, optimizer = prepared(mixed_precision="fp16")
    accelerator.backward(3 * weight.sum())
    assert accelerator.clip_grad_norm_([weight], 100.0).item() == 3.0
    accelerator.clip_grad_value_([weight], 2.0)
    optimizer.step()
    assert weight.item() == 0.0


def test_clipping_for_one_of_two_optimizers_that_step_in_turn() -> None:
    accelerator, weight, optimizer = prepared(mixed_precision="fp16")
    other = torch.nn.Parameter(torch.ones(1))
    second = accelerator.prepare(torch.optim.SGD([other], lr=0.5))
    for parameter, one in ((weight, optimizer), (other, second)):
        accelerator.backward(3 * parameter.sum())
        assert accelerator.clip_grad_norm_([parameter], 100.0).item() == 3.0
        one.step()
        one.zero_grad()
        assert parameter.item() == -0.5


@pytest.mark.parametrize("set_to_none", [None, True, False])
def test_zero_grad_passes_on_how(set_to_none: bool | None) -> None:
    _, weight, optimizer = prepared()
    weight.grad = torch.ones(1)
    optimizer.zero_grad(set_to_none=set_to_none)
    assert (weight.grad is None) == (set_to_none is not False)


def test_a_closure_is_run() -> None:
    _, weight, optimizer = prepared()

    def closure() -> float:
        weight.grad = torch.ones(1)
        return 7.0

    assert optimizer.step(closure) == 7.0
    assert weight.item() == 0.5


def test_it_is_an_optimizer_without_a_trace_of_the_wrapper() -> None:
    accelerator, weight, optimizer = prepared()
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert accelerator.prepare(optimizer) is optimizer
    weight.grad = torch.ones(1)
    optimizer.step()
    plain = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.1)
    plain.load_state_dict(optimizer.state_dict())
    assert plain.param_groups[0]["lr"] == 0.5
    optimizer.load_state_dict(plain.state_dict())
    optimizer.param_groups[0]["lr"] = 0.25
    assert optimizer.optimizer.param_groups[0]["lr"] == 0.25
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    assert len(optimizer.optimizer.param_groups) == 2
    assert optimizer.defaults["momentum"] == 0.5
    assert list(optimizer.state) == [weight]
    assert "SGD" in repr(optimizer)
    assert copy.deepcopy(optimizer).param_groups[0]["lr"] == 0.25
    assert pickle.loads(pickle.dumps(optimizer)).param_groups[0]["lr"] == 0.25


def test_modes_of_schedule_free_optimizers_are_passed_on() -> None:
    class Free(torch.optim.SGD):
        mode = ""

        def train(self) -> None:
            self.mode = "train"

        def eval(self) -> None:
            self.mode = "eval"

    accelerator = Accelerator()
    optimizer = accelerator.prepare(Free([torch.nn.Parameter(torch.ones(1))]))
    optimizer.train()
    assert optimizer.mode == "train"
    optimizer.eval()
    assert optimizer.mode == "eval"
    plain = accelerator.prepare(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))
    plain.train()
    plain.eval()


class FakeXla:
    """The XLA of a machine with two devices that is not here: two ranks whose gradients are the same but for a sign."""

    def __init__(self) -> None:
        self.reductions: list[tuple[list[float], bool]] = []
        self.broadcast: list[torch.nn.Module] = []

    def all_reduce(self, kind: str, gradients: list[torch.Tensor], scale: float) -> None:
        assert (kind, scale) == ("sum", 0.5)
        self.reductions.append(([gradient.item() for gradient in gradients], GradientState().is_xla_gradients_synced))
        for gradient in gradients:
            gradient.zero_()

    def broadcast_master_param(self, model: torch.nn.Module) -> None:
        self.broadcast.append(model)

    def sync(self) -> None: ...


@pytest.fixture
def fake_xla(monkeypatch: pytest.MonkeyPatch) -> FakeXla:
    fake = FakeXla()
    monkeypatch.setitem(sys.modules, "torch_xla", fake)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "torch_xla.core.xla_model", fake)  # type: ignore[arg-type]
    AcceleratorState()
    for state, name, value in (
        (PartialState, "num_processes", 2),
        (PartialState, "distributed_type", DistributedType.XLA),
        (AcceleratorState, "distributed_type", DistributedType.XLA),
    ):
        monkeypatch.setitem(state._shared_state, name, value)
    return fake


@pytest.mark.parametrize("clip", [False, True])
def test_on_xla_gradients_are_reduced_once_a_synchronised_step(fake_xla: FakeXla, clip: bool) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    state = accelerator.gradient_state
    own = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=1.0))
    assert model is own
    assert fake_xla.broadcast == [own]
    before, synced = own.weight.item(), []
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            if clip:
                accelerator.clip_grad_norm_(own.parameters(), 9.0)
            synced.append(state.is_xla_gradients_synced)
            optimizer.step()
            synced.append(state.is_xla_gradients_synced)
            optimizer.zero_grad()
    assert synced == [False, False, clip, False] * 2
    assert fake_xla.reductions == [([1.0], False)] * 2
    assert own.weight.item() == before


def test_off_xla_the_flag_stays_down() -> None:
    _, weight, optimizer = prepared()
    weight.grad = torch.ones(1)
    optimizer.step()
    assert not GradientState().is_xla_gradients_synced

"""XLA for real: one process, on the CPU, in an environment of its own (``pytest -m xla``).

torch_xla 2.9 wants torch 2.9, so it cannot stand in the environment of the other tests. CONTRIBUTING says how to make
one. Two processes crash in torch_xla there; ``test_training_optimizer.py`` has a FakeXla for what needs them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from nbstate import Accelerator
from nbstate.state import AcceleratorState, DistributedType, GradientState, PartialState

pytestmark = pytest.mark.xla


@pytest.fixture(autouse=True)
def _on_xla(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pytest.importorskip("torch_xla", reason="needs torch_xla, in an environment of its own: see CONTRIBUTING")
    assert os.environ.get("PJRT_DEVICE") == "CPU", "run with PJRT_DEVICE=CPU"
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setenv("NBSTATE_DEVICE", "xla")
    for singleton in (AcceleratorState, PartialState, GradientState):
        singleton.reset()
    yield
    for singleton in (AcceleratorState, PartialState, GradientState):
        singleton.reset()


def _digits() -> TensorDataset:
    digits = load_digits()
    return TensorDataset(torch.tensor(digits.data[:256], dtype=torch.float32) / 16, torch.tensor(digits.target[:256]))


def test_the_flag_is_set_by_the_reduction_and_cleared_by_the_step() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    assert accelerator.distributed_type is DistributedType.XLA
    assert accelerator.device.type == "xla"
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(_digits(), batch_size=32))
    state = accelerator.gradient_state
    losses, flags = [], []
    for _ in range(4):
        for x, y in loader:
            assert x.device.type == "xla"
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                before = state.is_xla_gradients_synced
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 10.0)
                reduced = state.is_xla_gradients_synced
                optimizer.step()
                after = state.is_xla_gradients_synced
                optimizer.zero_grad()
            flags.append((accelerator.sync_gradients, before, reduced, after))
            losses.append(loss.item())
    assert set(flags) == {(False, False, False, False), (True, False, True, False)}
    assert losses[-1] < losses[0] / 2


def test_weights_equal_those_of_the_cpu() -> None:
    def train(accelerator: Accelerator) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(_digits(), batch_size=32))
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
        return torch.nn.utils.parameters_to_vector(model.parameters()).detach().cpu()

    on_xla = train(Accelerator(gradient_accumulation_steps=2))
    for singleton in (AcceleratorState, PartialState, GradientState):
        singleton.reset()
    on_cpu = train(Accelerator(gradient_accumulation_steps=2, cpu=True))
    torch.testing.assert_close(on_xla, on_cpu, atol=1e-5, rtol=1e-4)

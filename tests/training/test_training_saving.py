"""What ``Accelerator`` writes and reads in one process; ``test_training_checkpoint`` has several, and kills them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset

from nbstate.errors import ArgumentTypeError, ArgumentValueError, CheckpointError
from nbstate.training import Accelerator, ProjectConfiguration
from nbstate.training.weights import parse_size


class Count:
    def __init__(self, seen: int = 0) -> None:
        self.seen = seen

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def build(**options: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, **options)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loader = DataLoader(TensorDataset(torch.ones(8, 4), torch.ones(8, 1)), batch_size=2)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler, loader)


def train(accelerator: Any, model: Any, optimizer: Any, scheduler: Any, loader: Any) -> None:
    for x, y in loader:
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("safe", [True, False])
def test_what_was_saved_comes_back(tmp_path: Path, safe: bool) -> None:
    accelerator, *things = build()
    model, optimizer, scheduler, _ = things
    count = Count(3)
    accelerator.register_for_checkpointing(count)
    train(accelerator, *things)
    saved = flat(model).clone()
    place = accelerator.save_state(tmp_path / "here", safe_serialization=safe)
    drawn = torch.rand(3)
    rate = optimizer.param_groups[0]["lr"]
    moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
    train(accelerator, *things)
    count.seen = 9
    assert not torch.equal(flat(model), saved)
    assert accelerator.load_state(place) == place
    assert torch.equal(torch.rand(3), drawn)  # the random states too
    assert torch.equal(flat(model), saved)
    assert optimizer.param_groups[0]["lr"] == rate == scheduler.get_last_lr()[0]
    assert all(map(torch.equal, moments, (state["exp_avg"] for state in optimizer.state.values())))
    assert count.seen == 3


def test_names_and_the_limit_of_a_project(tmp_path: Path) -> None:
    project = ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True, total_limit=2)
    accelerator, model, *_ = build(project_config=project)
    for value in range(3):
        torch.nn.init.constant_(model[0].bias, value)
        accelerator.save_state()
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint_1", "checkpoint_2"]
    torch.nn.init.constant_(model[0].bias, 7.0)
    assert accelerator.load_state() == str(folder / "checkpoint_2")
    assert model[0].bias.tolist() == [2.0] * 8
    (folder / "checkpoint_2" / "checkpoint.json").unlink()  # as if it were not whole
    assert accelerator.load_state() == str(folder / "checkpoint_1")
    with pytest.raises(ArgumentValueError, match="without output_dir"):
        accelerator.save_state(tmp_path / "elsewhere")


def test_where_there_is_nothing_to_load_nothing_is_changed(tmp_path: Path) -> None:
    accelerator, model, *_ = build()
    before = flat(model).clone()
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        accelerator.load_state(tmp_path / "nothing")
    with pytest.raises(ArgumentValueError, match="needs input_dir"):
        accelerator.load_state()
    place = Path(accelerator.save_state(tmp_path / "half"))
    next(place.glob("*.safetensors")).unlink()
    torch.nn.init.constant_(model[0].bias, 7.0)
    with pytest.raises(CheckpointError):
        accelerator.load_state(place)
    assert model[0].bias.tolist() == [7.0] * 8
    assert not torch.equal(flat(model), before)


def test_only_what_can_be_saved_is_registered() -> None:
    accelerator, *_ = build()
    with pytest.raises(ArgumentTypeError, match="object lacks them"):
        accelerator.register_for_checkpointing(Count(), object())
    assert accelerator._registered == []


def test_hooks_see_models_and_may_take_weights_away(tmp_path: Path) -> None:
    accelerator, model, *_ = build()
    seen: list[Any] = []

    def on_save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        seen.append((models, len(weights)))
        Path(output_dir, "mine.txt").write_text("mine")

    handle = accelerator.register_save_state_pre_hook(on_save)
    accelerator.register_load_state_pre_hook(lambda models, input_dir: models.clear())
    place = Path(accelerator.save_state(tmp_path / "hooked"))
    assert seen == [([model], 1)]
    assert (place / "mine.txt").read_text() == "mine"
    torch.nn.init.constant_(model[0].bias, 7.0)
    accelerator.load_state(place)
    assert model[0].bias.tolist() == [7.0] * 8
    handle.remove()
    accelerator.save_state(tmp_path / "unhooked")
    assert len(seen) == 1


def test_files_of_the_users_stay_in_a_checkpoint_that_is_replaced(tmp_path: Path) -> None:
    accelerator, *_ = build()
    place = Path(accelerator.save_state(tmp_path / "here"))
    (place / "notes.txt").write_text("keep")
    accelerator.save_state(place)
    assert (place / "notes.txt").read_text() == "keep"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here"]


def test_a_model_is_saved_in_parts_with_an_index(tmp_path: Path) -> None:
    accelerator, model, *_ = build()
    accelerator.save_model(model, tmp_path, max_shard_size=150)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    parts: dict[str, torch.Tensor] = {}
    for name in set(index["weight_map"].values()):
        parts |= load_file(tmp_path / name)
    assert {name: value.tolist() for name, value in parts.items()} == {
        name: value.tolist() for name, value in model.state_dict().items()
    }
    accelerator.save_model(model, tmp_path / "whole", safe_serialization=False)
    assert torch.load(tmp_path / "whole" / "pytorch_model.bin")["0.bias"].tolist() == model[0].bias.tolist()


def test_sizes_as_people_write_them() -> None:
    assert (parse_size(7), parse_size("2KB"), parse_size("5GB")) == (7, 2000, 5 * 10**9)
    with pytest.raises(ArgumentValueError):
        parse_size("much")

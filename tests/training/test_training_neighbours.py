"""What other libraries train with runs unchanged inside a rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Ranks = Callable[..., list[Any]]


def train_with_transformers(folder: str) -> tuple[Any, ...]:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments

    class Config(PretrainedConfig):
        model_type = "tiny"

    class Net(PreTrainedModel):
        config_class = Config

        def __init__(self, config: Config) -> None:
            super().__init__(config)
            self.layer = torch.nn.Linear(4, 2)
            self.post_init()

        def _init_weights(self, module: torch.nn.Module) -> None: ...

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            y = self.layer(x)
            return {"loss": torch.nn.functional.cross_entropy(y, labels), "logits": y}

    torch.manual_seed(0)
    data = [{"x": torch.randn(4), "labels": torch.tensor(i % 2)} for i in range(18)]
    options = TrainingArguments(
        folder,
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(Net(Config()), options, train_dataset=data)
    steps = trainer.train().global_step
    wrapped = type(trainer.model_wrapped).__name__
    predictions = len(trainer.predict(data[:7]).predictions)
    return options.process_index, options.world_size, wrapped, steps, predictions, trainer.model.layer.weight.tolist()


def test_the_trainer_of_transformers_is_one_world(in_ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    # Not forked: the ranks would inherit that warnings are errors here.
    first, second = in_ranks(train_with_transformers, str(tmp_path), start_method="forkserver")
    assert first[:5] == (0, 2, "DistributedDataParallel", 3, 7)
    assert second[:5] == (1, 2, "DistributedDataParallel", 3, 7)
    assert first[5] == second[5]

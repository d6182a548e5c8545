"""The same data gives the same weights, on one process and on many."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from nbstate.training import Accelerator, DataLoaderConfiguration

Ranks = Callable[..., list[Any]]

GLOBAL_BATCH = 8
EPOCHS = 2


def digits(n: int) -> TensorDataset:
    pixels, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(pixels[:n] / 16, dtype=torch.float32), torch.tensor(labels[:n]))


def tiny_net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.Tanh(), torch.nn.Linear(16, 10))


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def reference(n: int, steps: int, filled: bool) -> torch.Tensor:
    """A plain loop over global batches on one process, without nbstate."""
    data = digits(n)
    model = tiny_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = [list(range(start, min(start + GLOBAL_BATCH, n))) for start in range(0, n, GLOBAL_BATCH)]
    if filled:
        batches[-1] += itertools.islice(itertools.cycle(range(n)), GLOBAL_BATCH - len(batches[-1]))
    for _ in range(EPOCHS):
        for number, batch in enumerate(batches, 1):
            pixels, labels = data[batch]
            (torch.nn.functional.cross_entropy(model(pixels), labels) / steps).backward()
            if number % steps == 0 or number == len(batches):
                optimizer.step()
                optimizer.zero_grad()
    return weights(model)


def train(n: int, steps: int, split: bool, dispatch: bool) -> tuple[torch.Tensor, int]:
    config = DataLoaderConfiguration(split_batches=split, dispatch_batches=dispatch)
    accelerator = Accelerator(gradient_accumulation_steps=steps, dataloader_config=config)
    model = tiny_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    size = GLOBAL_BATCH if split else GLOBAL_BATCH // accelerator.num_processes
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(digits(n), batch_size=size))
    seen = 0
    for _ in range(EPOCHS):
        for pixels, labels in loader:
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.cross_entropy(model(pixels), labels))
                optimizer.step()
                optimizer.zero_grad()
            seen += len(accelerator.gather_for_metrics(labels))
    return weights(accelerator.unwrap_model(model)), seen


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("n", [64, 61])
def test_one_process(n: int, steps: int) -> None:
    found, seen = train(n, steps, False, False)
    torch.testing.assert_close(found, reference(n, steps, filled=False))
    assert seen == EPOCHS * n


@pytest.mark.parametrize(("ranks", "n", "steps"), [(2, 64, 2), (2, 61, 2), (2, 61, 3), (4, 61, 2)])
def test_ranks(each_in_ranks: Ranks, ranks: int, n: int, steps: int) -> None:
    expected = reference(n, steps, filled=True)
    ways = [(n, steps, split, dispatch) for split, dispatch in [(False, False), (True, False), (False, True)]]
    for way, results in zip(ways, each_in_ranks(train, ways, ranks=ranks), strict=True):
        for found, seen in results:
            torch.testing.assert_close(found, expected, msg=lambda text, way=way: f"{way}: {text}")
            assert seen == EPOCHS * n, way

"""The same data gives the same weights, on one process and on many."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from nbstate.state import AcceleratorState, GradientAccumulationPlugin, GradientState
from nbstate.training import Accelerator, DataLoaderConfiguration
from nbstate.training.fully_shard import FullyShardedDataParallelPlugin

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


@dataclass(frozen=True)
class Way:
    """One combination of everything that must not change the numbers."""

    engine: str
    n: int
    steps: int
    loading: str

    def accelerator(self) -> Accelerator:
        config = DataLoaderConfiguration(
            split_batches=self.loading == "split", dispatch_batches=self.loading == "dispatched"
        )
        # Another layout than the last way's in this process.
        AcceleratorState.reset(reset_partial_state=False)
        return Accelerator(
            gradient_accumulation_steps=self.steps,
            dataloader_config=config,
            fsdp_plugin=FullyShardedDataParallelPlugin() if self.engine == "FSDP2" else None,
        )


WAYS = [
    Way(*each) for each in itertools.product(("DDP", "FSDP2"), (32, 29), (1, 2, 3), ("sharded", "split", "dispatched"))
]


def train(way: Way) -> tuple[torch.Tensor, list[int], str]:
    """The weights after two epochs, every label that was gathered, and what the model was spread by."""
    accelerator = way.accelerator()
    model = tiny_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    size = GLOBAL_BATCH if way.loading == "split" else GLOBAL_BATCH // accelerator.num_processes
    numbered = TensorDataset(*digits(way.n).tensors, torch.arange(way.n))
    # The optimizer first: it is made from parameters that sharding will replace.
    optimizer, model, loader = accelerator.prepare(optimizer, model, DataLoader(numbered, batch_size=size))
    seen: list[int] = []
    for _ in range(EPOCHS):
        for pixels, labels, index in loader:
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.cross_entropy(model(pixels), labels))
                optimizer.step()
                optimizer.zero_grad()
            seen += accelerator.gather_for_metrics(index).tolist()
    return whole_weights(model), seen, type(model).__name__


def whole_weights(model: torch.nn.Module) -> torch.Tensor:
    parts = (
        getattr(parameter, "full_tensor", lambda parameter=parameter: parameter)() for parameter in model.parameters()
    )
    return torch.cat([part.detach().flatten() for part in parts])


SPREAD = {"DDP": "DistributedDataParallel", "FSDP2": "FSDPSequential"}


def check(way: Way, found: tuple[torch.Tensor, list[int], str], ranks: int) -> None:
    trained, seen, kind = found
    torch.testing.assert_close(
        trained, reference(way.n, way.steps, filled=ranks > 1), msg=lambda text: f"{way} on {ranks} ranks: {text}"
    )
    assert seen == list(range(way.n)) * EPOCHS, (way, ranks)
    assert kind == (SPREAD[way.engine] if ranks > 1 else "Sequential"), (way, ranks)


def check_all(each_in_ranks: Ranks, ways: list[Way], ranks: int) -> None:
    for way, results in zip(ways, each_in_ranks(train, [(way,) for way in ways], ranks=ranks), strict=True):
        for found in results:
            check(way, found, ranks)


@pytest.mark.parametrize("engine", ["DDP", "FSDP2"])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_every_way_in_ranks(each_in_ranks: Ranks, engine: str, ranks: int) -> None:
    """Four ranks on two cores take longer: ``pytest -m long tests/training/test_training_numbers.py``."""
    check_all(each_in_ranks, [way for way in WAYS if way.engine == engine], ranks)


def test_uneven_data_in_four_ranks(each_in_ranks: Ranks) -> None:
    """Of the ways in four ranks those with most to go wrong."""
    check_all(each_in_ranks, [way for way in WAYS if way.n % GLOBAL_BATCH and way.steps == 3], ranks=4)


def test_one_process() -> None:
    for way in WAYS:
        GradientState.reset()
        check(way, train(way), ranks=1)


def steps_taken(way: Way, sync_with_dataloader: bool) -> list[str]:
    """For each batch of two epochs whether gradients are synchronised, and whether the weights have moved."""
    AcceleratorState.reset(reset_partial_state=False)
    accelerator = Accelerator(
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=way.steps, sync_with_dataloader=sync_with_dataloader
        ),
        dataloader_config=DataLoaderConfiguration(dispatch_batches=way.loading == "dispatched"),
        fsdp_plugin=FullyShardedDataParallelPlugin() if way.engine == "FSDP2" else None,
    )
    model = tiny_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(digits(way.n), batch_size=1))
    epochs = []
    for _ in range(2):
        flags = ""
        for pixels, labels in loader:
            before = whole_weights(model)
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.cross_entropy(model(pixels), labels))
                optimizer.step()
                optimizer.zero_grad()
            moved = not torch.equal(before, whole_weights(model))
            flags += {(True, True): "T", (False, False): "F"}.get((accelerator.sync_gradients, moved), "?")
        epochs.append(flags)
    return epochs


def test_the_weights_move_on_the_steps_that_synchronise_and_on_no_other(each_in_ranks: Ranks) -> None:
    """10 batches a rank by fours; the last one of an epoch counts, or the count carries on."""
    ways = [Way(engine, 20, 4, loading) for engine in ("DDP", "FSDP2") for loading in ("sharded", "dispatched")]
    expected = {True: ["FFFTFFFTFT"] * 2, False: ["FFFTFFFTFF", "FTFFFTFFFT"]}
    cases = [(way, sync) for way in ways for sync in expected]
    for (way, sync), found in zip(cases, each_in_ranks(steps_taken, cases), strict=True):
        assert found == (expected[sync],) * 2, way

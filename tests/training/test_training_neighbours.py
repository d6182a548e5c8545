"""What other libraries train with runs unchanged inside a rank, and its progress stands on the board like our own.

The functions below are what their users write. ``watched`` runs them in real ranks and brings back what the board said
in the end, in the words of the dashboard's columns.

Lightning Fabric is in the marked test only: ``pip install --no-deps lightning-fabric lightning-utilities``, then
``pytest -m long tests/training/test_training_neighbours.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nbstate.dashboard.ranks import build_columns
from nbstate.launch.launcher import notebook_launcher
from nbstate.telemetry.board import Flag, RankSnapshot

HUNG = 60.0
Ranks = Callable[..., list[Any]]


def watched(function: Callable[..., Any], *args: Any, ranks: int = 2) -> tuple[list[Any], list[RankSnapshot]]:
    """Run in real ranks; what they returned, and the board as they left it."""
    # Not forked: the ranks would inherit that warnings are errors here.
    launch = notebook_launcher(
        function,
        args,
        num_processes=ranks,
        start_method="forkserver",
        device="cpu",
        dashboard=False,
        timeout=HUNG,
        block=False,
    )
    results = launch.results()
    return results, [rank.board for rank in launch.ranks]


def strips(board: list[RankSnapshot]) -> list[str]:
    """For each rank the flags of its steps: 1 synchronised, 0 accumulated."""
    return list(build_columns(board, 0, kind="finished", guilty=())["strip"])


def train_with_accelerate(batches: int, accumulate: int, epochs: int, hold: bool = False) -> dict[str, Any]:
    import torch
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin

    from nbstate.telemetry import probe

    def on_board(name: str) -> int:
        return probe._pen.slot.read(name)  # type: ignore[union-attr]

    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=accumulate, sync_with_dataloader=not hold),
    )
    rows = 4 * accelerator.num_processes * batches - 3  # the last global batch lacks three
    data = torch.utils.data.TensorDataset(torch.randn(rows, 4), torch.randint(0, 2, (rows,)))
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    flags, remainders, epochs_seen = [], [], []
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            state = accelerator.gradient_state
            flags.append(((on_board("flags") & 2) // 2, (on_board("flags") & 4) // 4))
            assert flags[-1] == (int(state.sync_gradients), int(state.end_of_dataloader))
            remainders.append((on_board("remainder"), state.remainder))
            epochs_seen.append(on_board("epoch"))
        accelerator.wait_for_everyone()
    return {"flags": flags, "remainders": remainders, "epochs": epochs_seen, "in_loader": on_board("flags") & 32}


def test_the_accelerator_of_accelerate_fills_the_columns() -> None:
    results, board = watched(train_with_accelerate, 5, 2, 2)
    assert strips(board) == ["0101101011"] * 2
    for result, snapshot in zip(results, board, strict=True):
        assert (snapshot.step, snapshot.optimizer_steps, snapshot.barrier, snapshot.epoch) == (10, 6, 2, 1)
        assert snapshot.num_steps == 2
        assert snapshot.flag(Flag.SYNC_WITH_DATALOADER)
        assert [end for _, end in result["flags"]] == [0, 0, 0, 0, 1] * 2
        assert all(shown == real == 5 for shown, real in result["remainders"])
        assert result["epochs"] == [0] * 5 + [1] * 5
        assert not result["in_loader"]
        assert not snapshot.flag(Flag.END_OF_DATALOADER)


def test_a_count_that_carries_over_shows_as_such() -> None:
    _, board = watched(train_with_accelerate, 5, 2, 2, True)
    assert strips(board) == ["0101010101"] * 2
    assert not any(snapshot.flag(Flag.SYNC_WITH_DATALOADER) for snapshot in board)


def test_accelerate_on_one_rank_fills_the_columns() -> None:
    _, (snapshot,) = watched(train_with_accelerate, 5, 2, 1, ranks=1)
    assert strips([snapshot]) == ["01011"]
    assert (snapshot.step, snapshot.optimizer_steps) == (5, 3)


def train_with_no_sync() -> None:
    import contextlib

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        sync = step % 3 == 2
        with contextlib.nullcontext() if sync else model.no_sync():
            model(torch.randn(4, 4)).sum().backward()
        if sync:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        model(torch.randn(4, 4))  # an evaluation is no step
    dist.barrier()
    dist.destroy_process_group()


def test_plain_ddp_with_no_sync_fills_the_columns() -> None:
    _, board = watched(train_with_no_sync)
    assert strips(board) == ["001001"] * 2
    assert [(s.step, s.optimizer_steps, s.barrier) for s in board] == [(6, 2, 1)] * 2


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


def test_the_trainer_of_transformers_is_one_world_and_fills_the_columns(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    (first, second), board = watched(train_with_transformers, str(tmp_path))
    assert first[:5] == (0, 2, "DistributedDataParallel", 3, 7)
    assert second[:5] == (1, 2, "DistributedDataParallel", 3, 7)
    assert first[5] == second[5]
    # Five batches an epoch, two to a step, the last one alone: 0 1 0 1 1.
    assert strips(board) == ["01011"] * 2
    assert [(s.step, s.optimizer_steps) for s in board] == [(5, 3)] * 2
    assert all(s.collective for s in board)


def train_with_fabric() -> tuple[int, int]:
    import torch
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model, optimizer = fabric.setup(net := torch.nn.Linear(4, 2), torch.optim.SGD(net.parameters(), lr=0.1))
    for step in range(6):
        sync = step % 3 == 2
        with fabric.no_backward_sync(model, enabled=not sync):
            fabric.backward(model(torch.randn(4, 4)).sum())
        if sync:
            optimizer.step()
            optimizer.zero_grad()
    fabric.barrier()
    return fabric.global_rank, fabric.world_size


@pytest.mark.long
def test_lightning_fabric_fills_the_columns() -> None:
    pytest.importorskip("lightning_fabric", reason="lightning-fabric is not installed")
    results, board = watched(train_with_fabric)
    assert results == [(0, 2), (1, 2)]
    assert strips(board) == ["001001"] * 2
    assert all((s.step, s.optimizer_steps) == (6, 2) and s.barrier >= 1 for s in board)


def test_a_loop_in_an_accelerate_that_has_changed_goes_on(in_ranks: Ranks) -> None:
    def train() -> list[int]:
        import accelerate.state as theirs

        from nbstate.telemetry import neighbours

        del theirs.GradientState._remove_dataloader
        neighbours.look()
        untouched = theirs.GradientState._set_sync_gradients
        train_with_no_sync()
        return [untouched is theirs.GradientState._set_sync_gradients, not hasattr(untouched, "__wrapped__")]

    assert in_ranks(train, start_method="forkserver") == [[True, True]] * 2


def test_methods_are_put_back(in_ranks: Ranks) -> None:
    def train() -> list[bool]:
        import accelerate.state as theirs

        from nbstate.telemetry import collectives, neighbours

        names = ("_set_sync_gradients", "_add_dataloader", "_remove_dataloader")
        bare = [getattr(theirs.GradientState, name) for name in names]
        neighbours.look()
        neighbours.look()
        wrapped = [getattr(theirs.GradientState, name).__wrapped__ for name in names]
        collectives.uninstall()
        return [wrapped == bare, [getattr(theirs.GradientState, name) for name in names] == bare]

    assert in_ranks(train, ranks=1, start_method="forkserver") == [[True, True]]

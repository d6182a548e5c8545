"""What needs a CUDA device: run with ``pytest -m gpu`` on a machine that has one."""

from __future__ import annotations

import os

import pytest
import torch

from nbstate import Accelerator, PartialState, last_launch, notebook_launcher

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]

SHARED = {"NBSTATE_SHARE_DEVICES": "1"}


def where() -> tuple[int, str, str | None, float]:
    state = PartialState()
    x = torch.ones(4, device=state.device) * (state.process_index + 1)
    if state.num_processes > 1:
        torch.distributed.all_reduce(x)
    state.wait_for_everyone()
    return state.process_index, str(state.device), state.backend, float(x[0])


@pytest.fixture
def touched() -> None:
    """The kernel has used CUDA before it launches."""
    torch.ones(1, device="cuda")


@pytest.mark.usefixtures("touched")
@pytest.mark.parametrize("start_method", ["auto", "forkserver", "spawn"])
def test_one_rank_on_the_gpu_though_the_kernel_used_it(start_method: str) -> None:
    assert notebook_launcher(where, num_processes=1, start_method=start_method) == [(0, "cuda:0", None, 1.0)]


@pytest.mark.usefixtures("touched")
def test_a_fork_is_refused_once_the_kernel_used_the_gpu() -> None:
    with pytest.raises(RuntimeError, match="cuda was already used in this process"):
        notebook_launcher(where, num_processes=1, start_method="fork")


def test_two_ranks_share_one_gpu_when_asked_to() -> None:
    count = torch.cuda.device_count()
    ranks = count + 1
    results = notebook_launcher(where, num_processes=ranks, env=SHARED)
    total = float(sum(range(1, ranks + 1)))
    assert [(r[0], r[1], r[3]) for r in results] == [(i, f"cuda:{i % count}", total) for i in range(ranks)]


def test_more_ranks_than_gpus_are_refused_with_both_numbers() -> None:
    count = torch.cuda.device_count()
    with pytest.raises(ValueError, match=rf"num_processes={count + 1}, but this machine has {count} cuda"):
        notebook_launcher(where, num_processes=count + 1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each of two ranks")
def test_nccl_connects_one_rank_per_gpu() -> None:
    results = notebook_launcher(where)
    count = torch.cuda.device_count()
    total = float(sum(range(1, count + 1)))
    assert results == [(i, f"cuda:{i}", "nccl", total) for i in range(count)]


def train() -> float:
    accelerator = Accelerator(mixed_precision="bf16")
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=8))
    for (x,) in loader:
        with accelerator.accumulate(model):
            loss = model(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return float(loss)


def test_training_shows_the_devices_memory_on_the_board() -> None:
    assert notebook_launcher(train, num_processes=1)[0] > 0
    launch = last_launch()
    assert launch is not None
    board = launch.ranks[0].board
    assert board.device == "cuda:0"
    assert 0 < board.memory_used <= board.memory_total


def test_the_cpu_can_be_asked_for_on_a_machine_with_gpus() -> None:
    assert [r[1:3] for r in notebook_launcher(where, num_processes=2, device="cpu")] == [("cpu", "gloo")] * 2
    assert os.environ.get("ACCELERATE_USE_CPU") is None

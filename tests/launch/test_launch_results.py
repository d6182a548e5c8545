"""One cell to N ranks and back: results in rank order, one world, in every start method."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

import nbstate
from nbstate import NestedLaunchError, PartialState, RankError, notebook_launcher


def world() -> tuple[int, int, str, str, str]:
    state = PartialState()
    state.wait_for_everyone()
    return (
        state.process_index,
        state.num_processes,
        str(state.backend),
        state.distributed_type.value,
        str(state.device),
    )


def test_cpu_ranks_are_one_gloo_world(start_method: str) -> None:
    assert notebook_launcher(world, num_processes=2, start_method=start_method) == [
        (0, 2, "gloo", "MULTI_CPU", "cpu"),
        (1, 2, "gloo", "MULTI_CPU", "cpu"),
    ]


def slow_first(x: int, *, y: int) -> tuple[int, int]:
    rank = int(os.environ["RANK"])
    time.sleep(0.3 if rank == 0 else 0.0)
    return rank, x + y


def test_results_stand_in_rank_order_not_in_order_of_arrival(start_method: str) -> None:
    results = notebook_launcher(slow_first, (1,), num_processes=3, kwargs={"y": 2}, start_method=start_method)
    assert results == [(0, 3), (1, 3), (2, 3)]


def plain_torch() -> list[float]:
    dist.init_process_group("gloo")
    x = torch.ones(2) * (dist.get_rank() + 1)
    dist.all_reduce(x)
    return x.tolist()


def test_plain_init_process_group_works(start_method: str) -> None:
    assert notebook_launcher(plain_torch, num_processes=2, start_method=start_method) == [[3.0, 3.0]] * 2


def build_and_destroy_three_times() -> list[float]:
    seen = []
    for _ in range(3):
        dist.init_process_group("gloo")
        x = torch.ones(1)
        dist.all_reduce(x)
        seen.append(x.item())
        dist.destroy_process_group()
    return seen


def test_a_second_process_group_does_not_read_the_first_ones_addresses() -> None:
    assert notebook_launcher(build_and_destroy_three_times, num_processes=2, timeout=30) == [[2.0] * 3] * 2


def test_one_rank_alone(start_method: str) -> None:
    assert notebook_launcher(world, num_processes=1, start_method=start_method) == [(0, 1, "None", "NO", "cpu")]


def with_accelerate() -> tuple[int, str, float]:
    import accelerate

    accelerator = accelerator_of = accelerate.Accelerator()
    total = accelerator_of.reduce(torch.ones(1), "sum")
    return accelerator.process_index, accelerator.mixed_precision, total.item()


def test_accelerates_own_accelerator_runs_unchanged_in_a_rank() -> None:
    results = notebook_launcher(with_accelerate, num_processes=2, mixed_precision="bf16", start_method="forkserver")
    assert results == [(0, "bf16", 2.0), (1, "bf16", 2.0)]


def environment() -> dict[str, str]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "FORK_LAUNCHED", "MINE")
    return {name: os.environ.get(name, "") for name in names}


def test_launch_variables_and_env(start_method: str) -> None:
    results = notebook_launcher(environment, num_processes=2, env={"MINE": "yes"}, start_method=start_method)
    assert results[1] == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "FORK_LAUNCHED": "1",
        "MINE": "yes",
    }
    assert "MINE" not in os.environ


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_per_rank(start_method: str, threads: int) -> None:
    results = notebook_launcher(
        torch.get_num_threads, num_processes=2, threads_per_rank=threads, start_method=start_method
    )
    assert results == [threads, threads]


@pytest.mark.parametrize("wanted", [29500, 0])
def test_a_port_that_is_taken_does_not_matter_unless_asked_for(wanted: int) -> None:  # C02
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # 29500, torch's usual one, may be taken by others already
            taken.bind(("127.0.0.1", wanted))
            taken.listen()
        port = wanted or taken.getsockname()[1]
        assert notebook_launcher(plain_torch, num_processes=2) == [[3.0, 3.0]] * 2
        with pytest.raises(ValueError, match=f"port {port} of 127.0.0.1 cannot be had"):
            notebook_launcher(plain_torch, num_processes=2, use_port=port)


def test_a_port_that_is_free_is_used() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = notebook_launcher(lambda: os.environ["MASTER_PORT"], num_processes=2, use_port=port)
    assert results == [str(port)] * 2


def bf16_then_no() -> str:
    return nbstate.AcceleratorState().mixed_precision


def test_launch_twice_with_other_settings(start_method: str) -> None:  # C01
    first = notebook_launcher(bf16_then_no, num_processes=2, mixed_precision="bf16", start_method=start_method)
    second = notebook_launcher(bf16_then_no, num_processes=3, mixed_precision="no", start_method=start_method)
    assert first == ["bf16"] * 2
    assert second == ["no"] * 3


def test_a_state_built_before_the_fork_is_not_inherited() -> None:
    PartialState()
    try:
        assert [r[:2] for r in notebook_launcher(world, num_processes=2, start_method="fork")] == [(0, 2), (1, 2)]
        assert PartialState().num_processes == 1
    finally:
        PartialState().reset()


def launch_inside() -> None:
    notebook_launcher(environment, num_processes=2)


def test_a_launch_inside_a_rank_is_refused(start_method: str) -> None:  # C28
    with pytest.raises(RankError, match="only the notebook itself can launch ranks") as caught:
        notebook_launcher(launch_inside, num_processes=1, start_method=start_method)
    assert caught.value.cause_type == NestedLaunchError.__name__


def matmul_and_backward() -> tuple[float, int]:
    x = torch.randn(256, 256, requires_grad=True)
    (x @ x).sum().backward()
    assert x.grad is not None
    return float(x.grad.isfinite().all()), torch.get_num_threads()


def test_a_kernel_that_computed_can_launch_a_function_that_computes(start_method: str) -> None:  # C22
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        matmul_and_backward()
        results = notebook_launcher(
            matmul_and_backward, num_processes=2, threads_per_rank=2, start_method=start_method, timeout=60
        )
    finally:
        torch.set_num_threads(before)
    assert results == [(1.0, 2), (1.0, 2)]


def test_two_launches_from_two_threads(start_method: str) -> None:  # C29
    results: dict[int, object] = {}

    def go(number: int) -> None:
        results[number] = notebook_launcher(
            plain_with, (number,), num_processes=2, start_method=start_method, timeout=60
        )

    threads = [threading.Thread(target=go, args=(number,)) for number in (1, 2)]
    if start_method == "fork":  # each thread looks busy to the other's preflight
        go(1), go(2)
    else:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert results == {1: [1.0 * 2] * 2, 2: [2.0 * 2] * 2}


def plain_with(number: int) -> float:
    dist.init_process_group("gloo")
    x = torch.ones(1) * number
    dist.all_reduce(x)
    return x.item()


def exits_cleanly() -> None:
    sys.exit(0)


def test_sys_exit_zero_is_a_return(start_method: str) -> None:
    assert notebook_launcher(exits_cleanly, num_processes=2, start_method=start_method) == [None, None]


def reads_stdin_and_runs_a_program() -> tuple[str, str]:
    echoed = subprocess.run(["echo", "hello"], capture_output=True, text=True, check=True)
    return sys.stdin.read(), echoed.stdout


def test_stdin_is_empty_and_programs_run(start_method: str) -> None:  # C40
    assert (
        notebook_launcher(reads_stdin_and_runs_a_program, num_processes=2, start_method=start_method)
        == [("", "hello\n")] * 2
    )


def loader_workers() -> list[int]:
    from torch.utils.data import DataLoader

    return sorted(int(x) for batch in DataLoader(list(range(8)), batch_size=2, num_workers=2) for x in batch)


def test_a_data_loader_with_workers_runs_in_a_rank(start_method: str) -> None:  # C24
    assert (
        notebook_launcher(loader_workers, num_processes=2, start_method=start_method, timeout=60)
        == [list(range(8))] * 2
    )


def test_ranks_listen_on_loopback_only() -> None:
    def listening() -> list[str]:
        import psutil

        PartialState().wait_for_everyone()
        connections = psutil.Process().net_connections(kind="inet")
        addresses = sorted({c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN})
        PartialState().wait_for_everyone()
        return addresses

    for addresses in notebook_launcher(listening, num_processes=2):
        assert set(addresses) <= {"127.0.0.1", "::1"}


def test_ranks_that_return_right_after_they_met_do_not_break_the_others(start_method: str) -> None:
    for _ in range(2 if start_method == "spawn" else 15):
        results = notebook_launcher(lambda: PartialState().process_index, num_processes=4, start_method=start_method)
        assert results == [0, 1, 2, 3]

"""Functions that are slow, and healthy: none may raise an alarm. Each goes on for about ``LIFE`` seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from nbstate import PartialState
from nbstate.telemetry import probe

LIFE = 2.0
CORPUS: list[Callable[[], Any]] = []


def healthy(function: Callable[[], Any]) -> Callable[[], Any]:
    """Put a function into the corpus."""
    CORPUS.append(function)
    return function


def pauses(seconds: float) -> Iterator[int]:
    """Numbers, with a pause before each, until life is over; the same count on all ranks."""
    for number in range(round(LIFE / seconds)):
        time.sleep(seconds)
        yield number


def compute(seconds: float = LIFE) -> None:
    """Keep a processor busy."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))


@healthy
def computes_while_others_wait() -> None:
    state = PartialState()
    if state.is_main_process:
        compute()
    state.wait_for_everyone()


@healthy
def multiplies_matrices_while_others_wait() -> None:
    state = PartialState()
    if state.is_main_process:
        end = time.monotonic() + LIFE
        while time.monotonic() < end:
            torch.ones(200, 200) @ torch.ones(200, 200)
    dist.all_reduce(torch.ones(2))


@healthy
def computes_in_another_thread_while_others_wait() -> None:
    state = PartialState()
    if state.is_main_process:
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
    state.wait_for_everyone()


@healthy
def lets_a_child_compute_while_others_wait() -> None:
    state = PartialState()
    if state.is_main_process:
        work = f"import time\nend = time.monotonic() + {LIFE}\nwhile time.monotonic() < end: pass"
        subprocess.run([sys.executable, "-c", work], check=True)
    state.wait_for_everyone()


@healthy
def saves_while_others_wait() -> None:
    state = PartialState()
    if state.is_main_process:
        with tempfile.TemporaryFile() as file:
            for _ in pauses(0.1):
                file.write(os.urandom(1 << 20))
                file.flush()
    state.wait_for_everyone()


@healthy
def reads_while_others_wait() -> None:
    state = PartialState()
    if state.is_main_process:
        for _ in pauses(0.1):
            with open(torch.__file__, "rb") as file:
                file.read()
            with open(torch.functional.__file__, "rb") as file:
                file.read()
    dist.broadcast(torch.ones(2), src=0)


@healthy
def sleeps_all_together() -> None:
    PartialState()
    time.sleep(LIFE)


@healthy
def takes_slow_steps() -> None:
    PartialState()
    for _ in pauses(0.3):
        probe.step(sync=True)


@healthy
def is_late_by_turns() -> None:
    state = PartialState()
    for number in range(5):
        if number % state.num_processes == state.process_index:
            time.sleep(0.3)
        state.wait_for_everyone()


@healthy
def passes_a_token_around() -> None:
    state = PartialState()
    size, rank, token = state.num_processes, state.process_index, torch.ones(1)
    for _ in range(2):
        if rank == 0:
            dist.send(token, dst=1)
            dist.recv(token, src=size - 1)
        else:
            dist.recv(token, src=rank - 1)
            time.sleep(0.3)
            dist.send(token, dst=(rank + 1) % size)


@healthy
def works_in_pairs_of_different_speed() -> None:
    state = PartialState()
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    mine = groups[state.process_index // 2]
    for _ in pauses(0.2 if state.process_index < 2 else 0.3):
        dist.all_reduce(torch.ones(2), group=mine)


@healthy
def overlaps_a_collective_with_computing() -> None:
    state = PartialState()
    for _ in range(3):
        work = dist.all_reduce(torch.ones(1 << 16), async_op=True)
        compute(0.2 + 0.3 * (state.process_index == 1))
        work.wait()


@healthy
def waits_for_handles_in_different_orders() -> None:
    state = PartialState()
    groups = [dist.new_group([0, 1, 2]), dist.new_group([0, 1, 2])]
    if state.process_index == 2:
        compute(1.0)
    works = [dist.all_reduce(torch.ones(4), group=group, async_op=True) for group in groups]
    for work in works if state.process_index else reversed(works):
        work.wait()


@healthy
def exchanges_with_handles() -> None:
    state = PartialState()
    size, rank = state.num_processes, state.process_index
    for _ in pauses(0.3):
        works = [
            dist.isend(torch.ones(8), dst=(rank + 1) % size),
            dist.irecv(torch.ones(8), src=(rank - 1) % size),
        ]
        for work in works:
            work.wait()


@healthy
def finishes_early_where_nobody_needs_it() -> None:
    state = PartialState()
    state.wait_for_everyone()
    if state.process_index:
        return
    time.sleep(LIFE)


@healthy
def one_branch_does_more_of_its_own() -> None:
    state = PartialState()
    for _ in range(4):
        if state.is_main_process:
            compute(0.3)
        dist.barrier()


class Slow(Dataset):  # type: ignore[type-arg]
    """A data set that takes its time."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        compute(0.2)
        return torch.ones(4)


@healthy
def waits_for_slow_loader_workers() -> None:
    state = PartialState()
    if state.process_index == 1:
        for _ in DataLoader(Slow(), num_workers=1):
            pass
    state.wait_for_everyone()


@healthy
def trains_with_ddp_at_different_speeds() -> None:
    state = PartialState()
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    for _ in range(4):
        compute(0.1 + 0.2 * (state.process_index == 1))
        model(torch.ones(2, 4)).sum().backward()


@healthy
def is_stopped_for_a_moment() -> None:
    state = PartialState()
    if state.process_index == 1:
        subprocess.Popen(["sh", "-c", f"sleep 0.2; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        os.wait()
    state.wait_for_everyone()


@healthy
def sends_a_lot() -> None:
    PartialState()
    end = torch.tensor([time.monotonic() + LIFE])
    dist.broadcast(end, src=0)
    x = torch.ones(1 << 18)
    for _ in range(40):
        dist.all_reduce(x)
        x.fill_(1.0)


@healthy
def gathers_objects_of_different_size() -> None:
    state = PartialState()
    for number in pauses(0.3):
        found: list[Any] = [None] * state.num_processes
        dist.all_gather_object(found, "x" * (10 ** (state.process_index + number % 3)))


@healthy
def prints_and_pauses() -> None:
    state = PartialState()
    for number in pauses(0.3):
        state.print(number)
        state.wait_for_everyone()


@healthy
def starts_late() -> None:
    if os.environ["RANK"] == "1":
        compute(1.0)
    PartialState()

"""The corpus of faults: small functions that come to a stand, each with the verdict that is expected of it.

The lines that a verdict has to name carry a mark at their end: ``# waits`` for an operation, ``# guilty`` for the line
of a rank in its own code.
"""

from __future__ import annotations

import inspect
import os
import queue
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from nbstate import PartialState

LONG = 600.0
LARGE = 1 << 24


@dataclass(frozen=True)
class Fault:
    """One function with a fault: on how many ranks it runs, and what is to be said of it.

    ``operation`` is a pattern that the sentence must contain, and ``also`` another one.
    """

    function: Callable[[], Any]
    kind: str
    guilty: tuple[int, ...]
    operation: str
    ranks: int = 2
    also: str = ""

    @property
    def name(self) -> str:
        """The function's."""
        return self.function.__name__

    def wrong(self, verdict: Any) -> list[str]:
        """What is wrong with a verdict."""
        found = []
        if verdict.kind != self.kind:
            found.append(f"kind {verdict.kind}, not {self.kind}")
        if verdict.ranks != self.guilty:
            found.append(f"ranks {verdict.ranks}, not {self.guilty}")
        found += self.unsaid(verdict.sentence)
        lines = set(marked(self.function))
        if set(verdict.lines) != lines:
            found.append(f"lines {verdict.lines}, not {sorted(lines)}")
        return [*found, verdict.sentence, *verdict.evidence] if found else []

    def unsaid(self, text: str) -> list[str]:
        """What a text should say and does not: the operation, the ranks and the lines where ranks wait."""
        patterns = [self.operation, self.also, *map(re.escape, marked(self.function, "waits"))]
        return [f"no {pattern!r} in {text!r}" for pattern in patterns if not re.search(pattern, text)]


def marked(function: Callable[..., Any], mark: str = "(waits|guilty)") -> list[str]:
    """The marked lines of a function, as a verdict names them."""
    source, first = inspect.getsourcelines(function)
    return [f"{Path(__file__).name}:{first + i}" for i, line in enumerate(source) if re.search(f"# {mark}$", line)]


CORPUS: list[Fault] = []


def fault(
    kind: str, guilty: tuple[int, ...], operation: str, ranks: int = 2, also: str = ""
) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Put a function into the corpus."""

    def enter(function: Callable[[], Any]) -> Callable[[], Any]:
        CORPUS.append(Fault(function, kind, guilty, operation, ranks, also))
        return function

    return enter


# Who has gone


@fault("missing", (1, 2), r"rank 0 waits in barrier #1", ranks=3, also="ranks 1 and 2 have finished")
def barrier_in_a_one_rank_branch() -> None:
    state = PartialState()
    if state.is_main_process:
        state.wait_for_everyone()  # waits


@fault("missing", (1,), r"barrier #2", also="rank 1 has finished without it")
def barrier_in_a_branch_before_a_common_one() -> None:
    state = PartialState()
    if state.is_main_process:
        dist.barrier()
    dist.barrier()  # waits


@fault("missing", (1,), "init_process_group")
def returns_before_the_ranks_meet() -> None:
    if os.environ["RANK"] == "1":
        return
    PartialState()  # waits


@fault("missing", (2,), r"all_gather #2", ranks=3)
def returns_early_out_of_a_collective() -> None:
    state = PartialState()
    if state.process_index == 2:
        return
    dist.all_gather([torch.ones(2)] * 3, torch.ones(2))  # waits


@fault("missing", (1,), "recv from rank 1")
def receives_from_who_has_finished() -> None:
    state = PartialState()
    if state.process_index == 0:
        dist.recv(torch.ones(2), src=1)  # waits


@fault("missing", (2,), "all_reduce of ranks 0 and 2", ranks=3)
def a_member_of_a_group_has_finished() -> None:
    state = PartialState()
    group = dist.new_group([0, 2])
    if state.process_index == 0:
        dist.all_reduce(torch.ones(2), group=group)  # waits


@fault("missing", (1,), r"all_reduce #2")
def waits_for_a_handle_that_nobody_shares() -> None:
    state = PartialState()
    if state.process_index == 0:
        work = dist.all_reduce(torch.ones(2), async_op=True)
        work.wait()  # waits


# Different collectives


@fault("mismatch", (0, 1), r"rank 0 in all_reduce #2 .*rank 1 in broadcast #2")
def different_collectives() -> None:
    state = PartialState()
    if state.process_index == 0:
        dist.all_reduce(torch.ones(2))  # waits
    else:
        dist.broadcast(torch.ones(2), src=0)  # waits


@fault("mismatch", (2,), r"ranks 0 and 1 in barrier #1 .*rank 2 in all_reduce #2", ranks=3)
def one_rank_swallows_an_error_and_goes_on() -> None:
    state = PartialState()
    try:
        if state.process_index == 2:
            raise ValueError("a bad batch")
        dist.barrier()  # waits
    except ValueError:
        pass
    dist.all_reduce(torch.ones(2))  # waits


@fault("mismatch", (0, 1), r"different dtypes meet: .*all_reduce #2 .* with 8 float32", ranks=3, also=r"with 8 int32")
def different_dtypes() -> None:
    state = PartialState()
    if state.process_index == 0:
        dist.all_reduce(torch.ones(8))  # waits
    elif state.process_index == 1:
        dist.all_reduce(torch.ones(8, dtype=torch.int32))  # waits
    else:
        time.sleep(LONG)


@fault(
    "mismatch", (0, 1), r"different shapes meet: .*all_gather #2 .* with 8 float32", ranks=3, also=r"with 4x4 float32"
)
def different_shapes() -> None:
    state = PartialState()
    shape = ((8,), (4, 4), ())[state.process_index]
    if state.process_index == 2:
        time.sleep(LONG)
    dist.all_gather([torch.ones(shape)] * 3, torch.ones(shape))  # waits


# Groups and pairs


@fault("order", (0, 1, 2), r"rank 0 in all_reduce of ranks 0 and 1 .* waits for rank 1", ranks=3)
def three_groups_in_a_circle() -> None:
    state = PartialState()
    pairs = [dist.new_group(pair) for pair in ([0, 1], [1, 2], [0, 2])]
    mine = pairs[state.process_index], pairs[state.process_index - 1]
    for group in mine:
        dist.all_reduce(torch.ones(2), group=group)  # waits


@fault("order", (0, 1), r"rank 0 in all_reduce of ranks 0 to 2", ranks=3)
def two_groups_in_different_orders() -> None:
    state = PartialState()
    all_three, pair = dist.new_group([0, 1, 2]), dist.new_group([0, 1])
    if state.process_index == 1:
        dist.all_reduce(torch.ones(2), group=pair)  # waits
    dist.all_reduce(torch.ones(2), group=all_three)  # waits
    if state.process_index == 0:
        dist.all_reduce(torch.ones(2), group=pair)


@fault("order", (0, 1), r"rank 1 in barrier #1 .* waits for rank 0", ranks=3)
def a_group_against_the_whole_world() -> None:
    state = PartialState()
    pair = dist.new_group([0, 1])
    if state.process_index == 0:
        dist.all_reduce(torch.ones(2), group=pair)  # waits
    dist.barrier()  # waits
    if state.process_index == 1:
        dist.all_reduce(torch.ones(2), group=pair)


@fault("deadlock", (0, 1), r"rank 0 in recv from rank 1 .*rank 1 in recv from rank 0")
def both_receive_first() -> None:
    state = PartialState()
    other = 1 - state.process_index
    dist.recv(torch.ones(2), src=other)  # waits
    dist.send(torch.ones(2), dst=other)


@fault("deadlock", (0, 1), r"rank 0 in send to rank 1 .*rank 1 in send to rank 0")
def both_send_first() -> None:
    state = PartialState()
    other = 1 - state.process_index
    dist.send(torch.ones(LARGE), dst=other)  # waits
    dist.recv(torch.ones(LARGE), src=other)


@fault("deadlock", (0, 1, 2), r"rank 0 in recv from rank 2", ranks=3)
def a_ring_that_only_receives() -> None:
    state = PartialState()
    dist.recv(torch.ones(2), src=(state.process_index - 1) % 3)  # waits
    dist.send(torch.ones(2), dst=(state.process_index + 1) % 3)


@fault("deadlock", (0, 1), r"irecv from rank 1")
def both_wait_for_a_handle_first() -> None:
    state = PartialState()
    other = 1 - state.process_index
    work = dist.irecv(torch.ones(2), src=other)
    work.wait()  # waits
    dist.send(torch.ones(2), dst=other)


@fault("deadlock", (0, 1), r"recv from rank 1")
def receives_while_the_sender_is_in_a_barrier() -> None:
    state = PartialState()
    if state.process_index == 0:
        dist.recv(torch.ones(2), src=1)  # waits
        dist.barrier()
    else:
        dist.barrier()  # waits
        dist.send(torch.ones(2), dst=0)


# Uneven loops


def step() -> torch.Tensor:
    """One step, counted as in any training loop, by its optimizer; returns the gradient."""
    weight = torch.ones(1, requires_grad=True)
    weight.grad = torch.ones(1)
    torch.optim.SGD([weight], lr=0.0).step()
    return weight.grad


@fault("uneven", (1,), r"all_reduce #5 .*rank 1 has finished", also="3 steps against 4")
def one_batch_more_on_one_rank() -> None:
    state = PartialState()
    for _ in range(4 - state.process_index):
        dist.all_reduce(step())  # waits


@fault("uneven", (1,), r"all_reduce #5 .*rank 1 in barrier #1", also="3 steps against 4")
def uneven_loops_before_a_barrier() -> None:
    state = PartialState()
    for _ in range(4 - state.process_index):
        dist.all_reduce(step())  # waits
    dist.barrier()  # waits


@fault("uneven", (1,), r"rank 0 in torch's own all_?reduce after 3 steps, rank 1 in barrier #1 .* after 2 steps")
def uneven_batches_in_plain_ddp() -> None:
    state = PartialState()
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    for _ in range(3 - state.process_index):
        model(torch.ones(2, 4)).sum().backward()  # guilty
    dist.barrier()  # waits


# Held up in its own code


@fault("blocked", (1,), r"rank 1 is \d\.\d s late for barrier #1")
def sleeps() -> None:
    state = PartialState()
    if state.process_index == 1:
        time.sleep(LONG)  # guilty
    state.wait_for_everyone()  # waits


@fault("blocked", (0,), r"rank 0 is .* late for all_reduce #2")
def takes_a_lock_twice() -> None:
    state = PartialState()
    lock = threading.Lock()
    if state.process_index == 0:
        lock.acquire()
        lock.acquire()  # guilty
    dist.all_reduce(torch.ones(2))  # waits


@fault("blocked", (1,), r"waiting for a lock, at")
def waits_for_an_event_of_its_own() -> None:
    state = PartialState()
    if state.process_index == 1:
        threading.Event().wait()  # guilty
    state.wait_for_everyone()  # waits


@fault("blocked", (1,), r"waiting for a queue, at")
def reads_an_empty_queue() -> None:
    state = PartialState()
    if state.process_index == 1:
        queue.Queue().get()  # guilty
    state.wait_for_everyone()  # waits


@fault("blocked", (0,), r"late for barrier #1")
def reads_a_pipe_that_nobody_writes() -> None:
    state = PartialState()
    if state.process_index == 0:
        here, _there = os.pipe()
        os.read(here, 1)  # guilty
    state.wait_for_everyone()  # waits


@fault("blocked", (1,), r"late for barrier #1")
def listens_to_a_socket() -> None:
    state = PartialState()
    if state.process_index == 1:
        here, _there = socket.socketpair()
        here.recv(1)  # guilty
    state.wait_for_everyone()  # waits


@fault("blocked", (1,), r"waiting for another process, at")
def waits_for_a_child() -> None:
    state = PartialState()
    if state.process_index == 1:
        subprocess.run(["sleep", "600"], check=True)  # guilty
    state.wait_for_everyone()  # waits


class Stuck(Dataset):  # type: ignore[type-arg]
    """A data set whose second item never comes."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index:
            time.sleep(LONG)
        return index


@fault("blocked", (1,), r"waiting for the data loader, at")
def a_data_loader_that_gives_nothing() -> None:
    state = PartialState()
    if state.process_index == 1:
        for _ in DataLoader(Stuck(), num_workers=1):  # guilty
            pass
    state.wait_for_everyone()  # waits


@fault("blocked", (1,), r"late for recv from rank 1")
def the_sender_sleeps() -> None:
    state = PartialState()
    if state.process_index == 1:
        time.sleep(LONG)  # guilty
        dist.send(torch.ones(2), dst=0)
    else:
        dist.recv(torch.ones(2), src=1)  # waits


@fault("blocked", (2,), r"late for barrier of ranks 0 and 2", ranks=3)
def a_member_of_a_group_sleeps() -> None:
    state = PartialState()
    group = dist.new_group([0, 2])
    if state.process_index == 2:
        time.sleep(LONG)  # guilty
    if state.process_index != 1:
        dist.barrier(group=group)  # waits


@fault("blocked", (1,), r"rank 1 is .* late for torch's own all_?reduce")
def sleeps_before_backward_in_plain_ddp() -> None:
    state = PartialState()
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    for index in range(3):
        loss = model(torch.ones(2, 4)).sum()
        if index == 2 and state.process_index == 1:
            time.sleep(LONG)  # guilty
        loss.backward()  # guilty


# Outside its code


@fault("halted", (1,), r"rank 1 is stopped by a signal.*rank 0 waits in barrier #1")
def stops_itself() -> None:
    state = PartialState()
    if state.process_index == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    state.wait_for_everyone()  # waits


@fault("lost", (1,), "rank 1 does not reach the store")
def looks_for_the_store_at_the_wrong_port() -> None:
    if os.environ["RANK"] == "1":
        os.environ["MASTER_PORT"] = "9"
    PartialState()  # waits

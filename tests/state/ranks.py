"""Real ranks for tests: forked processes with the launch variables set, as the launcher sets them.

The parent only relays: rank 0 hosts the store on a port of its own choosing and tells it, so no port is guessed and no
store server lives in a process that forks. Each rank reports through its pipe and stays until all have reported, or
the deadline has passed; then every process is ended, and that none is left is asserted here, for every test.
"""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import multiprocess
import torch
import torch.distributed as dist

from nbstate.state import reset_inherited


@dataclass(frozen=True)
class Outcome:
    """What one rank reported: a value, or an exception."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    text: str = ""


def run_ranks(
    function: Callable[[int], Any],
    world_size: int,
    *,
    env: Mapping[str, str] | None = None,
    per_rank: Callable[[int], Mapping[str, str]] | None = None,
    deadline: float = 40.0,
) -> list[Outcome | None]:
    """Run ``function(rank)`` in every rank.

    Returns the outcomes in rank order; None for a rank that ended, or was ended, without a word.
    """
    context = multiprocess.get_context("fork")
    pipes = [context.Pipe() for _ in range(world_size)]
    processes = []
    for rank in range(world_size):
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "NBSTATE_LAUNCH": "test",
            "NBSTATE_DEVICE": "cpu",
            "FORK_LAUNCHED": "1",
            **(env or {}),
            **(per_rank(rank) if per_rank else {}),
        }
        processes.append(context.Process(target=_rank, args=(function, rank, world_size, variables, pipes)))
    for process in processes:
        process.start()
    for _, child in pipes:
        child.close()
    try:
        outcomes = _collect([parent for parent, _ in pipes], time.monotonic() + deadline)
    finally:
        for parent, _ in pipes:
            parent.close()
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join(5)
        assert not any(process.is_alive() for process in processes)
    return [outcomes.get(rank) for rank in range(world_size)]


def values(outcomes: list[Outcome | None]) -> list[Any]:
    """Every rank's value; fails with the rank's own traceback where there is none."""
    for rank, outcome in enumerate(outcomes):
        assert outcome is not None, f"rank {rank} said nothing before the deadline"
        assert outcome.error is None, f"rank {rank} raised\n{outcome.text}"
    return [outcome.value for outcome in outcomes if outcome is not None]


def _collect(pipes: list[Connection], until: float) -> dict[int, Outcome]:
    open_pipes, outcomes = list(pipes), {}
    while open_pipes and time.monotonic() < until:
        for pipe in wait(open_pipes, timeout=max(0.0, until - time.monotonic())):
            try:
                message = pipe.recv()
            except (EOFError, OSError):
                open_pipes.remove(pipe)
                continue
            if isinstance(message, int):
                for other in pipes[1:]:
                    other.send(message)
            else:
                outcomes[message.rank] = message
                open_pipes.remove(pipe)
    return outcomes


def _rank(
    function: Callable[[int], Any], rank: int, world_size: int, variables: dict[str, str], pipes: list[Any]
) -> None:
    for index, (parent, child) in enumerate(pipes):
        parent.close()
        if index != rank:
            child.close()
    pipe = pipes[rank][1]
    outcome = Outcome(rank)
    try:
        # A pool of threads does not survive a fork.
        torch.set_num_threads(1)
        reset_inherited()
        if rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, world_size, True, timedelta(seconds=60), wait_for_workers=False)
            pipe.send(store.port)
            variables["MASTER_PORT"] = str(store.port)
        else:
            variables["MASTER_PORT"] = str(pipe.recv())
        os.environ.update(variables)
        outcome = Outcome(rank, value=function(rank))
    except BaseException as error:
        outcome = Outcome(rank, error=error, text=traceback.format_exc())
    try:
        pipe.send(outcome)
    except Exception:
        pipe.send(Outcome(rank, error=RuntimeError("the outcome could not be sent"), text=outcome.text))
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()  # until the parent closes: rank 0 must not take the store away from the others
    os._exit(0)

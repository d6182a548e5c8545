"""What each rank of a launch is told: its plan, and in it the environment it will have."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from nbstate.launch.environ import copy_environ
from nbstate.launch.plan import Fd, RankPlan
from nbstate.launch.preflight import Choice
from nbstate.launch.spec import LaunchSpec

__all__ = ["make_plans", "plan_again"]

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def make_plans(
    spec: LaunchSpec, choice: Choice, launch_id: str, port: int, listener: Fd, board: Fd, dumps: Sequence[Fd]
) -> list[RankPlan]:
    """One plan per rank, with directory, path and environment as they are in the kernel at this moment.

    Parameters
    ----------
    spec : LaunchSpec
        What was asked for.
    choice : Choice
        The start method, and what travels.
    launch_id : str
        Tells this launch from others.
    port : int
        Where the store will be.
    listener, board : Fd
        The bound socket for rank 0's store, and the board.
    dumps : sequence of Fd
        Where each rank writes its stacks; all attempts use the same.
    """
    forking = choice.start_method == "fork"
    directory = os.getcwd()
    return [
        RankPlan(
            rank=rank,
            world_size=spec.num_processes,
            parent=0,
            group=os.getpgrp(),
            env=_environment(spec, launch_id, port, rank),
            directory=directory,
            path=tuple(path or directory for path in sys.path),
            argv=tuple(sys.argv),
            threads=spec.threads_per_rank,
            board=board,
            listener=listener if rank == 0 else None,
            payload=choice.payload,
            direct=(spec.function, spec.args, spec.kwargs) if forking else None,
            forked_from_kernel=forking,
            dump=dumps[rank],
        )
        for rank in range(spec.num_processes)
    ]


def plan_again(plans: Sequence[RankPlan], port: int, listener: Fd, board: Fd, attempt: int) -> list[RankPlan]:
    """The same plans for another attempt.

    Parameters
    ----------
    plans : sequence of RankPlan
        Those of the attempt before.
    port, listener, board
        See ``make_plans``; each attempt has its own.
    attempt : int
        How many attempts there were before.
    """
    numbers = {"MASTER_PORT": str(port), "TORCHELASTIC_RESTART_COUNT": str(attempt), "NBSTATE_ATTEMPT": str(attempt)}
    return [
        replace(plan, env={**plan.env, **numbers}, board=board, listener=listener if plan.listener else None)
        for plan in plans
    ]


def _environment(spec: LaunchSpec, launch_id: str, port: int, rank: int) -> dict[str, str]:
    environment = {**copy_environ(), **spec.env}
    environment.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(spec.num_processes),
        LOCAL_WORLD_SIZE=str(spec.num_processes),
        MASTER_ADDR=spec.master_addr,
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        ACCELERATE_MIXED_PRECISION=spec.mixed_precision,
        ACCELERATE_USE_CPU="true" if spec.device == "cpu" else "false",
        FORK_LAUNCHED="1",
        TORCHELASTIC_RESTART_COUNT="0",
        NBSTATE_ATTEMPT="0",
        NBSTATE_LAUNCH=launch_id,
        NBSTATE_DEVICE=spec.device,
        OMP_NUM_THREADS=str(spec.threads_per_rank),
    )
    if spec.master_addr in _LOOPBACK and "GLOO_SOCKET_IFNAME" not in environment:
        # gloo would resolve the machine's name and listen there; ranks of one machine need loopback only
        environment["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    return environment

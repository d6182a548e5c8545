"""The states under launchers that are not ours: torchrun itself, and processes with MPI's or SLURM's variables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, values

from nbstate.state import PartialState

SCRIPT = """
import json, sys
import torch, torch.distributed as dist
from nbstate.state import PartialState

state = PartialState(cpu=True)
summed = torch.ones(1)
if state.use_distributed:
    dist.all_reduce(summed)
state.wait_for_everyone()
with state.main_process_first(), state.split_between_processes([1, 2, 3]) as part:
    told = dict(
        source=state.environment.source, rank=state.process_index, local=state.local_process_index,
        size=state.num_processes, kind=str(state.distributed_type.value), backend=state.backend,
        summed=int(summed), part=part, last=state.is_last_process,
    )
with open(sys.argv[1] + f"/{state.process_index}.json", "w") as file:
    json.dump(told, file)
state.wait_for_everyone()
state.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "told.py"
    path.write_text(SCRIPT)
    return path


def environment(**variables):
    root = str(Path(__file__).parents[2])
    base = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **variables}
    return base | {"PYTHONPATH": os.pathsep.join([root, base.get("PYTHONPATH", "")])}


def told_by(folder, size):
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def run_all(script, folder, variables, deadline=60):
    """Start one process for each set of variables; returns what each rank told."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder)],
            env=environment(**each),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for each in variables
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=deadline)
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return told_by(folder, len(variables))


def expected(source):
    common = {"source": source, "size": 2, "kind": "MULTI_CPU", "backend": "gloo", "summed": 2}
    return [
        {**common, "rank": 0, "local": 0, "part": [1, 2], "last": False},
        {**common, "rank": 1, "local": 1, "part": [3], "last": True},
    ]


def test_torchrun(script, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    done = subprocess.run(
        [*command, str(tmp_path)], env=environment(), capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    assert told_by(tmp_path, 2) == expected("torchrun")


def test_mpi_variables_are_enough(script, tmp_path):
    form = "OMPI_COMM_WORLD_{}"
    variables = [
        {
            **{form.format(name): "2" for name in ("SIZE", "LOCAL_SIZE")},
            **{form.format(name): str(rank) for name in ("RANK", "LOCAL_RANK")},
            "OMPI_MCA_ess_base_jobid": f"job-{os.getpid()}",
        }
        for rank in range(2)
    ]
    assert run_all(script, tmp_path, variables) == expected("mpi")


def test_slurm_variables_are_enough(script, tmp_path):
    step = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": f"{os.getpid()}", "SLURM_STEP_ID": "3"}
    variables = [{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), **step} for rank in range(2)]
    assert run_all(script, tmp_path, variables) == expected("slurm")


def test_a_kernel_in_a_batch_shell_does_not_wait_for_a_world(script, tmp_path):
    shell = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}
    (told,) = run_all(script, tmp_path, [shell])
    assert (told["source"], told["size"], told["kind"], told["part"]) == ("alone", 1, "NO", [1, 2, 3])


# Launchers whose ranks are told where to meet, by the names of their variables: rank, size, local rank, local size.
TOLD = {
    "MVAPICH2": ("mpi", [f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]),
    "MPICH": ("mpi", ["PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"]),
    "Intel MPI": ("mpi", ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]),
    "SLURM": ("slurm", ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"]),
    "a person": ("torchrun", ["RANK", "WORLD_SIZE"]),
}


@pytest.mark.parametrize("launcher", TOLD)
def test_launchers_that_name_the_meeting_point(launcher):
    source, names = TOLD[launcher]

    def variables(rank):
        ours = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NBSTATE_LAUNCH"), "")
        return ours | dict(zip(names, (str(rank), "2", str(rank), "2"), strict=False))

    def function(rank):
        state = PartialState()
        summed = torch.ones(1)
        dist.all_reduce(summed)
        state.wait_for_everyone()
        return (
            state.environment.source,
            state.process_index,
            state.local_process_index,
            state.num_processes,
            int(summed),
        )

    assert values(run_ranks(function, 2, per_rank=variables)) == [(source, 0, 0, 2, 2), (source, 1, 1, 2, 2)]

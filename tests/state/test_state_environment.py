from __future__ import annotations

import dataclasses

import pytest

from nbstate.errors import ArgumentValueError
from nbstate.state import read_environment

MEETING = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"}


def place(environ):
    found = read_environment(environ)
    return found.source, found.rank, found.world_size, found.local_rank, found.local_world_size


def test_alone_without_variables():
    found = read_environment({})
    assert found.alone
    assert place({}) == ("alone", 0, 1, 0, 1)
    assert (found.init_method, found.mixed_precision, found.device, found.launch_id) == ("", "no", "", "")
    assert (found.use_cpu, found.share_devices, found.debug, found.fork_launched) == (False, False, False, False)


def test_what_was_read_cannot_change():
    found = read_environment({})
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.rank = 3


def test_the_process_variables_are_the_default(monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert read_environment().rank == 2


def test_torchruns_variables_are_honoured():
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", **MEETING}
    assert place(environ) == ("torchrun", 5, 8, 1, 4)
    assert read_environment(environ).init_method == "env://"
    assert read_environment(environ).machine == 4


def test_our_ranks_are_told_apart_by_the_launch_id():
    environ = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "NBSTATE_LAUNCH": "abc",
        "NBSTATE_DEVICE": "CPU",
        "NBSTATE_SHARE_DEVICES": "1",
        "ACCELERATE_MIXED_PRECISION": "BF16",
        "ACCELERATE_USE_CPU": "true",
        "FORK_LAUNCHED": "1",
        **MEETING,
    }
    found = read_environment(environ)
    assert (found.source, found.launch_id, found.device) == ("nbstate", "abc", "cpu")
    assert (found.mixed_precision, found.use_cpu, found.fork_launched, found.share_devices) == (
        "bf16",
        True,
        True,
        True,
    )


def test_ranks_by_hand_are_taken_to_be_on_this_machine():
    assert place({"RANK": "1", "WORLD_SIZE": "2"}) == ("torchrun", 1, 2, 1, 2)
    assert read_environment({"RANK": "1", "WORLD_SIZE": "2"}).init_method == "tcp://127.0.0.1:29500"
    assert place({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", **MEETING})[3:] == (1, 4)


@pytest.mark.parametrize("half", [{"RANK": "1"}, {"WORLD_SIZE": "4"}, {"LOCAL_RANK": "1"}])
def test_half_a_set_of_variables_is_no_launch(half):
    assert place(half) == ("alone", 0, 1, 0, 1)


MPI = {
    "Open MPI": {
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    },
    "MVAPICH2": {
        "MV2_COMM_WORLD_RANK": "3",
        "MV2_COMM_WORLD_SIZE": "4",
        "MV2_COMM_WORLD_LOCAL_RANK": "1",
        "MV2_COMM_WORLD_LOCAL_SIZE": "2",
    },
    "Intel MPI": {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
    "MPICH": {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"},
}


@pytest.mark.parametrize("family", MPI)
def test_mpi_on_several_machines(family):
    assert place({**MPI[family], **MEETING}) == ("mpi", 3, 4, 1, 2)
    assert read_environment({**MPI[family], **MEETING}).init_method == "tcp://10.0.0.1:4000"
    with pytest.raises(ArgumentValueError, match="MASTER_ADDR"):
        read_environment(MPI[family])


def test_mpi_on_one_machine_needs_no_meeting_point():
    environ = {"PMI_RANK": "1", "PMI_SIZE": "2"}
    assert place(environ) == ("mpi", 1, 2, 1, 2)
    assert read_environment(environ).init_method == "tcp://127.0.0.1:29500"
    ports = {read_environment({**environ, "PMI_JOBID": job}).init_method for job in ("a", "b", "a")}
    assert len(ports) == 2


def test_an_address_with_colons_is_put_in_brackets():
    environ = {"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "fe80::1", "MASTER_PORT": "4000"}
    assert read_environment(environ).init_method == "tcp://[fe80::1]:4000"


BATCH_SHELL = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "77"}
STEP = {
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.1.1.1",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
}


def test_slurm_step():
    assert place(STEP) == ("slurm", 6, 7, 2, 3)
    found = read_environment(STEP)
    assert found.machine == 1
    host, port = found.init_method.removeprefix("tcp://").split(":")
    assert host == "gpu007"
    assert 15000 <= int(port) < 30000
    other_rank = {**STEP, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    assert read_environment(other_rank).init_method == found.init_method
    assert read_environment({**STEP, "SLURM_STEP_ID": "1"}).init_method != found.init_method
    assert place({**STEP, "SLURM_NTASKS": "99"})[2] == 7


def test_a_kernel_in_a_batch_shell_is_alone():
    assert place(BATCH_SHELL) == ("alone", 0, 1, 0, 1)


@pytest.mark.parametrize("special", ["4294967290", "4294967291", "4294967292"])
def test_a_kernel_in_a_special_step_is_alone(special):
    assert place({**BATCH_SHELL, "SLURM_STEP_ID": special}) == ("alone", 0, 1, 0, 1)


def test_a_batch_shell_that_names_the_meeting_point_is_a_launch():
    assert place({**BATCH_SHELL, **MEETING}) == ("slurm", 0, 8, 0, 8)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n[3,5]", "n3"), ("a-[01-04]-ib,b2", "a-01-ib"), ("head,n[1-9]", "head"), ("", "10.1.1.1")],
)
def test_the_first_host_of_a_node_list(nodes, first):
    environ = {**STEP, "SLURM_STEP_NODELIST": nodes}
    assert read_environment(environ).init_method.startswith(f"tcp://{first}:")


def test_slurm_on_one_machine_meets_on_loopback():
    environ = {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0"}
    assert read_environment({**environ, "SLURM_JOB_ID": "5"}).init_method.startswith("tcp://127.0.0.1:")
    spread = {**STEP, "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_NUM_TASKS": "8"}
    assert place(spread)[4] == 4


def test_slurm_may_give_each_rank_its_own_devices():
    assert not read_environment(STEP).own_devices
    assert read_environment({**STEP, "SLURM_GPUS_PER_TASK": "1"}).own_devices
    assert not read_environment({**STEP, "SLURM_GPU_BIND": "none"}).own_devices


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 of 2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "rank -1 of 2"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "rank 0 of 0"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "2"}, "local rank 4 of 2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "4", **MEETING}, "4 ranks on this machine"),
        ({"ACCELERATE_USE_CPU": "perhaps"}, "ACCELERATE_USE_CPU='perhaps'"),
        ({"ACCELERATE_MIXED_PRECISION": "fp12"}, "ACCELERATE_MIXED_PRECISION='fp12'.*'no', 'fp16', 'bf16', 'fp8'"),
    ],
)
def test_wrong_variables_are_named(environ, told):
    with pytest.raises(ArgumentValueError, match=told):
        read_environment(environ)


@pytest.mark.parametrize("name", ["NBSTATE_DEBUG", "ACCELERATE_DEBUG_MODE"])
def test_debug(name):
    assert read_environment({name: "1"}).debug
    assert not read_environment({name: "false"}).debug

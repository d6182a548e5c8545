"""Who launched this process, read once from the variables that the launcher set.

Looked at in this order; the first that fits is taken whole, never mixed with another:

1. ``RANK`` and ``WORLD_SIZE``: our own ranks (then ``NBSTATE_LAUNCH`` is set too), torchrun, or a person's own script.
   Without ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE`` all ranks are taken to be on this machine.
2. MPI: ``OMPI_COMM_WORLD_*`` (Open MPI), ``MV2_COMM_WORLD_*`` (MVAPICH2), ``PMI_*`` (MPICH, Intel MPI).
3. SLURM: ``SLURM_PROCID`` and the number of tasks, but only inside a job step, or when ``MASTER_ADDR`` and
   ``MASTER_PORT`` are set. The shell of a batch job has ``SLURM_PROCID=0`` and ``SLURM_NTASKS=8`` as well, and a
   Jupyter server started there is alone: it must not wait for seven others that never come.
4. Nothing: one process, alone.

Where MPI or SLURM name no meeting point it is derived the same way in every rank: the address is ``127.0.0.1`` when
all ranks are on this machine, otherwise the first host of SLURM's node list, otherwise ``SLURM_LAUNCH_NODE_IPADDR``;
the port comes from the id of the job and step, in 15000 to 29999, so two jobs on one node seldom meet.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from nbstate.errors import ArgumentValueError
from nbstate.state.kinds import parse_precision

__all__ = ["LaunchEnvironment", "Source", "read_environment"]

Source = Literal["alone", "nbstate", "torchrun", "mpi", "slurm"]

_TRUE: Final = frozenset({"1", "true", "yes", "y", "on", "t"})
_FALSE: Final = frozenset({"", "0", "false", "no", "n", "off", "f"})
_DEFAULT_PORT: Final = 29500
# SLURM numbers steps from 0; the batch shell, the interactive shell and their like have ids from here up.
_FIRST_SPECIAL_STEP: Final = 0xFFFFFFF0

# Per MPI family: rank, size, then where the local rank and the local size may be found, best first.
_MPI: Final = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ("OMPI_COMM_WORLD_LOCAL_RANK",), ("OMPI_COMM_WORLD_LOCAL_SIZE",)),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", ("MV2_COMM_WORLD_LOCAL_RANK",), ("MV2_COMM_WORLD_LOCAL_SIZE",)),
    (
        "PMI_RANK",
        "PMI_SIZE",
        ("PMI_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"),
        ("PMI_LOCAL_SIZE", "MPI_LOCALNRANKS"),
    ),
)
_MPI_JOBS: Final = (
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "PMI_JOBID",
    "SLURM_JOB_ID",
    "SLURM_JOBID",
    "PBS_JOBID",
)


@dataclass(frozen=True)
class LaunchEnvironment:
    """What the launch variables say.

    Attributes
    ----------
    source : {"alone", "nbstate", "torchrun", "mpi", "slurm"}
        Whose variables were found.
    rank, world_size : int
        This process among all.
    local_rank, local_world_size : int
        This process among those on this machine.
    machine : int
        A number that the ranks of one machine have in common and those of another have not.
    init_method : str
        Where the ranks meet: ``"env://"`` or ``"tcp://address:port"``; empty alone.
    mixed_precision : str
        ``ACCELERATE_MIXED_PRECISION``, or ``"no"``.
    use_cpu : bool
        ``ACCELERATE_USE_CPU``.
    device : str
        ``NBSTATE_DEVICE``: the device kind that was asked for; empty lets the table choose.
    share_devices : bool
        ``NBSTATE_SHARE_DEVICES``: whether more ranks than devices are allowed.
    own_devices : bool
        Whether the launcher shows each rank only its own devices, so that counting them says nothing.
    debug : bool
        ``NBSTATE_DEBUG`` or ``ACCELERATE_DEBUG_MODE``.
    fork_launched : bool
        ``FORK_LAUNCHED``: whether a notebook launcher made this process.
    launch_id : str
        ``NBSTATE_LAUNCH``; empty outside our ranks.
    """

    source: Source = "alone"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    machine: int = 0
    init_method: str = ""
    mixed_precision: str = "no"
    use_cpu: bool = False
    device: str = ""
    share_devices: bool = False
    own_devices: bool = False
    debug: bool = False
    fork_launched: bool = False
    launch_id: str = ""

    def __post_init__(self) -> None:
        for name, index, size in (
            ("rank", self.rank, self.world_size),
            ("local rank", self.local_rank, self.local_world_size),
        ):
            if size < 1 or not 0 <= index < size:
                raise ArgumentValueError(
                    f"the launch variables ({self.source}) give {name} {index} of {size}; "
                    "a rank is 0 or more and below the number of ranks"
                )
        if self.local_world_size > self.world_size:
            raise ArgumentValueError(
                f"the launch variables ({self.source}) give {self.local_world_size} ranks on this machine, "
                f"but {self.world_size} in all"
            )

    @property
    def alone(self) -> bool:
        """Whether there is one process only."""
        return self.world_size == 1


@dataclass(frozen=True)
class _Place:
    source: Source
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    init_method: str = ""
    machine: int | None = None


def _flag(environ: Mapping[str, str], name: str) -> bool:
    word = environ.get(name, "").strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ArgumentValueError(f"the variable {name}={environ[name]!r} is neither true nor false")


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ArgumentValueError(f"the variable {name}={environ[name]!r} is not a whole number") from None


def _first_number(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    return next((value for value in (_number(environ, name) for name in names) if value is not None), None)


def _url(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _first_host(node_list: str) -> str:
    """The first host of a SLURM node list: ``"gpu[007-009,12],login1"`` gives ``"gpu007"``."""
    match = re.match(r"([^\[,]+)(?:\[(\w+)[^\]]*\](.*?))?(?:,|$)", node_list.strip())
    return "".join(part or "" for part in match.groups()) if match else ""


def _meeting_point(environ: Mapping[str, str], local: bool, job: str) -> str:
    port = _number(environ, "MASTER_PORT")
    if port is None:
        port = 15000 + zlib.crc32(job.encode()) % 15000 if job else _DEFAULT_PORT
    host = environ.get("MASTER_ADDR", "")
    if not host and local:
        host = "127.0.0.1"
    if not host:
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
        host = _first_host(nodes) or environ.get("SLURM_LAUNCH_NODE_IPADDR", "")
    if not host:
        raise ArgumentValueError("ranks on several machines need MASTER_ADDR: the address of the machine with rank 0")
    return _url(host, port)


def _read_ranks(environ: Mapping[str, str]) -> _Place | None:
    rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if rank is None or size is None:
        return None
    local_rank, local_size = _number(environ, "LOCAL_RANK"), _number(environ, "LOCAL_WORLD_SIZE")
    if local_size is None:
        local_size = size
    if local_rank is None:
        local_rank = rank % local_size if local_size > 0 else rank
    complete = environ.get("MASTER_ADDR") and environ.get("MASTER_PORT")
    where = "env://" if complete else _meeting_point(environ, local_size == size, "") if size > 1 else ""
    source: Source = "nbstate" if environ.get("NBSTATE_LAUNCH") else "torchrun"
    return _Place(source, rank, size, local_rank, local_size, where)


def _read_mpi(environ: Mapping[str, str]) -> _Place | None:
    for rank_name, size_name, local_ranks, local_sizes in _MPI:
        rank, size = _number(environ, rank_name), _number(environ, size_name)
        if rank is None or size is None:
            continue
        local_rank, local_size = _first_number(environ, local_ranks), _first_number(environ, local_sizes)
        if local_size is None:
            local_size = size
        if local_rank is None:
            local_rank = rank % local_size if local_size > 0 else rank
        job = next((environ[name] for name in _MPI_JOBS if environ.get(name)), "")
        where = _meeting_point(environ, local_size == size, job) if size > 1 else ""
        return _Place("mpi", rank, size, local_rank, local_size, where)
    return None


def _tasks_here(text: str, node: int) -> int | None:
    """Tasks on one node, from SLURM's short form: ``"4(x2),3"`` is 4, 4 and 3."""
    counts: list[int] = []
    for match in re.finditer(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[node] if 0 <= node < len(counts) else None


def _read_slurm(environ: Mapping[str, str]) -> _Place | None:
    rank = _number(environ, "SLURM_PROCID")
    size = _first_number(environ, ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"))
    step = _number(environ, "SLURM_STEP_ID")
    if step is None:
        step = _number(environ, "SLURM_STEPID")
    in_step = step is not None and step < _FIRST_SPECIAL_STEP
    told_where = bool(environ.get("MASTER_ADDR") and environ.get("MASTER_PORT"))
    if rank is None or size is None or not (in_step or told_where):
        return None
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    node = _number(environ, "SLURM_NODEID") or 0
    local_size = _tasks_here(tasks, node) or size
    local_rank = _number(environ, "SLURM_LOCALID")
    if local_rank is None:
        local_rank = rank % local_size
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID") or ""
    where = _meeting_point(environ, local_size == size, f"{job}.{step}" if job else "") if size > 1 else ""
    return _Place("slurm", rank, size, local_rank, local_size, where, _number(environ, "SLURM_NODEID"))


def read_environment(environ: Mapping[str, str] | None = None) -> LaunchEnvironment:
    """Read the launch variables.

    Parameters
    ----------
    environ : mapping of str to str, optional
        Default: ``os.environ``.

    Raises
    ------
    ArgumentValueError
        If a variable does not hold what it must, or they contradict each other. The text names it.

    Examples
    --------
    >>> read_environment({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}).rank
    1
    """
    environ = os.environ if environ is None else environ
    place = _read_ranks(environ) or _read_mpi(environ) or _read_slurm(environ) or _Place("alone")
    bound = environ.get("SLURM_GPU_BIND", "") + environ.get("SLURM_GPUS_PER_TASK", "")
    return LaunchEnvironment(
        source=place.source,
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_rank,
        local_world_size=place.local_world_size,
        # Ranks are numbered machine by machine, but for SLURM, which may deal them out in turn.
        machine=place.rank - place.local_rank if place.machine is None else place.machine,
        init_method=place.init_method,
        mixed_precision=parse_precision(
            environ.get("ACCELERATE_MIXED_PRECISION") or "no", "the variable ACCELERATE_MIXED_PRECISION"
        ),
        use_cpu=_flag(environ, "ACCELERATE_USE_CPU"),
        device=environ.get("NBSTATE_DEVICE", "").strip().lower(),
        share_devices=_flag(environ, "NBSTATE_SHARE_DEVICES"),
        own_devices=place.source == "slurm" and bound not in ("", "none"),
        debug=_flag(environ, "NBSTATE_DEBUG") or _flag(environ, "ACCELERATE_DEBUG_MODE"),
        fork_launched=_flag(environ, "FORK_LAUNCHED"),
        launch_id=environ.get("NBSTATE_LAUNCH", ""),
    )

"""PartialState: who this process is, on which device, and how it meets the others."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist
from torch.utils.data import get_worker_info

from nbstate.errors import ArgumentTypeError, ArgumentValueError, StateConflictError
from nbstate.state import devices
from nbstate.state.control import ProcessControl
from nbstate.state.devices import DeviceKind, pick_device_kind
from nbstate.state.environment import LaunchEnvironment, read_environment
from nbstate.state.group import destroy_own_group, grouped, make_group
from nbstate.state.html import render_card
from nbstate.state.kinds import DistributedType, parse_timeout
from nbstate.state.singleton import SharedState, building
from nbstate.telemetry import probe

__all__ = ["PartialState", "planned_world_size"]

_GROUP_OPTIONS: Final = frozenset(
    {"backend", "init_method", "timeout", "world_size", "rank", "store", "group_name", "pg_options", "device_id"}
)
# NCCL and its like refuse two ranks on one device; gloo copies through memory and does not mind.
_SHARING_BACKEND: Final = "gloo"


class PartialState(SharedState, ProcessControl):
    """Who this process is. A singleton: any number of instances, one state.

    The first instance decides: it reads the launch variables, picks the device and, where there is more than one
    process, makes the process group. It works with no launcher, in nbstate's own ranks, under torchrun, and under MPI
    or SLURM variables (see ``nbstate.state.environment``). A process group that already exists is adopted.

    Parameters
    ----------
    cpu : bool
        Whether to compute on the CPU though there is an accelerator.
    **init_process_group_kwargs
        For ``torch.distributed.init_process_group``, as ``InitProcessGroupKwargs(...).to_kwargs()`` gives them:
        ``backend``, ``init_method``, ``timeout`` and its other arguments.

    Attributes
    ----------
    device : torch.device
        Where this process computes.
    distributed_type : DistributedType
        ``NO`` alone.
    backend : str or None
        What the processes talk over; None alone.
    process_index, local_process_index, num_processes : int
        This process among all, among those of its machine, and how many there are.
    mixed_precision : str
        ``'no'``, ``'fp16'``, ``'bf16'`` or ``'fp8'``: what the launch asked for.
    debug, fork_launched : bool
        Whether debug mode is on; whether a notebook launcher made this process.

    Raises
    ------
    ArgumentValueError
        If there are more ranks than devices of the kind, or a launch variable is wrong.
    StateConflictError
        If the state exists and was built otherwise. It stays as it is.

    Examples
    --------
    >>> state = PartialState(cpu=True)
    >>> state.num_processes, state.is_main_process
    (1, True)
    """

    _shared_state: ClassVar[dict[str, Any]] = {}
    _names = frozenset(
        {
            "device",
            "distributed_type",
            "backend",
            "process_index",
            "local_process_index",
            "num_processes",
            "mixed_precision",
            "debug",
            "fork_launched",
            "use_distributed",
            "is_main_process",
            "is_local_main_process",
            "is_last_process",
            "environment",
            "_group_options",
        }
    )

    mixed_precision: str
    debug: bool
    fork_launched: bool
    environment: LaunchEnvironment
    _group_options: Mapping[str, Any]

    def __init__(self, cpu: bool = False, **init_process_group_kwargs: Any) -> None:
        with building():
            options = _checked_options(init_process_group_kwargs)
            if self._shared_state:
                self._check_same(cpu, options)
                return
            # Everything that can fail happens before the first attribute is set.
            self._shared_state.update(_build(cpu, options))
            type(self)._inherited = False
        device = self.device
        probe.device(str(device))
        probe.memory_source(lambda: devices.memory(device))

    def _check_same(self, cpu: bool, options: Mapping[str, Any]) -> None:
        if cpu and self.device.type != "cpu":
            raise StateConflictError(
                f"cpu=True, but PartialState was built on {self.device}; call PartialState.reset() first"
            )
        if not self.use_distributed:
            return
        for name, value in options.items():
            if name in self._group_options and self._group_options[name] == value:
                continue
            raise StateConflictError(
                f"{name}={value!r}, but PartialState was built without it and has its process group; "
                "give it to the first PartialState, or call PartialState.reset() first"
            )

    @property
    def default_device(self) -> torch.device:
        """The best device here: what a process alone would take."""
        kind = pick_device_kind()
        return kind.device(kind.current_index())

    @classmethod
    def reset(cls) -> None:
        """Forget the state, and destroy the process group if this state made it.

        Every instance then raises on reading, until the next ``PartialState()``. With several processes all must call
        it.
        """
        with building():
            cls._shared_state.clear()
            cls._inherited = False
            destroy_own_group()

    _reset_state = reset

    def __repr__(self) -> str:
        if not self._shared_state:
            return "PartialState(not built)"
        over = f" over {self.backend}" if self.backend else ""
        return (
            f"PartialState(process {self.process_index} of {self.num_processes}, local {self.local_process_index}, "
            f"{self.device}, {self.distributed_type.value}{over}, precision {self.mixed_precision})"
        )

    def _repr_html_(self) -> str:
        if not self._shared_state:
            return render_card("PartialState", "not built; PartialState() builds it", {})
        return render_card(
            "PartialState", f"process {self.process_index} of {self.num_processes} on {self.device}", self._rows()
        )

    def _rows(self) -> dict[str, Any]:
        return {
            "distributed_type": self.distributed_type.value,
            "backend": self.backend,
            "device": self.device,
            "process_index": self.process_index,
            "local_process_index": self.local_process_index,
            "num_processes": self.num_processes,
            "mixed_precision": self.mixed_precision,
            "launched by": self.environment.source,
            "fork_launched": self.fork_launched,
            "debug": self.debug,
        }


def _checked_options(given: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(given) - _GROUP_OPTIONS)
    if unknown:
        accepted = ", ".join(sorted(_GROUP_OPTIONS))
        raise ArgumentTypeError(f"PartialState takes no argument {', '.join(unknown)}; accepted are cpu, {accepted}")
    options = {name: value for name, value in given.items() if value is not None}
    if "timeout" in options:
        options["timeout"] = parse_timeout(options["timeout"])
    return options


@dataclass(frozen=True)
class _Plan:
    """What was decided, before anything is made."""

    environment: LaunchEnvironment
    kind: DeviceKind
    device: torch.device
    backend: str | None


def _plan(cpu: bool, options: Mapping[str, Any]) -> _Plan:
    environment = read_environment()
    kind = pick_device_kind("cpu" if cpu or environment.use_cpu else environment.device)
    environment = _xla_place(environment) if kind.name == "xla" else _place(environment, options)
    if environment.alone:
        return _Plan(environment, kind, kind.device(kind.current_index()), None)
    count, ranks = kind.count(), environment.local_world_size
    shared = not kind.shareable and not environment.own_devices and ranks > count
    if shared and not environment.share_devices:
        raise ArgumentValueError(
            f"{ranks} ranks on this machine, but {count} {kind.name} device{'s' if count != 1 else ''}; ask for "
            f"{count} or fewer, for the CPU (PartialState(cpu=True), notebook_launcher(device='cpu')), "
            "or for shared devices (NBSTATE_SHARE_DEVICES=1)"
        )
    backend = _SHARING_BACKEND if shared else kind.backend
    if grouped():
        backend = dist.get_backend()
    return _Plan(
        environment, kind, kind.device(environment.local_rank % max(count, 1)), options.get("backend", backend)
    )


def _place(environment: LaunchEnvironment, options: Mapping[str, Any]) -> LaunchEnvironment:
    """Who this process is: a group that exists knows best, then the arguments, then the variables."""
    if grouped():
        rank, size = dist.get_rank(), dist.get_world_size()
    else:
        rank = options.get("rank", environment.rank)
        size = options.get("world_size", environment.world_size)
    if (rank, size) == (environment.rank, environment.world_size):
        return environment
    # Nothing says how these ranks are spread over machines, so they are taken to be on this one.
    return replace(environment, rank=rank, world_size=size, local_rank=rank, local_world_size=size, machine=0)


def _xla_place(environment: LaunchEnvironment) -> LaunchEnvironment:
    """Who this process is to the XLA runtime, which starts its processes without launch variables."""
    importlib.import_module("torch_xla.distributed.xla_backend")  # registers the backend
    runtime = importlib.import_module("torch_xla.runtime")

    rank, local_rank = runtime.global_ordinal(), runtime.local_ordinal()
    return replace(
        environment,
        rank=rank,
        world_size=runtime.world_size(),
        local_rank=local_rank,
        local_world_size=max(local_rank + 1, runtime.local_device_count()),
        machine=rank - local_rank,
        own_devices=True,
    )


def planned_world_size(options: Mapping[str, Any]) -> int:
    """Number of processes that ``PartialState(**options)`` has or would have. Makes nothing."""
    if PartialState._shared_state:
        return int(PartialState._shared_state["num_processes"])
    return _place(read_environment(), _checked_options(options)).world_size


def _build(cpu: bool, options: Mapping[str, Any]) -> dict[str, Any]:
    plan = _plan(cpu, options)
    environment, kind = plan.environment, plan.kind
    # A loader's worker process has its rank's place, but the group is the rank's alone.
    if plan.backend is not None and get_worker_info() is None:
        kind.use(plan.device)
    if plan.backend is not None and get_worker_info() is None and not grouped():
        bound = plan.device if kind.binds_device and plan.backend == kind.backend else None
        rest = {name: value for name, value in options.items() if name not in ("backend", "timeout")}
        make_group(environment, plan.backend, options.get("timeout"), bound, rest)
    return {
        "device": plan.device,
        # XLA is a way to compute, even for one process; all others are ways to be several.
        "distributed_type": DistributedType.NO if environment.alone and kind.name != "xla" else kind.distributed_type,
        "backend": plan.backend,
        "process_index": environment.rank,
        "local_process_index": environment.local_rank,
        "num_processes": environment.world_size,
        "mixed_precision": environment.mixed_precision,
        "debug": environment.debug,
        "fork_launched": environment.fork_launched,
        "environment": environment,
        "_group_options": dict(options),
    }

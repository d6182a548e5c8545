"""Floor 1: who am I. The singletons, the launch variables, the device kinds."""

from __future__ import annotations

from nbstate.state.accelerator import AcceleratorState, is_initialized
from nbstate.state.control import ProcessControl
from nbstate.state.devices import DEVICE_KINDS, DeviceKind, device_count, memory, pick_device_kind
from nbstate.state.environment import LaunchEnvironment, read_environment
from nbstate.state.gradient import GradientState
from nbstate.state.group import forget_inherited_group
from nbstate.state.kinds import DistributedType, GradientAccumulationPlugin, InitProcessGroupKwargs, PrecisionType
from nbstate.state.parallelism import ParallelismConfig
from nbstate.state.partial import PartialState
from nbstate.state.singleton import renew_lock
from nbstate.state.waiting import forget_counts

__all__ = [
    "DEVICE_KINDS",
    "AcceleratorState",
    "DeviceKind",
    "DistributedType",
    "GradientAccumulationPlugin",
    "GradientState",
    "InitProcessGroupKwargs",
    "LaunchEnvironment",
    "ParallelismConfig",
    "PartialState",
    "PrecisionType",
    "ProcessControl",
    "device_count",
    "is_initialized",
    "memory",
    "pick_device_kind",
    "read_environment",
    "reset_inherited",
]


def reset_inherited() -> None:
    """Forget what a forked process inherited; the first lines of a rank call it.

    Nothing is destroyed: the process group and its store belong to the parent. From here on the first reading of any
    instance that came with the fork builds this process's own state.
    """
    renew_lock()
    for singleton in (GradientState, AcceleratorState, PartialState):
        singleton._forget()
    forget_inherited_group()
    forget_counts()

"""nbstate: from a notebook cell to N PyTorch ranks and back, with a live view of what each one does.

>>> from nbstate import PartialState, notebook_launcher
>>> def train():
...     return PartialState().process_index
>>> notebook_launcher(train, num_processes=2, dashboard=False)
[0, 1]
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from nbstate._version import __version__

if TYPE_CHECKING:
    from nbstate import errors, utils
    from nbstate.errors import (
        ArgumentTypeError,
        ArgumentValueError,
        CheckpointError,
        ForkUnsafeError,
        LaunchError,
        LaunchStoppedError,
        LaunchTimeoutError,
        MainProcessFailedError,
        MissingRankError,
        NbstateError,
        NestedLaunchError,
        RankError,
        ShippingError,
        StateConflictError,
        StateNotBuiltError,
        StructureError,
    )
    from nbstate.launch.doctor import preflight
    from nbstate.launch.launch import Launch, last_launch
    from nbstate.launch.launcher import notebook_launcher
    from nbstate.state import (
        AcceleratorState,
        DistributedType,
        GradientState,
        InitProcessGroupKwargs,
        ParallelismConfig,
        PartialState,
    )
    from nbstate.training import (
        Accelerator,
        AutocastKwargs,
        DataLoaderConfiguration,
        DDPCommunicationHookType,
        DistributedDataParallelKwargs,
        GeneralTracker,
        GradScalerKwargs,
        LocalSGD,
        find_executable_batch_size,
        prepare_data_loader,
        skip_first_batches,
        synchronize_rng_states,
    )

__all__ = [
    "Accelerator",
    "AcceleratorState",
    "ArgumentTypeError",
    "ArgumentValueError",
    "AutocastKwargs",
    "CheckpointError",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "ForkUnsafeError",
    "GeneralTracker",
    "GradScalerKwargs",
    "GradientState",
    "InitProcessGroupKwargs",
    "Launch",
    "LaunchError",
    "LaunchStoppedError",
    "LaunchTimeoutError",
    "LocalSGD",
    "MainProcessFailedError",
    "MissingRankError",
    "NbstateError",
    "NestedLaunchError",
    "ParallelismConfig",
    "PartialState",
    "RankError",
    "ShippingError",
    "StateConflictError",
    "StateNotBuiltError",
    "StructureError",
    "__version__",
    "errors",
    "find_executable_batch_size",
    "last_launch",
    "load_ipython_extension",
    "notebook_launcher",
    "preflight",
    "prepare_data_loader",
    "skip_first_batches",
    "synchronize_rng_states",
    "unload_ipython_extension",
    "utils",
]


# Where each public name lives. They are imported on first use: a rank that is spawned ties its life to the kernel's
# before it imports torch, and `import nbstate` itself is quick.
_HOMES = {
    "nbstate.launch.doctor": ("preflight",),
    "nbstate.launch.launch": ("Launch", "last_launch"),
    "nbstate.launch.launcher": ("notebook_launcher",),
    "nbstate.state": (
        "AcceleratorState",
        "DistributedType",
        "GradientState",
        "InitProcessGroupKwargs",
        "ParallelismConfig",
        "PartialState",
    ),
    "nbstate.training": (
        "Accelerator",
        "AutocastKwargs",
        "DDPCommunicationHookType",
        "DataLoaderConfiguration",
        "DistributedDataParallelKwargs",
        "GeneralTracker",
        "GradScalerKwargs",
        "LocalSGD",
        "find_executable_batch_size",
        "prepare_data_loader",
        "skip_first_batches",
        "synchronize_rng_states",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = ("dashboard", "errors", "launch", "magics", "session", "state", "telemetry", "training", "utils")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"nbstate.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'nbstate' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF.get(name, "nbstate.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})


def load_ipython_extension(shell: Any) -> None:
    """Register the magics and warm the fork server; ``%load_ext nbstate`` calls this."""
    from nbstate import magics

    magics.load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Take the magics away again; ``%unload_ext nbstate`` calls this."""
    from nbstate import magics

    magics.unload(shell)

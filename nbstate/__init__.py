"""nbstate: from a notebook cell to N PyTorch ranks and back, with a live view of what each one does.

>>> from nbstate import PartialState, notebook_launcher
>>> def train():
...     return PartialState().process_index
>>> notebook_launcher(train, num_processes=2, dashboard=False)
[0, 1]
"""

from __future__ import annotations

from typing import Any

from nbstate import errors, utils
from nbstate._version import __version__
from nbstate.errors import (
    ArgumentTypeError,
    ArgumentValueError,
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
)
from nbstate.launch.launcher import Launch, last_launch, notebook_launcher
from nbstate.state import AcceleratorState, DistributedType, GradientState, PartialState
from nbstate.training import Accelerator, DataLoaderConfiguration, prepare_data_loader, skip_first_batches

__all__ = [
    "Accelerator",
    "AcceleratorState",
    "ArgumentTypeError",
    "ArgumentValueError",
    "DataLoaderConfiguration",
    "DistributedType",
    "ForkUnsafeError",
    "GradientState",
    "Launch",
    "LaunchError",
    "LaunchStoppedError",
    "LaunchTimeoutError",
    "MainProcessFailedError",
    "MissingRankError",
    "NbstateError",
    "NestedLaunchError",
    "PartialState",
    "RankError",
    "ShippingError",
    "StateConflictError",
    "StateNotBuiltError",
    "__version__",
    "errors",
    "last_launch",
    "load_ipython_extension",
    "notebook_launcher",
    "prepare_data_loader",
    "skip_first_batches",
    "unload_ipython_extension",
    "utils",
]


def load_ipython_extension(shell: Any) -> None:
    """Register the magics and warm the fork server; ``%load_ext nbstate`` calls this."""
    from nbstate import magics

    magics.load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Take the magics away again; ``%unload_ext nbstate`` calls this."""
    from nbstate import magics

    magics.unload(shell)

"""Optimizers follow the parameters of a model that is cut into parts.

Sharding and tensor parallelism replace a model's parameters by new ones. An optimizer that was made before holds the
old ones and would step them, to no effect and without an error. So each old parameter is told its successor, and an
optimizer that is prepared, or was prepared already, goes over to the successors, with what state it has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import torch

from nbstate.errors import ArgumentValueError

__all__ = ["follow", "succession", "successor"]

_ATTRIBUTE: Final = "_nbstate_successor"


@contextlib.contextmanager
def succession(model: torch.nn.Module) -> Iterator[None]:
    """A context in which a model's parameters may be replaced; tells each old one its successor at the end."""
    before = dict(model.named_parameters(remove_duplicate=False))
    yield
    for name, new in model.named_parameters(remove_duplicate=False):
        old = before.get(name)
        if old is not None and old is not new:
            setattr(old, _ATTRIBUTE, new)


def successor(parameter: torch.Tensor) -> torch.Tensor:
    """What a parameter has become; itself if it was not replaced."""
    following = getattr(parameter, _ATTRIBUTE, None)
    while following is not None:
        parameter = following
        following = getattr(parameter, _ATTRIBUTE, None)
    return parameter


def follow(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer go over to the successors of its parameters. Does nothing where there are none."""
    for group in optimizer.param_groups:
        parameters = group["params"]
        for index, old in enumerate(parameters):
            new = successor(old)
            if new is old:
                continue
            parameters[index] = new
            if old in optimizer.state:
                kept = optimizer.state.pop(old)
                optimizer.state[new] = {name: _laid_out(value, old, new) for name, value in kept.items()}


def _laid_out(value: Any, old: torch.Tensor, new: Any) -> Any:
    """A piece of state of the old parameter's shape, cut as the new parameter is; anything else as it is."""
    if not isinstance(value, torch.Tensor) or value.shape != old.shape or not hasattr(new, "placements"):
        return value
    from torch.distributed.tensor import distribute_tensor

    try:
        return distribute_tensor(value.to(new.device), new.device_mesh, new.placements, src_data_rank=None)
    except (NotImplementedError, RuntimeError, TypeError) as error:
        raise ArgumentValueError(
            f"An optimizer that has taken steps cannot follow its model into the layout {new.placements}: {error}. "
            "Prepare the model first, and make the optimizer from the prepared one's parameters."
        ) from error

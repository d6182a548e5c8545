"""What a checkpoint holds, and how it goes into files and back.

What is the same on every rank is written once; what differs has the rank's number in its name::

    model.safetensors, model_1.safetensors      weights (pytorch_model.bin by torch.save)
    optimizer.bin, scheduler.bin, scaler.pt     as the wrapped objects' own state dicts
    custom_checkpoint_0.pkl                     registered objects, in the order of registering
    rank_0.bin                                  random states, loader positions and the step count of one rank
    checkpoint.json                             the manifest: what makes it whole
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nbstate.errors import CheckpointError
from nbstate.training.randomness import random_states, set_random_states
from nbstate.training.storage import write_file
from nbstate.training.weights import (
    full_state_dict,
    is_spread,
    load_full_state_dict,
    read_weights,
    weight_files,
    write_weights,
)

__all__ = ["Found", "Subjects", "collect_shared", "read", "restore", "restore_rank", "write_rank"]


@dataclass(frozen=True)
class Subjects:
    """What is saved and loaded, each in the order in which it was prepared."""

    models: Sequence[torch.nn.Module]
    optimizers: Sequence[Any]
    schedulers: Sequence[Any]
    loaders: Sequence[Any]
    registered: Sequence[Any]
    scaler: Any = None


def _name(stem: str, suffix: str, number: int) -> str:
    return f"{stem}_{number}{suffix}" if number else f"{stem}{suffix}"


@dataclass
class Shared:
    """What is the same on every rank, by the name of its file."""

    weights: list[dict[str, Any]] = field(default_factory=list)
    states: dict[str, Any] = field(default_factory=dict)

    def write(self, place: Path, safe: bool) -> None:
        """Write all of it, flushed to the disk."""
        for number, weights in enumerate(self.weights):
            write_weights(weights, weight_files(place, number)[0 if safe else 1], safe)
        for name, state in self.states.items():
            write_file(place / name, lambda file, state=state: torch.save(state, file))  # type: ignore[misc]


def collect_shared(subjects: Subjects) -> Shared:
    """State dicts of everything that is the same on every rank. Collective for models that are spread over ranks."""
    shared = Shared([full_state_dict(model) for model in subjects.models])
    for number, optimizer in enumerate(subjects.optimizers):
        shared.states[_name("optimizer", ".bin", number)] = _optimizer_state(optimizer, subjects.models)
    for number, scheduler in enumerate(subjects.schedulers):
        shared.states[_name("scheduler", ".bin", number)] = scheduler.state_dict()
    if subjects.scaler is not None:
        shared.states["scaler.pt"] = subjects.scaler.state_dict()
    for number, thing in enumerate(subjects.registered):
        shared.states[f"custom_checkpoint_{number}.pkl"] = thing.state_dict()
    return shared


def _sharded_owner(optimizer: Any, models: Sequence[torch.nn.Module]) -> torch.nn.Module | None:
    """The model of an optimizer whose state is spread over ranks; None if it is not."""
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for model in models:
        if is_spread(model) and any(id(parameter) in trained for parameter in model.parameters()):
            return model
    return None


def _optimizer_state(optimizer: Any, models: Sequence[torch.nn.Module]) -> dict[str, Any]:
    owner = _sharded_owner(optimizer, models)
    if owner is None:
        return dict(optimizer.state_dict())
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return dict(get_optimizer_state_dict(owner, getattr(optimizer, "optimizer", optimizer), options=options))


def _load_optimizer(optimizer: Any, state: dict[str, Any], models: Sequence[torch.nn.Module]) -> None:
    owner = _sharded_owner(optimizer, models)
    if owner is None:
        optimizer.load_state_dict(state)
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    inner = getattr(optimizer, "optimizer", optimizer)
    set_optimizer_state_dict(owner, inner, state, options=StateDictOptions(full_state_dict=True))


def write_rank(place: Path, rank: int, ranks: int, subjects: Subjects, device: torch.device, step: int) -> None:
    """Write what differs between ranks, flushed to the disk."""
    state = {
        "ranks": ranks,
        "step": step,
        "loaders": [loader.state_dict() for loader in subjects.loaders],
        "random_states": random_states(device),
    }
    write_file(place / f"rank_{rank}.bin", lambda file: torch.save(state, file))


@dataclass(frozen=True)
class Found:
    """What was read from a checkpoint: everything that is asked of it, before anything is changed."""

    weights: Sequence[dict[str, Any]]
    states: Mapping[str, Any]
    rank: Mapping[str, Any] | None


def read(place: Path, subjects: Subjects, rank: int, device: str, **load_options: Any) -> Found:
    """Read all that the subjects need.

    Parameters
    ----------
    place : Path
        The checkpoint.
    subjects : Subjects
        What will be restored.
    rank : int
        Whose own part to read.
    device : str
        Where tensors are put on the way.
    **load_options
        For ``torch.load``. ``weights_only`` is True by default: nothing in a checkpoint may run code.

    Raises
    ------
    CheckpointError
        The checkpoint lacks something.
    """
    options = {"map_location": device, "weights_only": True, **load_options}
    weights = []
    for number in range(len(subjects.models)):
        paths = [path for path in weight_files(place, number) if path.exists()]
        if not paths:
            raise CheckpointError(f"{place} holds no weights of prepared model {number} (counted from 0).")
        weights.append(read_weights(paths[0], device))
    names = [_name("optimizer", ".bin", number) for number in range(len(subjects.optimizers))]
    names += [_name("scheduler", ".bin", number) for number in range(len(subjects.schedulers))]
    names += [f"custom_checkpoint_{number}.pkl" for number in range(len(subjects.registered))]
    missing = [name for name in names if not (place / name).exists()]
    if missing:
        raise CheckpointError(
            f"{place} has no {', '.join(missing)}; prepare and register the same objects as when it was saved."
        )
    if subjects.scaler is not None and (place / "scaler.pt").exists():
        names.append("scaler.pt")
    states = {name: torch.load(place / name, **options) for name in names}
    own = place / f"rank_{rank}.bin"
    return Found(weights, states, torch.load(own, **{**options, "map_location": "cpu"}) if own.exists() else None)


def restore(found: Found, subjects: Subjects, **model_options: Any) -> None:
    """Put what was read into the subjects. Collective for models that are spread over ranks."""
    for model, weights in zip(subjects.models, found.weights, strict=True):
        load_full_state_dict(model, weights, **model_options)
    for number, optimizer in enumerate(subjects.optimizers):
        _load_optimizer(optimizer, found.states[_name("optimizer", ".bin", number)], subjects.models)
    for number, scheduler in enumerate(subjects.schedulers):
        scheduler.load_state_dict(found.states[_name("scheduler", ".bin", number)])
    for number, thing in enumerate(subjects.registered):
        thing.load_state_dict(found.states[f"custom_checkpoint_{number}.pkl"])
    if "scaler.pt" in found.states:
        subjects.scaler.load_state_dict(found.states["scaler.pt"])


def restore_rank(found: Found, subjects: Subjects, ranks: int, device: torch.device) -> int:
    """Put back what differs between ranks, random states last; returns the step count.

    With another number of ranks than at saving the data is shared out otherwise, so a place in the middle of an epoch
    means nothing, and neither do random states.
    """
    if found.rank is None:
        return 0
    if found.rank["ranks"] != ranks:
        warnings.warn(
            f"The checkpoint was saved by {found.rank['ranks']} ranks and is loaded by {ranks}: models, optimizers and "
            "schedulers are as saved, random states and places in loaders are not.",
            stacklevel=3,
        )
        return 0
    for loader, position in zip(subjects.loaders, found.rank["loaders"], strict=False):
        loader.load_state_dict(position)
    set_random_states(found.rank["random_states"], device)
    return int(found.rank["step"])

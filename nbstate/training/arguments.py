"""Checks what ``Accelerator`` is given, before any state is built."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

from nbstate.errors import ArgumentTypeError, ArgumentValueError
from nbstate.state import GradientAccumulationPlugin, InitProcessGroupKwargs
from nbstate.training.fp8 import AORecipeKwargs
from nbstate.training.handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
)
from nbstate.training.project import ProjectConfiguration

__all__ = ["accumulation_plugin", "loader_configuration", "project_configuration", "refuse_unserved", "sort_handlers"]

_STEPS_VARIABLE: Final = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
_HANDLERS: Final = (
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    AutocastKwargs,
    AORecipeKwargs,
)


def refuse_unserved(**arguments: Any) -> None:
    """Raise NotImplementedError for the first argument that is not None."""
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"Accelerator({name}=...) is not served yet; leave it out.")


def sort_handlers(handlers: Sequence[Any] | None) -> dict[type, Any]:
    """The handlers by their class, each at most once."""
    by_kind: dict[type, Any] = {}
    for handler in handlers or ():
        kind = next((known for known in _HANDLERS if isinstance(handler, known)), None)
        if kind is None:
            names = ", ".join(known.__name__ for known in _HANDLERS)
            raise ArgumentTypeError(f"kwargs_handlers takes {names}; not {type(handler).__name__}.")
        if kind in by_kind:
            raise ArgumentValueError(f"kwargs_handlers has more than one {kind.__name__}.")
        by_kind[kind] = handler
    return by_kind


def accumulation_plugin(steps: int, plugin: GradientAccumulationPlugin | None) -> GradientAccumulationPlugin:
    """One plugin out of two arguments and, where both are left alone, the launch variable."""
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise ArgumentTypeError(f"gradient_accumulation_steps is a whole number, not {type(steps).__name__}.")
    if steps < 1:
        raise ArgumentValueError(f"gradient_accumulation_steps is at least 1, not {steps}.")
    if plugin is not None:
        if steps != 1:
            raise ArgumentValueError("Give gradient_accumulation_steps or gradient_accumulation_plugin, not both.")
        return plugin
    return GradientAccumulationPlugin(num_steps=_launched_steps() if steps == 1 else steps)


def _launched_steps() -> int:
    text = os.environ.get(_STEPS_VARIABLE, "1")
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentValueError(f"{_STEPS_VARIABLE} is a whole number of at least 1, not {text!r}.")
    return int(text)


def loader_configuration(split: bool | None, config: DataLoaderConfiguration | None) -> DataLoaderConfiguration:
    """One configuration out of two arguments."""
    if config is None:
        return DataLoaderConfiguration(split_batches=bool(split))
    if split is not None and split != config.split_batches:
        raise ArgumentValueError("split_batches contradicts dataloader_config; give it there alone.")
    return config


def project_configuration(
    folder: str | os.PathLike[str] | None, config: ProjectConfiguration | None
) -> ProjectConfiguration:
    """One configuration out of two arguments."""
    if config is None:
        return ProjectConfiguration(folder)
    if folder is not None and config.project_dir not in (None, folder):
        raise ArgumentValueError("project_dir contradicts project_config; give it there alone.")
    if folder is not None:
        config.set_directories(folder)
    return config

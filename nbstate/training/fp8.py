"""Linear layers that compute in 8 bits, by torchao."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from nbstate.errors import ArgumentValueError
from nbstate.state import pick_device_kind
from nbstate.state.kinds import Settings

__all__ = ["AORecipeKwargs", "check_fp8", "convert"]

# The first NVIDIA devices with multipliers for 8-bit floats.
_LEAST_CAPABILITY: Final = (8, 9)
# They multiply blocks of this size; a layer of another gains nothing.
_BLOCK: Final = 16


@dataclass
class AORecipeKwargs(Settings):
    """How 'fp8' is done.

    Parameters
    ----------
    config : torchao.float8.Float8LinearConfig, optional
        Torchao's own settings.
    module_filter_func : callable, optional
        ``(module, name) -> bool``: which layers are converted. By default the linear layers whose sizes are multiples
        of 16, but neither the first nor the last, where precision matters most.
    """

    config: Any = None
    module_filter_func: Callable[[torch.nn.Module, str], bool] | None = None


def _torchao() -> Any:
    try:
        return importlib.import_module("torchao.float8")
    except ImportError as error:
        raise ArgumentValueError(
            f"mixed_precision='fp8' needs torchao (pip install torchao): {error}. Use 'bf16', 'fp16' or 'no'."
        ) from error


def check_fp8(cpu: bool) -> None:
    """Refuse 'fp8' where it cannot be had, before any state is built.

    Raises
    ------
    ArgumentValueError
        Torchao is missing, or the device has no 8-bit multipliers.
    """
    _torchao()
    kind = "cpu" if cpu else pick_device_kind().name
    able = kind == "cuda" and torch.cuda.get_device_capability() >= _LEAST_CAPABILITY
    if not able:
        raise ArgumentValueError(
            f"mixed_precision='fp8' needs an NVIDIA device of compute capability 8.9 or later (Ada, Hopper), and this "
            f"process computes on {kind}. Use 'bf16', 'fp16' or 'no'."
        )


def suits(model: torch.nn.Module) -> Callable[[torch.nn.Module, str], bool]:
    """Which layers of a model are converted by default."""
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    ends = {linear[0], linear[-1]} if linear else set()

    def one(module: torch.nn.Module, name: str) -> bool:
        return (
            isinstance(module, torch.nn.Linear)
            and name not in ends
            and module.in_features % _BLOCK == 0
            and module.out_features % _BLOCK == 0
        )

    return one


def convert(model: torch.nn.Module, recipe: AORecipeKwargs | None) -> None:
    """Make a model's linear layers compute in 8 bits, in place."""
    recipe = recipe or AORecipeKwargs()
    chosen = recipe.module_filter_func or suits(model)
    _torchao().convert_to_float8_training(model, config=recipe.config, module_filter_fn=chosen)

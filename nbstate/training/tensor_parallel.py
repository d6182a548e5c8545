"""Tensor parallelism: the layers of a model cut over neighbouring ranks by a plan.

A plan names modules (``*`` stands for any name of one level) and says how each is cut. It is the user's, or the
model's own (models of transformers bring one, ``tp_plan``). The words are those that such models use.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nbstate.errors import ArgumentTypeError, ArgumentValueError
from nbstate.training.succession import succession

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

__all__ = ["TorchTensorParallelPlugin", "is_cut", "parallelize"]


@dataclass
class TorchTensorParallelPlugin:
    """How models are cut over tensor-parallel ranks.

    Parameters
    ----------
    tp_size : int
        Ranks per model. Given without a ``ParallelismConfig``, the other ranks are replicas.
    tp_plan : dict, optional
        From names of modules to a ``ParallelStyle`` of torch, or to one of the words ``"colwise"``, ``"rowwise"``,
        ``"colwise_rep"``, ``"rowwise_rep"``, ``"embedding_rowwise"``, ``"sequence_parallel"``, ``"replicate"``. The
        model's own ``tp_plan`` by default.
    """

    tp_size: int = 1
    tp_plan: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.tp_size, bool) or not isinstance(self.tp_size, int):
            raise ArgumentTypeError(f"tp_size is a whole number, not {self.tp_size!r}.")
        if self.tp_size < 1:
            raise ArgumentValueError(f"tp_size is at least 1, not {self.tp_size}.")


def _words() -> dict[str, Callable[[], ParallelStyle | None]]:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    def whole_output() -> ParallelStyle:
        return ColwiseParallel(output_layouts=Replicate())

    def whole_input() -> ParallelStyle:
        return RowwiseParallel(input_layouts=Replicate())

    return {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "colwise_rep": whole_output,
        "colwise_gather_output": whole_output,
        "rowwise_rep": whole_input,
        "rowwise_split_input": whole_input,
        "embedding_rowwise": whole_input,
        "sequence_parallel": SequenceParallel,
        "replicate": lambda: None,
    }


def is_cut(model: torch.nn.Module) -> bool:
    """Whether some parameter of a model is a ``DTensor`` already."""
    return any(hasattr(parameter, "placements") for parameter in model.parameters())


def _plan_of(model: torch.nn.Module, plugin: TorchTensorParallelPlugin | None) -> Mapping[str, Any]:
    plan = plugin.tp_plan if plugin is not None and plugin.tp_plan is not None else getattr(model, "tp_plan", None)
    if not plan:
        raise ArgumentValueError(
            f"Tensor parallelism needs a plan, and {type(model).__name__} brings none (tp_plan): give one as "
            "Accelerator(torch_tp_plugin=TorchTensorParallelPlugin(tp_plan={'layers.*.up': 'colwise', ...}))."
        )
    if not isinstance(plan, Mapping):
        raise ArgumentTypeError(f"A tensor-parallel plan maps names of modules to styles; it is no {plan!r}.")
    return plan


def styles(model: torch.nn.Module, plan: Mapping[str, Any]) -> dict[str, ParallelStyle]:
    """A plan with torch's styles in place of words.

    Raises
    ------
    ArgumentValueError
        A word is not known, or a name fits no module of the model.
    """
    words = _words()
    names = [name for name, _ in model.named_modules()]
    found: dict[str, ParallelStyle] = {}
    for pattern, style in plan.items():
        if not any(_fits(name, pattern) for name in names):
            raise ArgumentValueError(f"The tensor-parallel plan names {pattern!r}; {type(model).__name__} has no such.")
        if isinstance(style, str):
            if style not in words:
                raise ArgumentValueError(
                    f"The tensor-parallel plan says {style!r} for {pattern!r}; served are {', '.join(words)}."
                )
            style = words[style]()
        if style is not None:
            found[pattern] = style
    return found


def _fits(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def parallelize(model: torch.nn.Module, mesh: DeviceMesh, plugin: TorchTensorParallelPlugin | None) -> None:
    """Cut a model by its plan over a mesh of one axis, in place. One that is cut already is left alone.

    Raises
    ------
    ArgumentValueError
        There is no plan, it does not fit the model, or it cuts one of two modules that share a parameter.
    """
    if is_cut(model):
        return
    plan = styles(model, _plan_of(model, plugin))
    from torch.distributed.tensor.parallel import parallelize_module

    tied = _shared(model)
    with succession(model):
        parallelize_module(model, mesh, plan)
        for names in tied:
            _tie_again(model, names)


def _shared(model: torch.nn.Module) -> list[list[str]]:
    """Names of parameters that are one and the same."""
    by_parameter: dict[torch.nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_parameter.setdefault(parameter, []).append(name)
    return [names for names in by_parameter.values() if len(names) > 1]


def _tie_again(model: torch.nn.Module, names: list[str]) -> None:
    first = model.get_parameter(names[0])
    for name in names[1:]:
        other = model.get_parameter(name)
        if other is first:
            continue
        if getattr(other, "placements", None) != getattr(first, "placements", None):
            raise ArgumentValueError(
                f"{names[0]} and {name} are one parameter, but the tensor-parallel plan cuts them differently; "
                "give both the same cut, or leave both whole."
            )
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, first)

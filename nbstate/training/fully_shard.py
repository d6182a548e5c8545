"""FSDP2: a model's parameters, gradients and optimizer state cut over the data-parallel ranks.

``fully_shard`` works on the model in place: it stays the user's own object, its parameters become ``DTensor``s, and
hooks gather each unit's parameters before they are needed. A unit is a module that is gathered as a whole; which
modules are units is the wrap policy's to say, and what no unit holds belongs to the model itself.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from nbstate.errors import ArgumentTypeError, ArgumentValueError
from nbstate.training.succession import succession

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["FullyShardedDataParallelPlugin", "is_sharded", "shard_model"]

_POLICIES: Final = ("transformer_based_wrap", "size_based_wrap", "no_wrap")
_DTYPES: Final = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


@dataclass
class FullyShardedDataParallelPlugin:
    """How models are sharded.

    Given without a ``ParallelismConfig``, the model is sharded over all ranks.

    Parameters
    ----------
    fsdp_version : int
        2, the one that torch goes on with.
    reshard_after_forward : bool or int
        Free a unit's gathered parameters after its forward, and gather them again in the backward: less memory, more
        traffic. A number: keep them cut over that many ranks.
    auto_wrap_policy : {"transformer_based_wrap", "size_based_wrap", "no_wrap"} or callable, optional
        Which modules are units: those of the classes named below; those with at least ``min_num_params`` parameters;
        the model alone; or those for which the callable, given the module, is true. One of torch's own policies will
        do. By default the classes that the model itself names (``_no_split_modules``), if it does.
    transformer_cls_names_to_wrap : sequence of str, optional
        Names of module classes.
    min_num_params : int, optional
        Parameters.
    mixed_precision_policy : MixedPrecisionPolicy or dict, optional
        Torch's, or its arguments. By default parameters are gathered in the mixed precision and gradients reduced in
        float32.
    cpu_offload : bool or OffloadPolicy
        Keep parameters, gradients and optimizer state in the CPU's memory between uses.
    ignored_modules : iterable of modules, optional
        Their parameters stay whole on every rank and their gradients are not averaged.
    state_dict_type : {"FULL_STATE_DICT"}
        Checkpoints hold whole tensors, so any number of ranks can load them.
    activation_checkpointing : bool
        Compute the activations of units again in the backward instead of keeping them.

    Examples
    --------
    >>> from nbstate.training.fully_shard import FullyShardedDataParallelPlugin
    >>> FullyShardedDataParallelPlugin(auto_wrap_policy="size_based_wrap", min_num_params=1000).min_num_params
    1000
    """

    fsdp_version: int = 2
    reshard_after_forward: bool | int = True
    auto_wrap_policy: str | Callable[..., Any] | None = None
    transformer_cls_names_to_wrap: Sequence[str] | None = None
    min_num_params: int | None = None
    mixed_precision_policy: Any = None
    cpu_offload: Any = False
    ignored_modules: Iterable[torch.nn.Module] | None = None
    state_dict_type: str = "FULL_STATE_DICT"
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        if self.fsdp_version != 2:
            raise NotImplementedError(
                f"FullyShardedDataParallelPlugin(fsdp_version={self.fsdp_version}): only version 2 is served."
            )
        policy = self.auto_wrap_policy
        if isinstance(policy, str) and policy not in _POLICIES:
            raise ArgumentValueError(
                f"auto_wrap_policy is one of {', '.join(map(repr, _POLICIES))} or a callable, not {policy!r}."
            )
        if policy is not None and not isinstance(policy, str) and not _is_policy(policy):
            raise ArgumentTypeError(f"auto_wrap_policy is a word or a callable, not {type(policy).__name__}.")
        if policy == "size_based_wrap" and not self.min_num_params:
            raise ArgumentValueError("auto_wrap_policy='size_based_wrap' needs min_num_params.")
        if self.state_dict_type != "FULL_STATE_DICT":
            raise NotImplementedError(
                f"FullyShardedDataParallelPlugin(state_dict_type={self.state_dict_type!r}): checkpoints hold whole "
                "tensors; only 'FULL_STATE_DICT' is served."
            )
        if isinstance(self.ignored_modules, Iterable):
            self.ignored_modules = tuple(self.ignored_modules)

    def units(self, model: torch.nn.Module) -> list[torch.nn.Module]:
        """The modules within a model that are units, inner ones first; the model itself is not among them.

        Raises
        ------
        ArgumentValueError
            A class is named that no module is of.
        """
        inner = [module for module in model.modules() if module is not model][::-1]
        policy: Any = self.auto_wrap_policy
        if policy == "no_wrap":
            return []
        if policy == "size_based_wrap":
            return _large(inner, self.min_num_params or 1)
        if hasattr(policy, "_run_policy"):
            chosen = policy._run_policy(model, set(), {})
            return [module for module in inner if module in chosen]
        if callable(policy):
            return [module for module in inner if _chosen(policy, module)]
        return self._named(model, inner)

    def _named(self, model: torch.nn.Module, inner: list[torch.nn.Module]) -> list[torch.nn.Module]:
        names = self.transformer_cls_names_to_wrap
        if names is None:
            own = getattr(model, "_no_split_modules", None) or ()
            return [module for module in inner if type(module).__name__ in own]
        wanted = {names} if isinstance(names, str) else set(names)
        missing = wanted - {type(module).__name__ for module in inner}
        if missing:
            raise ArgumentValueError(
                f"transformer_cls_names_to_wrap names {', '.join(sorted(missing))}, but no module of "
                f"{type(model).__name__} is of that class."
            )
        return [module for module in inner if type(module).__name__ in wanted]


def _is_policy(value: Any) -> bool:
    return callable(value) or hasattr(value, "_run_policy")


def _chosen(policy: Callable[..., Any], module: torch.nn.Module) -> bool:
    # Torch's own policies of the older kind ask for the walk's state as well; this walk visits every module.
    if "recurse" in inspect.signature(policy).parameters:
        size = sum(parameter.numel() for parameter in module.parameters())
        return bool(policy(module=module, recurse=False, nonwrapped_numel=size))
    return bool(policy(module))


def _large(inner: Iterable[torch.nn.Module], least: int) -> list[torch.nn.Module]:
    """Modules with enough parameters that no unit inside them holds yet."""
    units: list[torch.nn.Module] = []
    taken: set[torch.nn.Parameter] = set()
    for module in inner:
        free = [parameter for parameter in module.parameters() if parameter not in taken]
        if sum(parameter.numel() for parameter in free) >= least and not _holds_modules_only(module):
            units.append(module)
            taken.update(free)
    return units


def _holds_modules_only(module: torch.nn.Module) -> bool:
    """Lists and dicts of modules have no forward, so nothing would gather their parameters."""
    return isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict)


def is_sharded(model: Any) -> bool:
    """Whether ``fully_shard`` was applied to a model."""
    # By what it can do: importing FSDP to ask for its class costs half a second where nobody uses it. The class is
    # asked, since a module without such an attribute would search its parameters and children for it.
    return hasattr(type(model), "set_requires_gradient_sync")


def shard_model(
    model: torch.nn.Module, mesh: DeviceMesh, plugin: FullyShardedDataParallelPlugin, precision: str
) -> None:
    """Cut a model over a mesh, in place: units first, then what is left.

    Parameters
    ----------
    model : torch.nn.Module
        The same on every rank of the mesh. On any device: each unit is moved to the mesh's before it is cut, so the
        whole model need not fit.
    mesh : DeviceMesh
        Of one axis (shard) or two (replicate, shard).
    plugin : FullyShardedDataParallelPlugin
        How.
    precision : {"no", "fp16", "bf16", "fp8"}
        What the model computes in.
    """
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError as error:
        raise NotImplementedError(f"Sharding needs torch 2.6 or later; this is {torch.__version__}.") from error
    units = plugin.units(model)
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": plugin.reshard_after_forward,
        **_policies(plugin, precision, mesh),
    }
    ignored = {parameter for module in plugin.ignored_modules or () for parameter in module.parameters()}
    if ignored:
        options["ignored_params"] = ignored
    with succession(model):
        for unit in units:
            if plugin.activation_checkpointing:
                _recompute(unit)
            fully_shard(unit, **options)
        fully_shard(model, **options)


def _policies(plugin: FullyShardedDataParallelPlugin, precision: str, mesh: DeviceMesh) -> dict[str, Any]:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    policies: dict[str, Any] = {}
    chosen, dtype = plugin.mixed_precision_policy, _DTYPES.get(precision)
    if isinstance(chosen, dict):
        chosen = MixedPrecisionPolicy(**chosen)
    if chosen is None and dtype is not None:
        chosen = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    if chosen is not None:
        policies["mp_policy"] = chosen
    if plugin.cpu_offload and mesh.device_type != "cpu":
        policies["offload_policy"] = CPUOffloadPolicy() if plugin.cpu_offload is True else plugin.cpu_offload
    return policies


def _recompute(unit: torch.nn.Module) -> None:
    importlib.import_module("torch.distributed._composable").checkpoint(unit)

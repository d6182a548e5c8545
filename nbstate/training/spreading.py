"""From a user's model to its part on this rank: tensor parallel first, then sharded or replicated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from nbstate.errors import ArgumentTypeError, ArgumentValueError
from nbstate.state import AcceleratorState, ParallelismConfig, PartialState
from nbstate.training.fully_shard import FullyShardedDataParallelPlugin, is_sharded, shard_model
from nbstate.training.handlers import DistributedDataParallelKwargs
from nbstate.training.layout import data_mesh
from nbstate.training.parallelism import wrap_model
from nbstate.training.succession import follow, succession
from nbstate.training.tensor_parallel import TorchTensorParallelPlugin, parallelize

__all__ = ["Spread", "context_parallel", "layout_for"]


def layout_for(
    layout: ParallelismConfig | None,
    fsdp: FullyShardedDataParallelPlugin | None,
    tp: TorchTensorParallelPlugin | None,
    world_size: int,
) -> ParallelismConfig | None:
    """The layout that was given, or the one that the plugins mean.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        A plugin is of another kind, contradicts the layout, or does not fit the number of ranks.
    """
    for name, plugin, kind in (
        ("fsdp_plugin", fsdp, FullyShardedDataParallelPlugin),
        ("torch_tp_plugin", tp, TorchTensorParallelPlugin),
    ):
        if plugin is not None and not isinstance(plugin, kind):
            raise ArgumentTypeError(f"{name} is a {kind.__name__}, not a {type(plugin).__name__}.")
    tp_size = 1 if tp is None else tp.tp_size
    if layout is not None:
        if tp_size not in (1, layout.tp_size):
            raise ArgumentValueError(
                f"TorchTensorParallelPlugin(tp_size={tp_size}) contradicts parallelism_config, where it is "
                f"{layout.tp_size}; give it there alone."
            )
        return layout
    if (fsdp is None and tp_size == 1) or world_size == tp_size == 1:
        return None
    if world_size % tp_size:
        raise ArgumentValueError(f"tp_size={tp_size} does not divide the number of ranks, {world_size}.")
    rest = world_size // tp_size
    if fsdp is not None:
        return ParallelismConfig(dp_shard_size=rest, tp_size=tp_size)
    return ParallelismConfig(dp_replicate_size=rest, tp_size=tp_size)


@dataclass(frozen=True)
class Spread:
    """How models are spread over ranks.

    Attributes
    ----------
    ddp : DistributedDataParallelKwargs, optional
        For models that are replicated whole.
    fsdp : FullyShardedDataParallelPlugin, optional
        For models that are sharded.
    tp : TorchTensorParallelPlugin, optional
        For models whose layers are cut.
    """

    ddp: DistributedDataParallelKwargs | None = None
    fsdp: FullyShardedDataParallelPlugin | None = None
    tp: TorchTensorParallelPlugin | None = None

    def model(
        self, model: torch.nn.Module, state: AcceleratorState, place: bool = True, training: bool = True
    ) -> torch.nn.Module:
        """Spread a model over the ranks.

        Parameters
        ----------
        model : torch.nn.Module
            On every rank. All start from the main process's parameters and buffers.
        state : AcceleratorState
            Says who this rank is, and the layout.
        place : bool
            Move it to the rank's device.
        training : bool
            False: its gradients need no averaging, so it is not sharded; its layers are cut all the same.

        Returns
        -------
        torch.nn.Module
            The model itself, or its wrapper.
        """
        mesh, layout = state.device_mesh, state.parallelism_config
        own = getattr(model, "_orig_mod", model)
        if mesh is None or layout is None or not _needs_mesh(layout):
            if place:
                model = _moved(model, state.device)
            return wrap_model(model, PartialState(), self.ddp) if training else model
        if is_sharded(own):
            return model
        _start_alike(own, state.device)
        if layout.tp_size > 1:
            parallelize(own, mesh["tp"], self.tp)
        if training and layout.data_parallel_size * layout.cp_size > 1:
            shard_model(own, data_mesh(mesh), self.fsdp or FullyShardedDataParallelPlugin(), state.mixed_precision)
            return model
        return _moved(model, state.device) if place else model

    @staticmethod
    def optimizers(optimizers: Iterable[Any]) -> None:
        """Let optimizers that were prepared before a model follow its parameters."""
        for optimizer in optimizers:
            follow(getattr(optimizer, "optimizer", optimizer))


def _moved(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """The model on a device. Parameters stay the same ones, but for XLA: there optimizers must follow them."""
    with succession(model):
        return model.to(device)


def _needs_mesh(layout: ParallelismConfig) -> bool:
    """Whether the layout is more than replicas, which DDP serves without one."""
    return layout.shards or layout.non_data_parallel_size > 1


@torch.no_grad()
def _start_alike(model: torch.nn.Module, device: torch.device) -> None:
    """Give every rank the main process's parameters and buffers.

    DDP does this by itself. Parts cut from models that were initialised differently would make up a model that nobody
    initialised.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        # What is cut already is a part that no other rank has.
        if hasattr(tensor, "placements"):
            continue
        sent = tensor.detach().to(device).contiguous()
        dist.broadcast(sent, src=0)
        if sent.data_ptr() != tensor.data_ptr():
            tensor.copy_(sent)


def context_parallel(
    state: AcceleratorState,
    buffers: list[torch.Tensor] | None,
    buffer_seq_dims: list[int] | None,
    no_restore_buffers: set[torch.Tensor] | None,
) -> contextlib.AbstractContextManager[Any]:
    """A context in which buffers are cut along the sequence and attention goes round a ring of ranks.

    Does nothing where the layout has no context parallelism.
    """
    mesh, layout = state.device_mesh, state.parallelism_config
    if mesh is None or layout is None or layout.cp_size == 1:
        return contextlib.nullcontext()
    from torch.distributed.tensor.experimental import context_parallel as ring

    return ring(
        mesh["cp"],
        buffers=buffers,
        buffer_seq_dims=buffer_seq_dims,
        no_restore_buffers=no_restore_buffers,
    )

"""What a user may hand to ``Accelerator(kwargs_handlers=[...])`` and ``Accelerator(dataloader_config=...)``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from nbstate.errors import ArgumentTypeError
from nbstate.state.kinds import Settings
from nbstate.training.rebuilding import stateful_loader

__all__ = [
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "GradScalerKwargs",
]


@dataclass
class AutocastKwargs(Settings):
    """How ``Accelerator.autocast`` casts; the fields are ``torch.autocast``'s."""

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class GradScalerKwargs(Settings):
    """How losses are scaled under 'fp16'; the fields are ``torch.amp.GradScaler``'s."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


class DDPCommunicationHookType(Enum):
    """How DDP sends gradients. All but NO send them in another form than they are computed in."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


@dataclass
class DistributedDataParallelKwargs(Settings):
    """How models are wrapped; the fields up to ``static_graph`` are ``DistributedDataParallel``'s.

    Attributes
    ----------
    bucket_cap_mb : int
        Size of a bucket of gradients, MiB.
    comm_hook : DDPCommunicationHookType
        How gradients are sent.
    comm_wrapper : DDPCommunicationHookType
        FP16 or BF16: cast what ``comm_hook`` sends.
    comm_state_option : dict
        Options of PowerSGD's state.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def to_kwargs(self) -> dict[str, Any]:
        """Arguments of ``DistributedDataParallel`` that differ from their defaults, without the hook's."""
        return {name: value for name, value in super().to_kwargs().items() if not name.startswith("comm_")}

    def register_comm_hook(self, model: Any) -> None:
        """Register the chosen hook on a model that DDP has wrapped; does nothing for ``NO``."""
        if self.comm_hook is DDPCommunicationHookType.NO:
            return
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        hooks: dict[DDPCommunicationHookType, Callable[..., Any]] = {
            DDPCommunicationHookType.FP16: default_hooks.fp16_compress_hook,
            DDPCommunicationHookType.BF16: default_hooks.bf16_compress_hook,
            DDPCommunicationHookType.POWER_SGD: powerSGD_hook.powerSGD_hook,
            DDPCommunicationHookType.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook,
        }
        wrappers: dict[DDPCommunicationHookType, Callable[..., Any]] = {
            DDPCommunicationHookType.FP16: default_hooks.fp16_compress_wrapper,
            DDPCommunicationHookType.BF16: default_hooks.bf16_compress_wrapper,
        }
        hook = hooks[self.comm_hook]
        if self.comm_wrapper is not DDPCommunicationHookType.NO:
            if self.comm_wrapper not in wrappers:
                raise ArgumentTypeError(f"comm_wrapper is NO, FP16 or BF16, not {self.comm_wrapper.name}.")
            hook = wrappers[self.comm_wrapper](hook)
        state = None
        if self.comm_hook in (DDPCommunicationHookType.POWER_SGD, DDPCommunicationHookType.BATCHED_POWER_SGD):
            state = powerSGD_hook.PowerSGDState(None, **self.comm_state_option)
        model.register_comm_hook(state=state, hook=hook)


@dataclass
class DataLoaderConfiguration:
    """How loaders are shared among ranks.

    Attributes
    ----------
    split_batches : bool
        The loader's ``batch_size`` is the whole world's and each rank gets its part of every batch; otherwise it is
        one rank's.
    dispatch_batches : bool, optional
        The main process alone reads the data and sends each rank its part. By default only an ``IterableDataset``
        is read so, since ranks that read it separately might not see the same stream.
    even_batches : bool
        Fill up the last global batch with the first samples, so that every rank gets equally many, equally large
        batches.
    use_seedable_sampler : bool
        Shuffle by ``data_seed + epoch``: the order depends on nothing else and can be repeated.
    data_seed : int, optional
        Seed of that order; torch's initial seed on the main process by default.
    non_blocking : bool
        Copy to the device beside the computation (needs pinned memory).
    use_stateful_dataloader : bool
        Use torchdata's loader, which also keeps the state of datasets and workers that have one. Without it loaders
        keep their position by counting batches.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False

    def __post_init__(self) -> None:
        if self.use_stateful_dataloader:
            # Said here, not in the middle of ``prepare``, when other ranks wait.
            stateful_loader()

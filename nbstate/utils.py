"""Names that users of the ecosystem look for here; each lives on its own floor."""

from __future__ import annotations

from nbstate.state import (
    DistributedType,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ParallelismConfig,
    PrecisionType,
)
from nbstate.training.containers import concatenate, find_batch_size, send_to_device
from nbstate.training.handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
)
from nbstate.training.operations import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)
from nbstate.training.parallelism import extract_model_from_parallel
from nbstate.training.randomness import set_seed, synchronize_rng_states

__all__ = [
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "ParallelismConfig",
    "PrecisionType",
    "broadcast",
    "broadcast_object_list",
    "concatenate",
    "extract_model_from_parallel",
    "find_batch_size",
    "gather",
    "gather_object",
    "pad_across_processes",
    "reduce",
    "send_to_device",
    "set_seed",
    "synchronize_rng_states",
]

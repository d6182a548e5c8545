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
from nbstate.training.fp8 import AORecipeKwargs
from nbstate.training.fully_shard import FullyShardedDataParallelPlugin
from nbstate.training.handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
)
from nbstate.training.memory import (
    clear_device_cache,
    find_executable_batch_size,
    release_memory,
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
from nbstate.training.project import ProjectConfiguration
from nbstate.training.randomness import set_seed, synchronize_rng_states
from nbstate.training.tensor_parallel import TorchTensorParallelPlugin

__all__ = [
    "AORecipeKwargs",
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "ParallelismConfig",
    "PrecisionType",
    "ProjectConfiguration",
    "TorchTensorParallelPlugin",
    "broadcast",
    "broadcast_object_list",
    "clear_device_cache",
    "concatenate",
    "extract_model_from_parallel",
    "find_batch_size",
    "find_executable_batch_size",
    "gather",
    "gather_object",
    "pad_across_processes",
    "reduce",
    "release_memory",
    "send_to_device",
    "set_seed",
    "synchronize_rng_states",
]

"""Floor 2: what moves the gradient state."""

from __future__ import annotations

from nbstate.training.accelerator import Accelerator
from nbstate.training.containers import find_batch_size, send_to_device
from nbstate.training.dataloader import prepare_data_loader, skip_first_batches
from nbstate.training.fp8 import AORecipeKwargs
from nbstate.training.fully_shard import FullyShardedDataParallelPlugin
from nbstate.training.handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
)
from nbstate.training.local_sgd import LocalSGD
from nbstate.training.memory import clear_device_cache, find_executable_batch_size, release_memory
from nbstate.training.operations import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)
from nbstate.training.optimizer import AcceleratedOptimizer
from nbstate.training.parallelism import extract_model_from_parallel
from nbstate.training.project import ProjectConfiguration
from nbstate.training.randomness import set_seed, synchronize_rng_states
from nbstate.training.scheduler import AcceleratedScheduler
from nbstate.training.tensor_parallel import TorchTensorParallelPlugin
from nbstate.training.tracking import GeneralTracker, TensorBoardTracker

__all__ = [
    "AORecipeKwargs",
    "AcceleratedOptimizer",
    "AcceleratedScheduler",
    "Accelerator",
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "FullyShardedDataParallelPlugin",
    "GeneralTracker",
    "GradScalerKwargs",
    "LocalSGD",
    "ProjectConfiguration",
    "TensorBoardTracker",
    "TorchTensorParallelPlugin",
    "broadcast",
    "broadcast_object_list",
    "clear_device_cache",
    "extract_model_from_parallel",
    "find_batch_size",
    "find_executable_batch_size",
    "gather",
    "gather_object",
    "pad_across_processes",
    "prepare_data_loader",
    "reduce",
    "release_memory",
    "send_to_device",
    "set_seed",
    "skip_first_batches",
    "synchronize_rng_states",
]

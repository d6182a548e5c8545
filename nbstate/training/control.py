"""What an accelerator knows through others: the state's attributes and methods, and the loaders' configuration."""

from __future__ import annotations

from typing import Any

import torch

from nbstate.state import AcceleratorState, DistributedType, LaunchEnvironment, PartialState, ProcessControl
from nbstate.training.handlers import DataLoaderConfiguration

__all__ = ["StateView"]


class StateView(ProcessControl):
    """The half of ``Accelerator`` that only reads.

    Process control (``on_main_process``, ``main_process_first``, ``split_between_processes``, ``wait_for_everyone``,
    ...) comes with ``ProcessControl`` and goes by the attributes below.
    """

    state: AcceleratorState
    dataloader_config: DataLoaderConfiguration
    # The same facts as ``state``, one look-up away instead of two: these are read in training loops.
    _process: PartialState

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device this rank computes on."""
        return self._process.device

    @property
    def backend(self) -> str | None:  # type: ignore[override]
        """What the ranks talk over; None alone."""
        return self._process.backend

    @property
    def environment(self) -> LaunchEnvironment:  # type: ignore[override]
        """What the launch variables said."""
        return self._process.environment

    @property
    def distributed_type(self) -> DistributedType:  # type: ignore[override]
        """How the ranks work together."""
        return self.state.distributed_type

    @property
    def num_processes(self) -> int:  # type: ignore[override]
        """World size."""
        return self._process.num_processes

    @property
    def process_index(self) -> int:  # type: ignore[override]
        """This rank's number in the world."""
        return self._process.process_index

    @property
    def local_process_index(self) -> int:  # type: ignore[override]
        """This rank's number on its machine."""
        return self._process.local_process_index

    @property
    def multi_device(self) -> bool:
        """Whether each of several ranks has an accelerator of its own."""
        return self.use_distributed and self.device.type != "cpu"

    @property
    def mixed_precision(self) -> str:
        """What models compute in: 'no', 'fp16', 'bf16' or 'fp8'."""
        return self.state.mixed_precision

    @property
    def parallelism_config(self) -> Any:
        """The ``ParallelismConfig``, or None."""
        return self.state.parallelism_config

    @property
    def torch_device_mesh(self) -> Any:
        """The layout of the ranks as torch knows it, or None."""
        return self.state.device_mesh

    @property
    def split_batches(self) -> bool:
        """Whether loaders' batches are split among ranks."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether the main process reads for all; None: only data without indices."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether a short last global batch is filled up."""
        return self.dataloader_config.even_batches

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether shuffles go by seed and epoch alone."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether loaders are torchdata's."""
        return self.dataloader_config.use_stateful_dataloader

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied to the device beside the computation."""
        return self.dataloader_config.non_blocking

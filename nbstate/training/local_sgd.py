"""Local SGD: ranks train apart and meet to average their parameters every few steps.

With ``k`` steps between two meetings ranks talk ``k`` times less than under DDP, at the price of training on parameters
that have drifted apart meanwhile (Stich 2019, "Local SGD Converges Fast and Communicates Little").
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from nbstate.errors import ArgumentTypeError, ArgumentValueError
from nbstate.training.parallelism import Unsynchronised
from nbstate.training.weights import is_spread

__all__ = ["LocalSGD"]


class LocalSGD:
    """A context in which gradients stay on their rank and ``step`` averages parameters now and then.

    Parameters
    ----------
    accelerator : Accelerator
        The one that prepared the model.
    model : torch.nn.Module
        Prepared; the same on every rank.
    local_sgd_steps : int
        Calls of ``step`` between two averagings.
    enabled : bool
        False: everything is as without the context.

    Raises
    ------
    ArgumentTypeError
        The model is spread over ranks, so no rank has one of its own to train.

    Examples
    --------
    Average every 8 optimizer steps::

        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8) as local_sgd:
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model, batch))
                    optimizer.step()
                    optimizer.zero_grad()
                    local_sgd.step()
    """

    def __init__(self, accelerator: Any, model: torch.nn.Module, local_sgd_steps: int, enabled: bool = True) -> None:
        if local_sgd_steps < 1:
            raise ArgumentValueError(f"local_sgd_steps is at least 1, not {local_sgd_steps}.")
        self.enabled = enabled and accelerator.use_distributed
        if self.enabled and is_spread(model):
            raise ArgumentTypeError("LocalSGD trains a whole model on each rank; this one is spread over ranks.")
        self.accelerator = accelerator
        self.model = model
        self.local_sgd_steps = local_sgd_steps
        self.num_steps = 0
        self._apart = Unsynchronised((model,))

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self._apart.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.enabled:
            return
        self._apart.__exit__(kind, error, trace)
        # A rank that failed would meet ranks that did not, at different places.
        if kind is None:
            self._average()

    def step(self) -> None:
        """Count one call, as one after each ``optimizer.step()``, and average when it is time.

        Under accumulation a loop calls both at every batch, so batches are counted.
        """
        if not self.enabled:
            return
        self.num_steps += 1
        if self.num_steps % self.local_sgd_steps == 0:
            self._average()

    def _average(self) -> None:
        # Running statistics drift apart too: DDP hands on rank 0's only in forwards that synchronise.
        tensors = [*self.model.parameters(), *(buffer for buffer in self.model.buffers() if buffer.is_floating_point())]
        with torch.no_grad():
            for group in _by_kind(tensors):
                together = torch.cat([tensor.detach().flatten() for tensor in group])
                dist.all_reduce(together)
                together /= self.accelerator.num_processes
                parts = torch.split(together, [tensor.numel() for tensor in group])
                for tensor, part in zip(group, parts, strict=True):
                    tensor.copy_(part.view_as(tensor))


def _by_kind(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Tensors that one message can carry, each tensor once."""
    groups: dict[tuple[torch.device, torch.dtype], dict[int, torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), {})[id(tensor)] = tensor
    return [list(group.values()) for group in groups.values()]

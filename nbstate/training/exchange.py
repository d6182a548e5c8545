"""What an accelerator and its peers on the other ranks tell each other."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from nbstate.state import GradientState
from nbstate.training import metrics, operations
from nbstate.training.control import StateView
from nbstate.training.spreading import context_parallel
from nbstate.training.uneven import join_uneven_inputs

__all__ = ["Exchange"]


class Exchange(StateView):
    """The half of ``Accelerator`` that talks to other ranks. All but ``set_trigger`` are to be called on every rank."""

    gradient_state: GradientState
    _dataloaders: list[Any]
    _trigger: torch.Tensor | None = None

    def gather(self, tensor: Any) -> Any:
        """Collect tensors of every rank, joined along dimension 0; see ``operations.gather``."""
        return operations.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Collect every rank's part of a batch, without what only filled up the last one.

        Parameters
        ----------
        input_data
            Tensors in nested containers, one row a sample; or objects, as a list with one a sample.
        use_gather_object : bool
            Gather as objects even what holds tensors only (tensors of different shapes).

        Returns
        -------
        object
            The same on every rank. On the last batch of a loader, what has as many rows as the filled-up global batch
            (or a multiple: several rows a sample) is cut to the real samples; anything else is whole.
        """
        if use_gather_object or not metrics.holds_tensors_only(input_data):
            gathered = operations.gather_object(input_data, once=True)
            return metrics.drop_filling(gathered, self.gradient_state, objects=True)
        return metrics.drop_filling(operations.gather(input_data, once=True), self.gradient_state)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Combine tensors over all ranks; see ``operations.reduce``."""
        return operations.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Lengthen tensors to the longest of any rank; see ``operations.pad_across_processes``."""
        return operations.pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """A context for training on data that ends on some ranks before the others.

        Parameters
        ----------
        joinables : sequence
            Prepared models (in DDP) and optimizers. Ranks that are out of data answer their collectives until the
            last rank is.
        even_batches : bool, optional
            Overrides the loaders' setting within the context. Where loaders fill up there is nothing to wait for.

        Examples
        --------
        ::

            with accelerator.join_uneven_inputs([model], even_batches=False):
                for batch in loader:
                    ...
        """
        if self.num_processes == 1:
            return contextlib.nullcontext()
        return join_uneven_inputs(joinables, self._dataloaders, self.even_batches, even_batches)

    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> contextlib.AbstractContextManager[Any]:
        """A context for one step, in which tensors are cut along the sequence over context-parallel ranks.

        Does nothing without context parallelism in the layout.

        Parameters
        ----------
        buffers : list of torch.Tensor, optional
            Inputs, labels, positions; cut in place, and whole again afterwards.
        buffer_seq_dims : list of int, optional
            For each, which dimension is the sequence.
        no_restore_buffers : set of torch.Tensor, optional
            Those that need not be whole again.
        """
        return context_parallel(self.state, buffers, buffer_seq_dims, no_restore_buffers)

    def set_trigger(self) -> None:
        """Raise this rank's flag, for ``check_trigger`` to be seen by all."""
        self._trigger = torch.ones((), dtype=torch.int64, device=self.device)

    def check_trigger(self) -> bool:
        """Whether any rank raised its flag since the last time that this was true; to be called on every rank.

        Examples
        --------
        Stop early when any rank says so::

            if loss_is_small:
                accelerator.set_trigger()
            if accelerator.check_trigger():
                break
        """
        flag = self._trigger if self._trigger is not None else torch.zeros((), dtype=torch.int64, device=self.device)
        raised = flag.clone()
        if self.num_processes > 1:
            dist.all_reduce(raised)
        if not bool(raised.item()):
            return False
        self._trigger = None
        return True

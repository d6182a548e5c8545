"""Loaders that give every rank its part and tell the gradient state where in the epoch it is.

What a loop over a prepared loader does::

    for batch in loader:     iteration starts: epoch counted, shuffle agreed, first batch fetched
        ...                  the NEXT batch is fetched before this one is handed out, so that
                             ``end_of_dataloader`` is True on the last batch and on no other
    after, or break          the loader is taken off the gradient state's list

The iteration is a generator that only the ``for`` statement holds. When the loop ends, by exhaustion, ``break`` or an
exception, Python drops that one reference and closes the generator there and then; its ``finally`` is what takes the
loader off the list. Nothing waits for the garbage collector.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch.utils.data import DataLoader

from nbstate.state import GradientState
from nbstate.telemetry import probe
from nbstate.training import sampling
from nbstate.training.containers import send_to_device
from nbstate.training.randomness import synchronize_rng_states

__all__ = ["PreparedLoader"]

_END: Final = object()


class PreparedLoader(DataLoader[Any]):
    """One rank's loader: iterates over ``base_dataloader``, and is for all else what the user's own loader was.

    Attributes
    ----------
    base_dataloader : DataLoader
        The loader that fetches this rank's batches.
    dataset
        The user's own, also where ranks read it through a filter.
    end_of_dataloader : bool
        Whether the batch last handed out is the last one; False at rest.
    remainder : int
        Samples in the last global batch if it is short, 0 if it is full or dropped, -1 if not known (at rest, and
        where the data has no length).
    iteration : int
        Epoch of the next iteration, from 0.
    total_batch_size : int or None
        Samples in a full global batch.
    fills : bool
        Whether a short last global batch is filled up, so that there is something to drop from what is gathered.
    """

    # Not a call of DataLoader's __init__: everything a DataLoader has is looked up on the one inside.
    def __init__(
        self,
        base_dataloader: DataLoader[Any],
        *,
        dataset: Any,
        batch_size: int | None,
        total_batch_size: int | None,
        drop_last: bool,
        fills: bool = False,
        device: torch.device | None = None,
        non_blocking: bool = False,
        rng_types: Sequence[Any] | None = None,
    ) -> None:
        self.base_dataloader = base_dataloader
        self.dataset = dataset
        self.batch_size = batch_size
        self.total_batch_size = total_batch_size
        self.drop_last = drop_last
        self.fills = fills
        self.device = device
        self.non_blocking = non_blocking
        self.rng_types = rng_types
        self.gradient_state = GradientState()
        self.end_of_dataloader = False
        self.remainder = -1
        self.iteration = 0
        self.skip_batches = 0

    def __getattr__(self, name: str) -> Any:
        # Copying and unpickling ask before there is anything inside.
        if name == "base_dataloader":
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)

    def __len__(self) -> int:
        return len(self.base_dataloader)

    @property
    def total_dataset_length(self) -> int | None:
        """Samples of one epoch over all ranks; None if the data has no length."""
        sampler = getattr(self.base_dataloader.batch_sampler, "sampler", None)
        length = None if sampler is None else sampling.length_of(sampler)
        return sampling.length_of(self.dataset) if length is None else length

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is. Without it, iterations count from 0."""
        self.iteration = epoch
        base = self.base_dataloader
        sampling.set_epoch(base.sampler if base.batch_sampler is None else base.batch_sampler, epoch)
        sampling.set_epoch(base.dataset, epoch)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        state = self.gradient_state
        epoch = self.iteration
        if state.active_dataloader is None:
            probe.epoch(epoch)
        self.set_epoch(epoch)
        self.iteration = epoch + 1
        if self.rng_types:
            generator = getattr(getattr(self.base_dataloader, "sampler", None), "generator", None)
            synchronize_rng_states(self.rng_types, generator)
        batches = self._batches()
        current = self._fetch(batches)
        if current is _END:
            return
        # A loader may be iterated within its own loop; the outer iteration then finds its flags again.
        outer = self.end_of_dataloader, self.remainder
        # Held here, because when an abandoned iteration is closed at interpreter exit the modules are already empty.
        finalizing = sys.is_finalizing
        self.end_of_dataloader, self.remainder = False, self._known_remainder()
        state._add_dataloader(self)
        try:
            while True:
                following = self._fetch(batches)
                if following is _END:
                    self._reach_end()
                    yield current
                    return
                yield current
                current = following
        finally:
            # Nothing to take off where the state was reset within the loop.
            if not finalizing() and state.initialized:
                state._remove_dataloader(self)
            self.end_of_dataloader, self.remainder = outer

    def _fetch(self, batches: Iterator[Any]) -> Any:
        probe.enter_loader()
        try:
            batch = next(batches, _END)
        finally:
            probe.leave()
        if self.device is None or batch is _END:
            return batch
        return send_to_device(batch, self.device, non_blocking=self.non_blocking)

    def _batches(self) -> Iterator[Any]:
        return itertools.islice(iter(self.base_dataloader), self.skip_batches, None)

    def _known_remainder(self) -> int:
        if self.drop_last:
            return 0
        length = self.total_dataset_length
        return -1 if length is None or not self.total_batch_size else length % self.total_batch_size

    def _reach_end(self) -> None:
        self.end_of_dataloader = True
        self.gradient_state._publish()

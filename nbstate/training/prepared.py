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

import contextlib
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils.data import DataLoader

from nbstate.state import GradientState
from nbstate.telemetry import probe
from nbstate.training import sampling
from nbstate.training.containers import send_to_device
from nbstate.training.position import Position, Progress, order_of, replay, set_own_state, undisturbed
from nbstate.training.randomness import synchronize_rng_states
from nbstate.training.rebuilding import is_stateful, without_first

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
        Samples in a full global batch; None where batches are of any size.
    filled_rows : int or None
        Rows of the last global batch with its filling, where batches are of any size and that is known.
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
        self.filled_rows: int | None = None
        # Batches to leave out: of the base loader, by reading them; and of this rank's, however that is done.
        self.skip_batches = 0
        self.skipped = 0
        self._progress = Progress()
        self._resume: Position | None = None

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
        if self._resume is not None and self._resume.epoch != epoch:
            self._resume = None
        base = self.base_dataloader
        sampling.set_epoch(base.sampler if base.batch_sampler is None else base.batch_sampler, epoch)
        sampling.set_epoch(base.dataset, epoch)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        state = self.gradient_state
        epoch = self.iteration
        if state.active_dataloader is None:
            probe.epoch(epoch)
        resume, self._resume = self._resume, None
        self.set_epoch(epoch)
        self.iteration = epoch + 1
        if self.rng_types:
            generator = getattr(getattr(self.base_dataloader, "sampler", None), "generator", None)
            synchronize_rng_states(self.rng_types, generator)
        given, keeps_inner = self.skipped, self._keeps_inner()
        with contextlib.nullcontext() if resume is None else undisturbed():
            if resume is not None:
                given += resume.batches
                keeps_inner = keeps_inner and resume.inner is not None
                replay(self.base_dataloader, resume.order)
            batches = self._resumed(resume)
            current = self._fetch(batches)
        if current is _END:
            return
        # A loader may be iterated within its own loop; the outer iteration then finds its flags again.
        outer = self.end_of_dataloader, self.remainder
        progress, outer_place = self._progress, self._progress.place
        # Held here, because when an abandoned iteration is closed at interpreter exit the modules are already empty.
        finalizing = sys.is_finalizing
        self.end_of_dataloader, self.remainder = False, self._known_remainder()
        state._add_dataloader(self)
        try:
            while True:
                # Before the next one is fetched: a run that goes on has not seen that.
                inner = self.base_dataloader.state_dict() if keeps_inner else None  # type: ignore[attr-defined]
                following = self._fetch(batches)
                given += 1
                progress.place = epoch, given, inner
                if following is _END:
                    # There is no rest of this epoch to go on with.
                    progress.place = epoch + 1, 0, None
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
            progress.place = outer_place

    def _fetch(self, batches: Iterator[Any]) -> Any:
        probe.enter_loader()
        try:
            batch = next(batches, _END)
        finally:
            probe.leave()
        if self.device is None or batch is _END:
            return batch
        return send_to_device(batch, self.device, non_blocking=self.non_blocking)

    def _resumed(self, resume: Position | None) -> Iterator[Any]:
        if resume is None:
            return self._batches(0)
        if resume.inner is not None and self._keeps_inner():
            self.base_dataloader.load_state_dict(resume.inner)  # type: ignore[attr-defined]
            return self._batches(0)
        return self._batches(resume.batches)

    def _keeps_inner(self) -> bool:
        """Whether the base loader knows its own position, from the beginning of its data."""
        return is_stateful(self.base_dataloader) and not self.skipped

    def _batches(self, skip: int) -> Iterator[Any]:
        """This rank's batches without its first ones."""
        return self._read(skip)

    def _read(self, skip: int, keep: int = 0) -> Iterator[Any]:
        """The base loader's batches without its first ones but a few, which come all the same.

        Where they have indices the others are not even loaded.
        """
        source = without_first(self.base_dataloader, skip, keep) if skip else None
        batches, skip = iter(self.base_dataloader if source is None else source), self.skip_batches + skip
        if source is not None or not skip:
            return batches
        return itertools.chain(itertools.islice(batches, keep), itertools.islice(batches, skip - keep, None))

    def set_even_batches(self, even: bool) -> bool:
        """Say whether a short last global batch is filled up from the next iteration on; returns what it was before.

        One that every rank reads whole, or that was shared out already, has nothing to fill up and stays as it is.
        """
        before = self.fills
        base = self.base_dataloader
        for one in (*sampling.inside(base), base.dataset):
            if isinstance(one, sampling.ShardedBatchSampler | sampling.ShardedIterable):
                one.even_batches = self.fills = even
        return before

    def state_dict(self) -> dict[str, Any]:
        """Where the run over this loader is: after the batch that was handed out last."""
        place = self._progress.place
        if place is None and self._resume is not None:
            return self._resume.as_dict()
        epoch, batches, inner = place or (self.iteration, 0, None)
        return Position(epoch, batches, order_of(self.base_dataloader, batches > 0), inner).as_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there: the next iteration gives the rest of that epoch, with the same order of samples.

        After it ``skip_first_batches`` skips from that epoch's beginning, not from there: a script that counts batches
        itself gets what it asks for. ``set_epoch`` with another epoch starts that one from its beginning.
        """
        position = Position.from_dict(state_dict)
        self.iteration = position.epoch
        # Between two epochs there is nothing to go on with: the next one begins, and draws, like any other.
        self._resume = position if position.batches else None
        if self._resume is None:
            set_own_state(self.base_dataloader, position.order)

    def _known_remainder(self) -> int:
        if self.drop_last:
            return 0
        length = self.total_dataset_length
        return -1 if length is None or not self.total_batch_size else length % self.total_batch_size

    def _reach_end(self) -> None:
        self.end_of_dataloader = True
        if self.total_batch_size is None:
            self._ask_for_remainder()
        self.gradient_state._publish()

    def _ask_for_remainder(self) -> None:
        """What only the sampler knows: where batches are of any size, how many rows the last turn really had."""
        for one in sampling.inside(self.base_dataloader):
            if isinstance(one, sampling.ShardedBatchSampler):
                self.remainder, self.filled_rows = one.last_turn or (0, None)

"""From a user's loader to one that gives this rank its part."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from nbstate.errors import ArgumentTypeError, ArgumentValueError
from nbstate.state import PartialState
from nbstate.training import sampling
from nbstate.training.dispatch import DispatchedLoader
from nbstate.training.layout import data_place
from nbstate.training.position import Position
from nbstate.training.prepared import PreparedLoader
from nbstate.training.randomness import agree_on_seed
from nbstate.training.rebuilding import is_stateful, rebuild_loader, without_first

__all__ = ["DispatchedLoader", "PreparedLoader", "prepare_data_loader", "skip_first_batches"]


@dataclass(frozen=True)
class _Sharing:
    """How one loader is shared out."""

    ranks: int
    index: int
    split: bool
    even: bool
    dispatched: bool
    seed: int | None
    stateful: bool = False

    @property
    def sharded(self) -> bool:
        """Whether every rank reads for itself, and so must leave out what is not its own."""
        return self.ranks > 1 and not self.dispatched


def _batches_of(loader: DataLoader[Any]) -> Any:
    """What groups a loader's indices into batches, wherever the user put it; None if there are no batches."""
    if loader.batch_sampler is None and isinstance(loader.sampler, BatchSampler):
        return loader.sampler
    return loader.batch_sampler


def _shuffle_alike(indices: Any, sharing: _Sharing) -> Any:
    """The same sampler or batch sampler, but if it shuffles, every rank sees one order, and it can be had again."""
    if hasattr(indices, "generator"):
        return sampling.AgreedSampler(indices, sharing.seed, sharing.sharded)
    if not hasattr(getattr(indices, "sampler", None), "generator"):
        return indices
    agreed = copy.copy(indices)
    agreed.sampler = sampling.AgreedSampler(indices.sampler, sharing.seed, sharing.sharded)
    return agreed


def _share_indices(loader: DataLoader[Any], sharing: _Sharing) -> DataLoader[Any]:
    if not (sharing.sharded or sharing.stateful) and sharing.seed is None and type(loader) is not DataLoader:
        # A class of the user's own cannot be made anew, and here need not be.
        return loader
    batches = _batches_of(loader)
    own = loader.sampler if batches is None else batches
    indices = _shuffle_alike(own, sharing)
    if sharing.sharded:
        indices = sampling.ShardedBatchSampler(indices, sharing.ranks, sharing.index, sharing.split, sharing.even)
    if indices is own and (is_stateful(loader) or not sharing.stateful):
        return loader
    if loader.batch_sampler is None:
        return rebuild_loader(loader, sharing.stateful, sampler=indices, batch_size=None)
    return rebuild_loader(loader, sharing.stateful, batch_sampler=indices)


def _share_stream(loader: DataLoader[Any], sharing: _Sharing) -> DataLoader[Any]:
    if not sharing.sharded:
        if is_stateful(loader) or not sharing.stateful:
            return loader
        return rebuild_loader(loader, True, batch_size=loader.batch_size, drop_last=loader.drop_last)
    size = loader.batch_size
    if size is not None and sharing.split:
        size //= sharing.ranks
    part = sampling.ShardedIterable(
        loader.dataset, size or 1, loader.drop_last, sharing.ranks, sharing.index, sharing.even
    )
    return rebuild_loader(loader, sharing.stateful, dataset=part, batch_size=size, drop_last=loader.drop_last)


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Sequence[Any] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
) -> PreparedLoader:
    """Make a loader that gives this rank its part.

    Parameters
    ----------
    dataloader : DataLoader
        The same on every rank, over the whole data. It is not changed. One with a ``DistributedSampler`` is shared
        out already and is not shared out again.
    device : torch.device, optional
        Where batches go if ``put_on_device``; the state's device by default.
    num_processes, process_index : int, optional
        How many parts there are, and which is this rank's; by default the world size and the rank, or what the
        layout says where several ranks share their samples.
    put_on_device : bool
        Move batches to the device.
    split_batches, dispatch_batches, even_batches, use_seedable_sampler, data_seed, non_blocking, \
use_stateful_dataloader
        As in ``DataLoaderConfiguration``.
    rng_types : sequence of str, optional
        Random states to synchronise at the start of each iteration, besides the shuffle, which always agrees.
    slice_fn_for_dispatch : callable, optional
        ``(batch, rows, process_index, num_processes) -> part``, how a dispatched batch is cut.

    Returns
    -------
    PreparedLoader
        The loader itself if it was prepared before.

    Raises
    ------
    ArgumentValueError
        ``split_batches`` with a batch size that cannot be divided by the number of processes.
    """
    if isinstance(dataloader, PreparedLoader):
        return dataloader
    state, place = PartialState(), data_place()
    ranks = place.parts if num_processes is None else num_processes
    index = place.index if process_index is None else process_index
    if device is None:
        device = state.device
    batches, iterable = _batches_of(dataloader), isinstance(dataloader.dataset, IterableDataset)
    batch_size = getattr(batches, "batch_size", dataloader.batch_size)
    if split_batches and (batch_size is None or batch_size % ranks):
        raise ArgumentValueError(
            f"split_batches needs a batch size that can be divided by the number of processes ({ranks}); "
            f"it is {batch_size}."
        )
    common: dict[str, Any] = {
        "dataset": dataloader.dataset,
        "batch_size": batch_size,
        "total_batch_size": batch_size if split_batches or batch_size is None else batch_size * ranks,
        "drop_last": bool(getattr(batches, "drop_last", dataloader.drop_last)),
        "fills": even_batches and ranks > 1,
        # Loaders give CPU tensors: on the CPU there is nothing to move, and nothing to pay for.
        "device": device if put_on_device and device.type != "cpu" else None,
        "non_blocking": non_blocking,
        "rng_types": rng_types,
    }
    if isinstance(getattr(batches, "sampler", dataloader.sampler), DistributedSampler):
        return PreparedLoader(dataloader, **{**common, "total_batch_size": None, "fills": False})

    seed: int | None = None
    if use_seedable_sampler:
        seed = agree_on_seed(torch.initial_seed() % 2**63 if data_seed is None else data_seed, state)
    dispatched = ranks > 1 and (iterable if dispatch_batches is None else dispatch_batches)
    sharing = _Sharing(ranks, index, split_batches, even_batches, dispatched, seed, use_stateful_dataloader)
    base = (_share_stream if iterable else _share_indices)(dataloader, sharing)
    if dispatched:
        reads = 1 if split_batches else ranks
        return DispatchedLoader(base, reads=reads, slice_function=slice_fn_for_dispatch, **common)
    return PreparedLoader(base, **common)


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """A loader over the same data without its first batches, to go on in the middle of an epoch.

    Parameters
    ----------
    dataloader : DataLoader
        Prepared or not. It is not changed.
    num_batches : int
        How many of one rank's batches to leave out. Where the data has indices they are not even loaded.

    Returns
    -------
    DataLoader
        Of the same kind; its first iteration is of the same epoch as the given loader's next.
    """
    if not isinstance(dataloader, PreparedLoader):
        if dataloader.batch_sampler is None or isinstance(dataloader.dataset, IterableDataset):
            raise ArgumentTypeError(
                "Only a prepared loader can skip batches of data without indices; prepare it first."
            )
        rest = sampling.SkipBatchSampler(dataloader.batch_sampler, num_batches)
        return rebuild_loader(dataloader, batch_sampler=rest)
    skipping = copy.copy(dataloader)
    skipping.skipped += num_batches
    batches, keep = num_batches, 0
    if isinstance(dataloader, DispatchedLoader):
        batches *= dataloader.reads
        keep = dataloader.reads if dataloader.fills else 0
    shorter = without_first(dataloader.base_dataloader, batches, keep)
    if shorter is None:
        skipping.skip_batches += batches
    else:
        skipping.base_dataloader = shorter
    if (pending := dataloader._resume) is not None:
        # The caller counts for itself. What it gets is that epoch, so the given loader goes on with the next.
        skipping._resume = Position(pending.epoch, order=pending.order)
        dataloader.set_epoch(pending.epoch + 1)
    return skipping

"""A loader like another, but for some arguments."""

from __future__ import annotations

import importlib
import warnings
from typing import Any, Final

from torch.utils.data import DataLoader, IterableDataset

from nbstate.errors import ArgumentValueError
from nbstate.training.sampling import SkipBatchSampler

__all__ = ["is_stateful", "rebuild_loader", "stateful_loader", "without_first"]

_CARRIED: Final = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
)


def is_stateful(loader: DataLoader[Any]) -> bool:
    """Whether a loader is torchdata's, which keeps the state of its dataset and its workers."""
    return hasattr(loader, "snapshot_every_n_steps")


def stateful_loader() -> type[DataLoader[Any]]:
    """The class of torchdata.

    Raises
    ------
    ArgumentValueError
        It is not installed.
    """
    try:
        return importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader  # type: ignore[no-any-return]
    except ImportError as error:
        raise ArgumentValueError(
            "DataLoaderConfiguration(use_stateful_dataloader=True) needs torchdata 0.8 or later (pip install "
            f"torchdata): {error}. Without it, loaders keep their position by counting batches."
        ) from error


def rebuild_loader(loader: DataLoader[Any], stateful: bool = False, **changes: Any) -> DataLoader[Any]:
    """A loader like another.

    Parameters
    ----------
    loader : DataLoader
        It is not changed.
    stateful : bool
        Make it torchdata's. One that is stays so anyway.
    **changes
        Arguments of ``DataLoader`` that differ.
    """
    arguments = {name: getattr(loader, name) for name in _CARRIED}
    if hasattr(loader, "in_order"):
        arguments["in_order"] = loader.in_order
    kind: type[DataLoader[Any]] = DataLoader
    if stateful or is_stateful(loader):
        kind = stateful_loader()
        # Every batch, since any batch may be the last one before a checkpoint.
        arguments["snapshot_every_n_steps"] = getattr(loader, "snapshot_every_n_steps", 1)
    with warnings.catch_warnings():
        # Torchdata 0.11 calls what torch 2.13 deprecates; nobody here can do anything about it.
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        return kind(**{"dataset": loader.dataset, **arguments, **changes})


def without_first(loader: DataLoader[Any], batches: int, keep: int = 0) -> DataLoader[Any] | None:
    """A loader whose first batches, but ``keep`` of them, are not even loaded; None where there are no indices."""
    if loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset):
        return None
    return rebuild_loader(loader, batch_sampler=SkipBatchSampler(loader.batch_sampler, batches, keep))

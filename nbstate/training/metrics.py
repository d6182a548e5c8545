"""Which of the gathered rows are of real samples."""

from __future__ import annotations

from typing import Any

import torch

from nbstate.state import GradientState
from nbstate.training.containers import leaves, map_leaves

__all__ = ["drop_filling", "holds_tensors_only"]


def holds_tensors_only(data: Any) -> bool:
    """Whether there are leaves and every one is a tensor."""
    found = [leaf for _, leaf in leaves(data)]
    return bool(found) and all(isinstance(leaf, torch.Tensor) for leaf in found)


def drop_filling(data: Any, state: GradientState, objects: bool = False) -> Any:
    """Gathered data without what only filled up the last global batch.

    Parameters
    ----------
    data : list of objects, or nested containers of tensors
        What all ranks gave for one batch, in rank order; (rows, ...).
    state : GradientState
        Says whether this was the last batch, and how many samples were real.
    objects : bool
        The data is a list with one object a row, whatever the objects are.

    Returns
    -------
    object
        On the last batch of a loader that fills up, what has as many rows as the filled-up global batch, or a multiple
        (several rows a sample), is cut to the rows of real samples. Anything else is no row of a sample, and whole.
    """
    real = state.remainder
    if real <= 0 or not state.end_of_dataloader:
        return data
    loader = state.active_dataloader
    if not getattr(loader, "fills", True):
        return data
    whole = getattr(loader, "total_batch_size", None) or getattr(loader, "filled_rows", None)
    if objects:
        return data[: _rows_to_keep(len(data), real, whole)]
    return map_leaves(lambda leaf, _: leaf[: _rows_to_keep(leaf.shape[0], real, whole)], data)


def _rows_to_keep(rows: int, real: int, whole: int | None) -> int:
    if whole is None:
        return min(rows, real)
    return rows // whole * real if rows % whole == 0 else rows

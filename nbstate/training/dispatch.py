"""A loader that one rank reads for all.

Before each global batch the main process broadcasts a message: the batch with placeholders for its tensors, or that the
data has ended, or that reading it failed. Then it broadcasts the tensors one by one. Every rank cuts out its own rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from nbstate.errors import ArgumentTypeError, MainProcessFailedError
from nbstate.state import PartialState
from nbstate.training.containers import batch_size_of, concatenate, map_leaves, pad_rows, send_to_device, slice_rows
from nbstate.training.layout import data_place
from nbstate.training.prepared import PreparedLoader

__all__ = ["DispatchedLoader"]


@dataclass(frozen=True)
class _Tensor:
    """Stands for a tensor in a message, which says how to receive it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Message:
    """What the main process tells before each global batch.

    ``skeleton`` is the batch with a ``_Tensor`` in place of each tensor, ``rows`` what a rank takes of it, ``real`` how
    many rows are not filling.
    """

    kind: Literal["batch", "end", "failed"]
    skeleton: Any = None
    rows: int = 0
    real: int = 0
    text: str = ""


class DispatchedLoader(PreparedLoader):
    """A loader that only the main process reads; it sends every rank its part of each global batch.

    Attributes
    ----------
    reads : int
        Batches of ``base_dataloader`` that make one global batch.
    slice_function : callable, optional
        ``(batch, rows, process_index, num_processes) -> part``, instead of taking ``rows`` of each tensor.
    """

    def __init__(
        self,
        base_dataloader: DataLoader[Any],
        *,
        reads: int,
        slice_function: Callable[..., Any] | None = None,
        **common: Any,
    ) -> None:
        super().__init__(base_dataloader, **common)
        self.reads = reads
        self.slice_function = slice_function
        self._last_real = self._last_rows = -1

    def __len__(self) -> int:
        batches = len(self.base_dataloader)
        return batches // self.reads if self.drop_last else -(-batches // self.reads)

    def set_even_batches(self, even: bool) -> bool:
        """Say whether a short last global batch is filled up; returns what it was before."""
        before, self.fills = self.fills, even
        return before

    def _keeps_inner(self) -> bool:
        return super()._keeps_inner() and PartialState().is_main_process

    def _batches(self, skip: int) -> Iterator[Any]:
        state, place = PartialState(), data_place()
        index, ranks = place.index, place.parts
        source = self._global_batches(ranks, skip) if state.is_main_process else None
        while True:
            batch, message = self._next_message(source) if source is not None else (None, None)
            message = self._tell(message)
            if message.kind == "failed":
                raise MainProcessFailedError(f"Rank 0 reads the data for all ranks, and failed: {message.text}")
            if message.kind == "end":
                return
            batch = self._exchange(message.skeleton, batch, state.device)
            self._last_real = message.real
            self._last_rows = message.rows * ranks
            mine = slice(index * message.rows, (index + 1) * message.rows)
            if not self.fills and mine.start >= message.real:
                continue
            yield self.slice_function(batch, mine, index, ranks) if self.slice_function else slice_rows(batch, mine)

    def _next_message(self, source: Iterator[tuple[Any, int, int]]) -> tuple[Any, _Message]:
        try:
            found = next(source, None)
        except BaseException as error:
            # The others wait for a message and would wait for ever.
            self._tell(_Message("failed", text=f"{type(error).__name__}: {error}"))
            raise
        if found is None:
            return None, _Message("end")
        batch, rows, real = found
        skeleton = map_leaves(
            lambda leaf, _: _Tensor(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf, batch
        )
        return batch, _Message("batch", skeleton, rows, real)

    @staticmethod
    def _tell(message: _Message | None) -> _Message:
        box = [message]
        dist.broadcast_object_list(box, src=0)
        told = box[0]
        assert told is not None
        return told

    @staticmethod
    def _exchange(skeleton: Any, batch: Any, device: torch.device) -> Any:
        """Broadcast the tensors of a batch; ranks that have none (``batch`` is None) make room for them first."""
        if batch is None:
            batch = map_leaves(
                lambda leaf, _: (
                    torch.empty(leaf.shape, dtype=leaf.dtype, device=device) if isinstance(leaf, _Tensor) else leaf
                ),
                skeleton,
            )
        else:
            batch = send_to_device(batch, device)

        def one(leaf: Any, _: str) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            leaf = leaf.contiguous()
            dist.broadcast(leaf, src=0)
            return leaf

        return map_leaves(one, batch)

    def _global_batches(self, ranks: int, skip: int) -> Iterator[tuple[Any, int, int]]:
        """Global batches with the rows of one rank's part and the number of real rows."""
        skip *= self.reads
        # What fills up the end comes from the beginning of the epoch, also if that is skipped.
        keep = self.reads if self.fills and (skip or self.skipped) else 0
        source = self._read(skip, keep)
        whole = self.total_batch_size
        kept = list(itertools.islice(source, keep))
        first: Any = _joined(kept) if kept else None
        while parts := list(itertools.islice(source, self.reads)):
            batch = _joined(parts)
            real = batch_size_of(batch)
            if real is None:
                raise ArgumentTypeError("A dispatched batch holds no tensor, so it cannot be split among ranks.")
            full = -(-real // ranks) * ranks if whole is None else whole
            if real < full and self.drop_last:
                return
            if first is None:
                first = batch
            if real < full and self.fills:
                batch = pad_rows(batch, first, full)
            yield batch, full // ranks, real

    def _known_remainder(self) -> int:
        # Rank 0's dataset is the only one that is read; the others' may not even know its length.
        return -1

    def _reach_end(self) -> None:
        whole = self.total_batch_size or self._last_rows
        self.remainder = self._last_real if self._last_real < whole else 0
        self.filled_rows = self._last_rows
        self.end_of_dataloader = True
        self.gradient_state._publish()


def _joined(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else concatenate(parts)

"""Which samples each rank gets: pure index work, plus the agreement of all ranks on one shuffle.

Two ways of sharing a stream of batches among N ranks::

    take turns      batch 0 -> rank 0, batch 1 -> rank 1, ...    the loader's batch size is one rank's
    split           every batch is cut into N equal parts        the loader's batch size is the world's

Either way N parts make one global batch, in rank order the same samples that one process would see in that order. The
last global batch may be short. It is then filled up with the first samples of the epoch (``even_batches``), always at
its end, so that cutting what was gathered to the number of real samples drops just the filling.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, Sampler

from nbstate.errors import ArgumentValueError
from nbstate.state import PartialState
from nbstate.training.randomness import agree_on_generator, agree_on_seed

__all__ = ["AgreedSampler", "ShardedBatchSampler", "ShardedIterable", "SkipBatchSampler", "inside", "length_of"]


def length_of(sized: object) -> int | None:
    """The length of something that may have none (an ``IterableDataset``, a sampler without end)."""
    try:
        return len(sized)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


class AgreedSampler(Sampler[int]):
    """A random sampler whose order is the same on every rank and new in every epoch.

    Parameters
    ----------
    sampler : Sampler
        A random sampler of torch: one with a ``generator``.
    seed : int, optional
        Order by ``seed + epoch`` alone. Without it the main process's own randomness decides, in the very draws that
        the sampler would have made in a single process, so one process and many see the same order.
    agree : bool
        False: this rank alone draws, since no other reads the data.

    Attributes
    ----------
    drawn : int or torch.Tensor or None
        What the order of the last iteration follows from besides the epoch: the number that was drawn, or the state
        of the sampler's own generator.
    replay : int or torch.Tensor or None
        Such a value, for the next iteration alone to follow instead of a new one.
    """

    def __init__(self, sampler: Sampler[int], seed: int | None = None, agree: bool = True) -> None:
        self.sampler = sampler
        self.seed = seed
        self.agree = agree
        self.epoch = 0
        self.drawn: int | torch.Tensor | None = None
        self.replay: int | torch.Tensor | None = None

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration belongs to."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        sampler: Any = copy.copy(self.sampler)
        sampler.generator = self._generator()
        return iter(sampler)

    def own_state(self) -> torch.Tensor | None:
        """State of the sampler's own generator, where it has one that matters."""
        own: torch.Generator | None = getattr(self.sampler, "generator", None)
        return None if own is None or self.seed is not None else own.get_state()

    def _generator(self) -> torch.Generator:
        own: torch.Generator | None = getattr(self.sampler, "generator", None)
        replay, self.replay = self.replay, None
        if self.seed is not None:
            return torch.Generator().manual_seed(self.seed + self.epoch)
        if own is not None:
            if isinstance(replay, torch.Tensor):
                own.set_state(replay)
            elif self.agree:
                agree_on_generator(own, PartialState())
            self.drawn = own.get_state()
            return own
        if isinstance(replay, int):
            drawn = replay
        else:
            # Every rank draws, and all but the main one's draw is thrown away: streams that were equal stay equal.
            drawn = int(torch.empty((), dtype=torch.int64).random_().item())
            drawn = agree_on_seed(drawn, PartialState()) if self.agree else drawn
        self.drawn = drawn
        return torch.Generator().manual_seed(drawn)

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]


class ShardedBatchSampler(BatchSampler):
    """One rank's part of a batch sampler.

    Parameters
    ----------
    batch_sampler : iterable
        Yields batches of indices, the same on every rank. Without a ``batch_size`` its batches may be of any size,
        or not batches at all; then nothing is cut or filled up, only whole entries are handed out.
    num_processes, process_index : int
        World size, and the rank whose part this is.
    split_batches : bool
        Split every batch instead of taking turns.
    even_batches : bool
        Fill up the last global batch.

    Attributes
    ----------
    last_turn : tuple of int or None
        Of batches of any size, where the last turn was filled up with whole ones: its real rows, and all of its rows.

    Examples
    --------
    >>> from torch.utils.data import BatchSampler
    >>> from nbstate.training.sampling import ShardedBatchSampler
    >>> batches = BatchSampler(range(5), batch_size=2, drop_last=False)
    >>> [list(ShardedBatchSampler(batches, 2, rank)) for rank in range(2)]
    [[[0, 1], [4, 0]], [[2, 3], [1, 2]]]
    """

    def __init__(
        self,
        batch_sampler: Any,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.batch_sampler = batch_sampler
        self.batch_size: int | None = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last: bool = getattr(batch_sampler, "drop_last", False)
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.last_turn: tuple[int, int] | None = None
        if split_batches and (self.batch_size is None or self.batch_size % num_processes):
            raise ArgumentValueError(
                f"split_batches needs a batch size that can be divided by the number of processes ({num_processes}); "
                f"it is {self.batch_size}."
            )

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """The sampler of single indices, where there is one."""
        return getattr(self.batch_sampler, "sampler", None)

    def set_epoch(self, epoch: int) -> None:
        """Hand the epoch on to what shuffles."""
        set_epoch(self.batch_sampler, epoch)

    def __len__(self) -> int:
        batches = len(self.batch_sampler)
        ranks, index = self.num_processes, self.process_index
        if self.split_batches:
            return batches
        if self.drop_last or batches % ranks == 0:
            return batches // ranks
        return batches // ranks + (1 if self.even_batches or index < batches % ranks else 0)

    def __iter__(self) -> Iterator[Any]:
        return self._split() if self.split_batches else self._take_turns()

    def _split(self) -> Iterator[list[int]]:
        assert self.batch_size is not None
        part = self.batch_size // self.num_processes
        mine = slice(part * self.process_index, part * (self.process_index + 1))
        first: list[int] = []
        for batch in self.batch_sampler:
            first = first or batch
            if len(batch) == self.batch_size:
                yield batch[mine]
            elif self.even_batches:
                yield fill_up(batch, first, self.batch_size)[mine]
            elif batch[mine]:
                yield batch[mine]

    def _take_turns(self) -> Iterator[Any]:
        self.last_turn = None
        first: list[Any] = []
        turn: list[Any] = []
        for batch in self.batch_sampler:
            turn.append(batch)
            if len(turn) < self.num_processes:
                continue
            if self.batch_size is not None and len(batch) < self.batch_size:
                break
            first = first or turn
            yield turn[self.process_index]
            turn = []
        if turn and not self.drop_last:
            yield from self._last_turn(turn, first or turn)

    def _last_turn(self, turn: list[Any], first: list[Any]) -> Iterator[Any]:
        index = self.process_index
        if not self.even_batches:
            yield from turn[index : index + 1]
        elif self.batch_size is None:
            filled = fill_up(turn, first, self.num_processes)
            self.last_turn = sum(map(_rows, turn)), sum(map(_rows, filled))
            yield filled[index]
        else:
            size = self.batch_size
            real = list(itertools.chain.from_iterable(turn))
            filled = fill_up(real, list(itertools.chain.from_iterable(first)), size * self.num_processes)
            yield filled[size * index : size * (index + 1)]


def fill_up(items: list[Any], filler: Iterable[Any], length: int) -> list[Any]:
    """A list of a given length: the items, then the filler's from its first, and round again as needed."""
    return [*items, *itertools.islice(itertools.cycle(filler), length - len(items))]


def _rows(entry: Any) -> int:
    """Samples in an entry of a batch sampler, which may be a single index."""
    size = length_of(entry)
    return 1 if size is None else size


def inside(target: Any) -> Iterator[Any]:
    """A loader or sampler, then the samplers inside it, outermost first."""
    while target is not None:
        yield target
        inner = getattr(target, "batch_sampler", None)
        target = inner if inner is not None else getattr(target, "sampler", None)


def set_epoch(target: Any, epoch: int) -> None:
    """Hand an epoch to a sampler or dataset, or to the first one inside it that wants to know."""
    for one in inside(target):
        if callable(getattr(one, "set_epoch", None)):
            one.set_epoch(epoch)
            return


class SkipBatchSampler(BatchSampler):
    """A batch sampler without its first batches, whose samples are not even loaded.

    Parameters
    ----------
    batch_sampler : iterable
        Yields batches of indices.
    skip_batches : int
        How many to leave out.
    keep : int
        How many of these to yield all the same, at the beginning; ``len`` does not count them.
    """

    def __init__(self, batch_sampler: Any, skip_batches: int = 0, keep: int = 0) -> None:
        if isinstance(batch_sampler, SkipBatchSampler):
            skip_batches += batch_sampler.skip_batches
            batch_sampler = batch_sampler.batch_sampler
        self.batch_sampler: Any = batch_sampler
        self.skip_batches: int = skip_batches
        self.keep = min(keep, skip_batches)
        self.batch_size: int | None = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last: bool = getattr(batch_sampler, "drop_last", False)

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """The sampler of single indices, where there is one."""
        return getattr(self.batch_sampler, "sampler", None)

    def set_epoch(self, epoch: int) -> None:
        """Hand the epoch on to what shuffles."""
        set_epoch(self.batch_sampler, epoch)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.batch_sampler)
        yield from itertools.islice(batches, self.keep)
        yield from itertools.islice(batches, self.skip_batches - self.keep, None)

    def __len__(self) -> int:
        return max(0, len(self.batch_sampler) - self.skip_batches)


class ShardedIterable(IterableDataset[Any]):
    """One rank's part of a dataset without indices, which every rank reads whole.

    Parameters
    ----------
    dataset : iterable
        Yields the same samples on every rank.
    batch_size : int
        One rank's part of a global batch, samples.
    drop_last : bool
        Leave out a short last global batch.
    num_processes, process_index : int
        World size, and the rank whose part this is.
    even_batches : bool
        Fill up a short last global batch with the first samples.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        even_batches: bool = True,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.even_batches = even_batches

    def set_epoch(self, epoch: int) -> None:
        """Hand the epoch on to the dataset."""
        set_epoch(self.dataset, epoch)

    def __iter__(self) -> Iterator[Any]:
        whole = self.batch_size * self.num_processes
        mine = slice(self.batch_size * self.process_index, self.batch_size * (self.process_index + 1))
        source = iter(self.dataset)
        first: list[Any] = []
        while True:
            samples = list(itertools.islice(source, whole))
            first = first or samples
            if len(samples) == whole:
                yield from samples[mine]
                continue
            if samples and not self.drop_last:
                yield from (fill_up(samples, first, whole) if self.even_batches else samples)[mine]
            return

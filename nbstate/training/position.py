"""Where in an epoch a loader is, so that a run can go on from there.

Counting batches is enough where the order of the samples can be had again. It follows from the epoch, and in a shuffle
without a seed from what was drawn when the iteration began; so that is kept as well. A loader of torchdata also knows
the state of its dataset and workers.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from nbstate.errors import ArgumentTypeError
from nbstate.training.sampling import AgreedSampler, inside

__all__ = ["Position", "Progress", "order_of", "replay", "set_own_state", "undisturbed"]


@dataclass(frozen=True)
class Position:
    """A place in a run over a loader.

    Attributes
    ----------
    epoch : int
        From 0.
    batches : int
        How many of this rank's batches of that epoch were handed out.
    order : int or torch.Tensor or None
        What that epoch's shuffle follows from besides the epoch (``AgreedSampler.drawn``).
    inner : object
        State of torchdata's loader at that place; None if there is none.
    """

    epoch: int
    batches: int = 0
    order: int | torch.Tensor | None = None
    inner: Any = None

    def as_dict(self) -> dict[str, Any]:
        """A plain dict, for a checkpoint."""
        return dict(vars(self))

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Position:
        """What ``as_dict`` gave.

        Raises
        ------
        ArgumentTypeError
            It is something else.
        """
        try:
            return cls(**state)
        except TypeError as error:
            raise ArgumentTypeError(f"This is not the state of a prepared loader: {error}") from error


class Progress:
    """How far the iteration that runs has come. A loader and those made from it by skipping have one in common.

    Attributes
    ----------
    place : tuple or None
        Epoch, batches handed out, and torchdata's state; None at rest. A tuple: it is made anew for every batch.
    """

    def __init__(self) -> None:
        self.place: tuple[int, int, Any] | None = None


def order_of(loader: DataLoader[Any], begun: bool) -> int | torch.Tensor | None:
    """What the order of an iteration follows from besides the epoch; None where nothing is drawn.

    Parameters
    ----------
    loader : DataLoader
        The base loader.
    begun : bool
        Whether it is the iteration that runs; otherwise the next one, of which only the state of the sampler's own
        generator is known.
    """
    for one in inside(loader):
        if isinstance(one, AgreedSampler):
            return one.drawn if begun else one.own_state()
    return None


def replay(loader: DataLoader[Any], order: int | torch.Tensor | None) -> None:
    """Let a loader's next iteration have an order that was there before."""
    for one in inside(loader):
        if isinstance(one, AgreedSampler):
            one.replay = order


def set_own_state(loader: DataLoader[Any], state: int | torch.Tensor | None) -> None:
    """Set the generator that a loader's sampler has of its own, before an iteration over it begins."""
    for one in inside(loader):
        own = getattr(one.sampler, "generator", None) if isinstance(one, AgreedSampler) else None
        if own is not None and isinstance(state, torch.Tensor):
            own.set_state(state)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """A context after which the random states of Python, NumPy and torch's CPU are as they were before."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])

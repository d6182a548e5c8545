"""Training on data that runs out on some ranks before the others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch.distributed.algorithms.join import Join, Joinable

from nbstate.errors import ArgumentTypeError
from nbstate.training.fully_shard import is_sharded
from nbstate.training.prepared import PreparedLoader

__all__ = ["even_batches_set", "join_uneven_inputs"]


@contextlib.contextmanager
def even_batches_set(loaders: Sequence[PreparedLoader], even: bool | None) -> Iterator[None]:
    """A context in which prepared loaders fill up their last global batch, or do not; None changes nothing."""
    before = [] if even is None else [(loader, loader.set_even_batches(even)) for loader in loaders]
    try:
        yield
    finally:
        for loader, was in before:
            loader.set_even_batches(was)


def _joinable(item: Any) -> Any:
    """What of a prepared object can wait for others: a model in DDP, an optimizer that shares its state."""
    for inner in (item, getattr(item, "_orig_mod", None), getattr(item, "optimizer", None)):
        if isinstance(inner, Joinable):
            return inner
    if is_sharded(getattr(item, "_orig_mod", item)):
        raise ArgumentTypeError(
            "join_uneven_inputs: a sharded model needs every rank for every batch; let loaders fill up instead "
            "(even_batches=True), or drop the last batch."
        )
    raise ArgumentTypeError(
        f"join_uneven_inputs takes models in DDP and optimizers that can be joined, not a {type(item).__name__}."
    )


@contextlib.contextmanager
def join_uneven_inputs(
    joinables: Sequence[Any], loaders: Sequence[PreparedLoader], even_batches: bool, override: bool | None
) -> Iterator[None]:
    """A context in which ranks that are out of data answer the collectives of those that are not.

    Parameters
    ----------
    joinables : sequence
        Prepared models and optimizers.
    loaders : sequence of PreparedLoader
        Whose ``even_batches`` is overridden meanwhile.
    even_batches : bool
        Whether loaders fill up, without the override; then there is nothing to wait for.
    override : bool, optional
        Fill up, or not, in this context.
    """
    these = [_joinable(item) for item in joinables]
    filled = even_batches if override is None else override
    waiting = Join(these, enable=not filled) if these else contextlib.nullcontext()
    with even_batches_set(loaders, override), waiting:
        yield

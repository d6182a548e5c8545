"""The gradient state of accelerate, seen by the probe, so that its users and transformers' fill the same columns.

A rank that trains with accelerate's own ``Accelerator``, or with a ``Trainer``, which rests on it, has a singleton of
accelerate's that says what nbstate's own says: whether this batch's gradients are synchronised, whether it is the last
batch, how many of its samples are left over. Nothing here imports accelerate or waits for its import. ``look`` stands
where every training loop comes by (DDP's forward, an optimizer's step, the making of a process group) and asks whether
the module is there; until then that is all it costs. Then it wraps three methods of that class, through which all that
is to be known passes:

- the one that sets the flag is called once for each batch that is accumulated: that is a step, and counts as one;
- those that begin and end the iteration of a loader.

Plain DDP with ``no_sync`` and Lightning Fabric have no such state. Their steps and flags are DDP's own, which
``collectives`` sees. Should accelerate come to look otherwise than expected, its columns stay empty and its users'
training goes on.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Final

from nbstate.telemetry import probe

__all__ = ["look", "unwatch"]

_MODULE: Final = "accelerate.state"
_COUNTS: Final = "_set_sync_gradients"
_BEGINS: Final = "_add_dataloader"
_ENDS: Final = "_remove_dataloader"

_watch: _Watch | None = None
_in_vain = False


def look() -> None:
    """Write accelerate's gradient state on the board, if this rank uses accelerate and something has changed."""
    if _watch is not None:
        _watch.tell()
    elif _MODULE in sys.modules and not _in_vain and probe.attached():
        _begin(sys.modules[_MODULE])


def unwatch() -> None:
    """Put accelerate's methods back. Safe to call twice."""
    global _watch, _in_vain
    if _watch is not None:
        _watch.undo()
    _watch, _in_vain = None, False


def _begin(module: Any) -> None:
    global _watch, _in_vain
    kind = getattr(module, "GradientState", None)
    if kind is None and getattr(getattr(module, "__spec__", None), "_initializing", False):
        return  # it is being imported right now
    if not all(hasattr(kind, name) for name in ("_shared_state", _COUNTS, _BEGINS, _ENDS)):
        _in_vain = True
        return
    _watch = _Watch(kind)
    _watch.tell()


class _Watch:
    """What was replaced in accelerate's class, and what was last told."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._told: tuple[Any, ...] = ()
        self._bare: dict[str, Callable[..., Any]] = {}
        for name, after in ((_COUNTS, self._counted), (_BEGINS, self._begun), (_ENDS, self._ended)):
            self._bare[name] = bare = getattr(kind, name)
            setattr(kind, name, _followed_by(bare, after))

    def undo(self) -> None:
        """Put back what is still ours."""
        for name, bare in self._bare.items():
            if getattr(getattr(self._kind, name), "__wrapped__", None) is bare:
                setattr(self._kind, name, bare)

    def tell(self) -> None:
        """Write the state on the board, if it is another one than before."""
        if not self._kind._shared_state:  # not built yet, or reset
            return
        try:
            told = _read(self._kind())
        except Exception:  # accelerate's own affairs, which must not end a training step
            return
        if told == self._told:
            return
        self._told = told
        sync, end, inside, with_loader, adjust, steps, remainder = told
        probe.gradient(
            sync_gradients=sync,
            end_of_dataloader=end,
            in_dataloader=inside,
            sync_with_dataloader=with_loader,
            adjust_scheduler=adjust,
            num_steps=steps,
            remainder=remainder,
        )

    def _counted(self, sync: Any = True, *_: Any, **__: Any) -> None:
        self.tell()
        probe.step(bool(sync))

    def _begun(self, loader: Any = None, *_: Any, **__: Any) -> None:
        self.tell()
        iteration = getattr(loader, "iteration", None)
        if isinstance(iteration, int):
            probe.epoch(iteration)

    def _ended(self, *_: Any, **__: Any) -> None:
        self.tell()


def _read(state: Any) -> tuple[bool, bool, bool, bool, bool, int, int]:
    return (
        bool(state.sync_gradients),
        bool(state.end_of_dataloader),
        bool(state.in_dataloader),
        bool(state.sync_with_dataloader),
        bool(state.adjust_scheduler),
        int(state.num_steps),
        int(state.remainder),
    )


def _followed_by(bare: Callable[..., Any], after: Callable[..., None]) -> Callable[..., Any]:
    """A method that does what it did, and then says so with the arguments that it got."""

    @functools.wraps(bare)
    def method(state: Any, *args: Any, **kwargs: Any) -> Any:
        result = bare(state, *args, **kwargs)
        after(*args, **kwargs)
        return result

    return method

"""GradientState: whether this step's gradients are synchronised, and where in its loader the run is.

The loaders that are being iterated form a stack of weak references, the innermost on top. A loader is put on it when
iteration starts and taken off when it ends, however it ends; one that its owner dropped meanwhile falls off by itself,
and the one below is active again. Weak, because this singleton outlives every loader.
"""

from __future__ import annotations

import importlib
import weakref
from typing import Any, ClassVar

from nbstate.state.accelerator import AcceleratorState
from nbstate.state.html import render_card
from nbstate.state.kinds import DistributedType, GradientAccumulationPlugin
from nbstate.state.partial import PartialState
from nbstate.state.singleton import SharedState, building
from nbstate.telemetry import probe

__all__ = ["GradientState"]


class GradientState(SharedState):
    """State of gradient accumulation. A singleton: any number of instances, one state.

    Parameters
    ----------
    gradient_accumulation_plugin : GradientAccumulationPlugin, optional
        How gradients are accumulated. None leaves what an earlier instance was given.

    Examples
    --------
    >>> GradientState.reset()
    >>> state = GradientState(GradientAccumulationPlugin(num_steps=2))
    >>> state.num_steps, state.sync_gradients, state.remainder
    (2, True, -1)
    >>> GradientState.reset()
    """

    _shared_state: ClassVar[dict[str, Any]] = {}
    _names = frozenset(
        {
            "sync_gradients",
            "num_steps",
            "adjust_scheduler",
            "sync_with_dataloader",
            "sync_each_batch",
            "plugin_kwargs",
            "active_dataloader",
            "dataloader_references",
            "in_dataloader",
            "end_of_dataloader",
            "remainder",
            "is_xla_gradients_synced",
            "_sync_gradients",
            "_plugin",
            "_loaders",
            "_xla_synced",
        }
    )

    _sync_gradients: bool
    _plugin: GradientAccumulationPlugin | None
    _loaders: list[weakref.ref[Any]]
    _xla_synced: bool

    def __init__(self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> None:
        with building():
            if not self._shared_state:
                self._shared_state.update(_sync_gradients=True, _plugin=None, _loaders=[], _xla_synced=False)
                type(self)._inherited = False
            if gradient_accumulation_plugin is not None:
                self._plugin = gradient_accumulation_plugin
        self._publish()

    @property
    def sync_gradients(self) -> bool:
        """Whether gradients are synchronised, and the optimizer steps, in this step."""
        return self._sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._set_sync_gradients(value)

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """What the plugin was given beyond its defaults."""
        return {} if self._plugin is None else self._plugin.to_kwargs()

    @property
    def num_steps(self) -> int:
        """Batches per optimizer step."""
        plugin = self._plugin
        return 1 if plugin is None or plugin.num_steps is None else plugin.num_steps

    @property
    def adjust_scheduler(self) -> bool:
        """Whether the scheduler is stepped also for accumulated batches. False without a plugin."""
        plugin = self._plugin
        return False if plugin is None else plugin.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the last batch of a loader always synchronises."""
        plugin = self._plugin
        return True if plugin is None else plugin.sync_with_dataloader

    @property
    def sync_each_batch(self) -> bool:
        """Whether gradients are exchanged at each batch, whatever ``sync_gradients`` says."""
        plugin = self._plugin
        return False if plugin is None else plugin.sync_each_batch

    @property
    def active_dataloader(self) -> Any:
        """The innermost loader that is being iterated, or None."""
        for reference in reversed(self._loaders):
            loader = reference()
            if loader is not None:
                return loader
        return None

    @property
    def dataloader_references(self) -> list[Any]:
        """The loaders that are being iterated, outermost first, after a None that stands for no loader."""
        alive = (reference() for reference in self._loaders)
        return [None, *(loader for loader in alive if loader is not None)]

    @property
    def in_dataloader(self) -> bool:
        """Whether a loader is being iterated."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the active loader gave its last batch. False outside a loader."""
        loaders = self._loaders
        if not loaders:
            return False
        # Read at every step, so without a search where the newest loader is there.
        loader = loaders[-1]()
        return bool(getattr(self.active_dataloader if loader is None else loader, "end_of_dataloader", False))

    @property
    def remainder(self) -> int:
        """Samples in the last, uneven global batch of the active loader; 0: nothing to drop; -1 outside a loader."""
        return int(getattr(self.active_dataloader, "remainder", -1))

    @property
    def is_xla_gradients_synced(self) -> bool:
        """Whether XLA's gradients were reduced in this step. Always True under FSDP, which reduces as it goes."""
        if AcceleratorState.is_initialized() and AcceleratorState().distributed_type is DistributedType.FSDP:
            return True
        return self._xla_synced

    @is_xla_gradients_synced.setter
    def is_xla_gradients_synced(self, value: bool) -> None:
        self._shared_state["_xla_synced"] = bool(value)

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self._sync_gradients = bool(sync_gradients)
        if sync_gradients and PartialState._shared_state.get("distributed_type") is DistributedType.XLA:
            # An accumulated step is one graph: cut it where the gradients are applied.
            importlib.import_module("torch_xla").sync()
        self._publish()

    def _add_dataloader(self, dataloader: Any) -> None:
        """Iteration over a loader starts: it is the active one now."""
        self._loaders.append(weakref.ref(dataloader, _take_off))
        self._publish()

    def _remove_dataloader(self, dataloader: Any) -> None:
        """Iteration over a loader has ended, at its end or before. Does nothing if it is not iterated."""
        found = next((reference for reference in reversed(self._loaders) if reference() is dataloader), None)
        _take_off(found)
        self._publish()

    def _publish(self) -> None:
        """Write the attributes on the board. Loaders call it when their own flags change."""
        if probe.attached():
            probe.gradient(
                sync_gradients=self.sync_gradients,
                end_of_dataloader=self.end_of_dataloader,
                in_dataloader=self.in_dataloader,
                sync_with_dataloader=self.sync_with_dataloader,
                adjust_scheduler=self.adjust_scheduler,
                num_steps=self.num_steps,
                remainder=self.remainder,
            )

    @classmethod
    def reset(cls) -> None:
        """Forget the plugin, the flags and the loaders."""
        with building():
            cls._shared_state.clear()
            cls._inherited = False

    _reset_state = reset

    def __repr__(self) -> str:
        if not self._shared_state:
            return "GradientState(not built)"
        return (
            f"GradientState(sync_gradients={self.sync_gradients}, num_steps={self.num_steps}, "
            f"end_of_dataloader={self.end_of_dataloader}, remainder={self.remainder}, "
            f"loaders={len(self.dataloader_references) - 1})"
        )

    def _repr_html_(self) -> str:
        if not self._shared_state:
            return render_card("GradientState", "not built; GradientState() builds it", {})
        return render_card(
            "GradientState",
            "gradients are synchronised in this step" if self.sync_gradients else "gradients are accumulated",
            {
                "sync_gradients": self.sync_gradients,
                "num_steps": self.num_steps,
                "adjust_scheduler": self.adjust_scheduler,
                "sync_with_dataloader": self.sync_with_dataloader,
                "end_of_dataloader": self.end_of_dataloader,
                "remainder": self.remainder,
                "active_dataloader": type(self.active_dataloader).__name__ if self.in_dataloader else None,
                "is_xla_gradients_synced": self.is_xla_gradients_synced,
            },
        )


def _take_off(gone: weakref.ref[Any] | None) -> None:
    """Take one reference off the stack; also the callback for a loader that was collected while it was on it.

    By identity, because references compare as what they refer to. Nothing is written on the board from here: garbage
    is collected at any moment and on any thread, also in the middle of another write.
    """
    loaders = GradientState._shared_state.get("_loaders")
    if loaders is not None:
        loaders[:] = [reference for reference in loaders if reference is not gone]

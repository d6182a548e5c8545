"""Checkpoints of everything that was prepared, and models for use elsewhere."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from nbstate._version import __version__
from nbstate.errors import ArgumentTypeError, ArgumentValueError, CheckpointError
from nbstate.training import checkpoint, operations, storage, weights
from nbstate.training.checkpoint import Subjects
from nbstate.training.exchange import Exchange
from nbstate.training.project import ProjectConfiguration

__all__ = ["Saving"]

Result = TypeVar("Result")


def main_says(what: str, task: Callable[[], Result]) -> Result:
    """Run a task on every rank as ``together`` does, and give every rank what the main process's returned."""
    mine = together(what, task)
    return operations.broadcast_object_list([mine])[0]  # type: ignore[no-any-return]


def together(what: str, task: Callable[[], Result]) -> Result:
    """Run a task on every rank; a failure on one is a failure on all, so that none waits for it or goes on without.

    Returns
    -------
    object
        What the task returned on this rank.

    Raises
    ------
    Exception
        The task's own, on the rank where it failed.
    CheckpointError
        On the others; names that rank and its error.
    """
    error: Exception | None = None
    try:
        result = task()
    except Exception as caught:
        error = caught
    failures = operations.gather_object("" if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, text in enumerate(failures):
        if text:
            raise CheckpointError(f"{what} failed on rank {rank}: {text}")
    return result


class Saving(Exchange):
    """The part of ``Accelerator`` that writes and reads files. Every method is to be called on every rank."""

    project_configuration: ProjectConfiguration
    scaler: Any
    step: int
    _models: list[torch.nn.Module]
    _optimizers: list[Any]
    _schedulers: list[Any]
    _dataloaders: list[Any]

    def _begin_saving(self, configuration: ProjectConfiguration) -> None:
        self.project_configuration = configuration
        self._registered: list[Any] = []
        self._save_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._load_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()

    @property
    def project_dir(self) -> Any:
        """The project's directory, or None."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> Any:
        """Where trackers write, or None."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """Number of the next checkpoint under ``automatic_checkpoint_naming``."""
        return self.project_configuration.iteration

    @property
    def _writes(self) -> bool:
        """Whether this rank writes what is the same on every rank."""
        return self.is_local_main_process if self.project_configuration.save_on_each_node else self.is_main_process

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load further objects along, by their ``state_dict`` and ``load_state_dict``.

        Parameters
        ----------
        *objects
            The same on every rank, in the same order when loading as when saving.

        Raises
        ------
        ArgumentTypeError
            One of them lacks one of the two methods; none is registered then.
        """
        lacking = [
            type(thing).__name__
            for thing in objects
            if not all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict"))
        ]
        if lacking:
            raise ArgumentTypeError(
                f"register_for_checkpointing needs state_dict and load_state_dict; {', '.join(lacking)} lacks them."
            )
        self._registered.extend(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Have ``hook(models, weights, output_dir)`` called before ``save_state`` writes.

        The hook may write files of its own into ``output_dir``, and take a model's weights off the list to keep them
        from being written.

        Returns
        -------
        RemovableHandle
            Its ``remove()`` takes the hook away again.
        """
        handle = RemovableHandle(self._save_hooks)
        self._save_hooks[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Have ``hook(models, input_dir)`` called before ``load_state`` reads.

        The hook may take a model off the list to keep ``load_state`` from loading it.

        Returns
        -------
        RemovableHandle
            Its ``remove()`` takes the hook away again.
        """
        handle = RemovableHandle(self._load_hooks)
        self._load_hooks[handle.id] = hook
        return handle

    def _subjects(self) -> Subjects:
        return Subjects(
            list(self._models),
            self._optimizers,
            self._schedulers,
            self._dataloaders,
            self._registered,
            self.scaler,
        )

    def save_state(self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True) -> str:
        """Save everything that was prepared, so that ``load_state`` can go on from here.

        Models, optimizers, schedulers, the scaler, registered objects, every rank's random states, and where each
        loader is. The checkpoint appears under its name when all of it is on the disk; a crash at any moment leaves
        the one before.

        Parameters
        ----------
        output_dir : path, optional
            The checkpoint's directory; one that exists is replaced, but for files in it that are no checkpoint's. Left
            out under ``ProjectConfiguration(automatic_checkpoint_naming=True)``.
        safe_serialization : bool
            Weights as safetensors; otherwise by ``torch.save``.

        Returns
        -------
        str
            The checkpoint's directory.

        Raises
        ------
        CheckpointError
            It could not be written on another rank; on the rank itself that one's own error. What was there before is
            untouched.
        """
        config = self.project_configuration
        name, config.iteration = main_says("save_state", lambda: self._target(output_dir))
        target = Path(name)
        new = storage.beside(target, "new")
        shared = checkpoint.collect_shared(self._subjects())
        for hook in self._save_hooks.values():
            hook(self._models, shared.weights, str(new))

        def write() -> None:
            if self._writes:
                shared.write(new, weights.safe_or_plain(safe_serialization))
            checkpoint.write_rank(new, self.process_index, self.num_processes, self._subjects(), self.device, self.step)

        together("save_state", write)
        together("save_state", lambda: self._commit(target) if self._writes else None)
        config.iteration += 1
        return name

    def _target(self, output_dir: str | os.PathLike[str] | None) -> tuple[str, int]:
        """Where the next checkpoint goes, and its number; the rank that writes makes room for it."""
        config = self.project_configuration
        number = config.iteration
        if config.automatic_checkpoint_naming:
            if output_dir is not None:
                raise ArgumentValueError("Under automatic_checkpoint_naming, call save_state without output_dir.")
            if config.project_dir is None:
                raise ArgumentValueError("automatic_checkpoint_naming needs a project_dir.")
            if self._writes:
                storage.heal_folder(config.checkpoints)
                taken = storage.numbered(config.checkpoints)
                number = max(number, taken[-1][0] + 1 if taken else 0)
            target = config.checkpoints / f"{storage.PREFIX}{number}"
        elif output_dir is None:
            raise ArgumentValueError("save_state needs output_dir, or automatic_checkpoint_naming.")
        else:
            target = Path(os.path.expanduser(output_dir)).resolve()
        if self._writes:
            storage.begin(target)
        return str(target), number

    def _commit(self, target: Path) -> None:
        storage.commit(target, {"format": 1, "nbstate": __version__, "ranks": self.num_processes})
        config = self.project_configuration
        if config.automatic_checkpoint_naming and config.total_limit is not None:
            storage.prune(target.parent, config.total_limit)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> str:
        """Go on from a checkpoint that ``save_state`` made.

        Everything is read before anything is changed. The next iteration over a loader gives the rest of the epoch
        that was interrupted, in the same shuffle; ``skip_first_batches`` counts from that epoch's beginning.

        Parameters
        ----------
        input_dir : path, optional
            The checkpoint's directory; by default the last whole one under ``automatic_checkpoint_naming``.
        load_kwargs : dict, optional
            For ``torch.load``: registered objects whose state is more than tensors and plain values need
            ``weights_only=False``, which lets the file run code.
        **load_model_func_kwargs
            For the models' ``load_state_dict`` (``strict``, ``assign``); ``map_location`` ("cpu" or "on_device") says
            where tensors are put on the way.

        Returns
        -------
        str
            The checkpoint's directory.

        Raises
        ------
        CheckpointError
            There is no whole checkpoint, or it lacks something that was prepared or registered; nothing is changed.
        """
        place = main_says("load_state", lambda: self._find(input_dir))
        options = dict(load_model_func_kwargs)
        on_device = options.pop("map_location", "cpu") == "on_device"
        models = list(self._models)
        for hook in self._load_hooks.values():
            hook(models, place)
        subjects = replace(self._subjects(), models=models)

        def read() -> checkpoint.Found:
            device = str(self.device) if on_device else "cpu"
            return checkpoint.read(Path(place), subjects, self.process_index, device, **(load_kwargs or {}))

        found = together("load_state", read)
        checkpoint.restore(found, subjects, **options)
        self.step = checkpoint.restore_rank(found, subjects, self.num_processes, self.device)
        return place

    def _find(self, input_dir: str | os.PathLike[str] | None) -> str:
        """The directory to load from; the rank that writes finishes what a killed process left undone."""
        config = self.project_configuration
        if input_dir is not None:
            place = Path(os.path.expanduser(input_dir)).resolve()
            if self._writes:
                storage.heal(place)
            if self._writes and not place.is_dir():
                raise CheckpointError(f"There is no checkpoint at {place}.")
            return str(place)
        if not config.automatic_checkpoint_naming or config.project_dir is None:
            raise ArgumentValueError("load_state needs input_dir, or automatic_checkpoint_naming with a project_dir.")
        if not self._writes:
            return ""
        storage.heal_folder(config.checkpoints)
        whole = [place for _, place in storage.numbered(config.checkpoints) if storage.is_whole(place)]
        if not whole:
            raise CheckpointError(f"There is no whole checkpoint in {config.checkpoints}.")
        return str(whole[-1])

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Save a model's weights alone, for use without nbstate.

        Parameters
        ----------
        model : torch.nn.Module
            Prepared or not.
        save_directory : path
            Made if need be. Gets ``model.safetensors``, or parts of it with an index, as transformers reads them.
        max_shard_size : int or str
            Bytes of one part, or like "5GB".
        safe_serialization : bool
            Safetensors; otherwise ``pytorch_model.bin`` by ``torch.save``.
        """
        folder = Path(os.path.expanduser(save_directory))
        limit = weights.parse_size(max_shard_size)
        state = weights.full_state_dict(model)
        safe = safe_serialization
        together(
            "save_model",
            lambda: weights.write_shards(state, folder, limit, weights.safe_or_plain(safe)) if self._writes else None,
        )

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Write an object into a file, on the main process only; the file is the old one or the whole new one.

        Parameters
        ----------
        obj
            What ``torch.save`` takes.
        f : path
            The file.
        safe_serialization : bool
            Tensors by name into safetensors.
        """
        if self._writes:
            weights.save_object(obj, Path(os.path.expanduser(f)), safe_serialization)

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """A model's whole state by the names of the user's own model; see ``weights.full_state_dict``."""
        return weights.full_state_dict(model, unwrap)

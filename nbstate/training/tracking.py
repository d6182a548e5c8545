"""Trackers: where what is measured during training goes."""

from __future__ import annotations

import abc
import importlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

import torch

from nbstate.errors import ArgumentTypeError, ArgumentValueError
from nbstate.training.exchange import Exchange
from nbstate.training.project import ProjectConfiguration

__all__ = ["GeneralTracker", "TensorBoardTracker", "Tracking"]


class GeneralTracker(abc.ABC):
    """What ``Accelerator(log_with=...)`` takes: derive from it to send measurements anywhere.

    Attributes
    ----------
    name : str
        What ``get_tracker`` and ``init_trackers(init_kwargs=)`` call it.
    requires_logging_directory : bool
        Whether it is made with a ``logging_dir``.
    main_process_only : bool
        Whether only the main process makes and calls it; True by default. Otherwise every rank has one.

    Examples
    --------
    >>> class Kept(GeneralTracker):
    ...     name = "kept"
    ...     requires_logging_directory = False
    ...     def __init__(self, run_name, **kwargs):
    ...         self.rows = []
    ...     @property
    ...     def tracker(self):
    ...         return self.rows
    ...     def store_init_configuration(self, values):
    ...         self.rows.append(values)
    ...     def log(self, values, step=None, **kwargs):
    ...         self.rows.append((step, values))
    >>> from nbstate.training import Accelerator
    >>> accelerator = Accelerator(cpu=True, log_with=Kept("a run"))
    >>> accelerator.init_trackers("a project", config={"rate": 0.1})
    >>> accelerator.log({"loss": 0.5}, step=1)
    >>> accelerator.get_tracker("kept", unwrap=True)
    [{'rate': 0.1}, (1, {'loss': 0.5})]
    """

    name: ClassVar[str]
    requires_logging_directory: ClassVar[bool]
    main_process_only: ClassVar[bool] = True

    def start(self) -> None:  # noqa: B027 - a tracker that is ready when it is made needs none
        """Begin; called once by ``init_trackers``."""

    @property
    @abc.abstractmethod
    def tracker(self) -> Any:
        """What is inside: the writer or run of the library that this hands on to."""

    @abc.abstractmethod
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the settings of the run."""

    @abc.abstractmethod
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep measurements by name, of a step."""

    def finish(self) -> None:  # noqa: B027 - a tracker with nothing to close needs none
        """End; called once by ``end_training``."""


class TensorBoardTracker(GeneralTracker):
    """Writes for TensorBoard, into a directory of the run's name.

    Parameters
    ----------
    run_name : str
        The run; a directory in ``logging_dir``.
    logging_dir : path
        Where runs are kept.
    **kwargs
        For ``torch.utils.tensorboard.SummaryWriter``.
    """

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        self.run_name = run_name
        self.logging_dir = Path(logging_dir) / run_name
        self._options = kwargs
        self._writer: Any = None
        _tensorboard()

    def start(self) -> None:
        """Open the writer."""
        if self._writer is None:
            self._writer = _tensorboard().SummaryWriter(str(self.logging_dir), **self._options)

    @property
    def tracker(self) -> Any:
        """The ``SummaryWriter``."""
        return self._writer

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the run's settings as hyperparameters, and whole in ``hparams.json``."""
        plain = {
            name: value if isinstance(value, bool | int | float | str) else str(value) for name, value in values.items()
        }
        summaries = importlib.import_module("torch.utils.tensorboard.summary").hparams(plain, {})
        # Not add_hparams, which makes a run of its own for them.
        for summary in summaries:
            self._writer.file_writer.add_summary(summary)
        self._writer.flush()
        (self.logging_dir / "hparams.json").write_text(json.dumps(values, indent=1, default=str), encoding="utf-8")

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep numbers as scalars, text as text, and a dict of numbers as curves in one plot.

        Parameters
        ----------
        values : dict
            By name. A tensor of one element counts as a number.
        step : int, optional
            Where on the axis.
        **kwargs
            For the writer's ``add_scalar``, ``add_text`` or ``add_scalars``.
        """
        for name, value in values.items():
            if isinstance(value, str):
                self._writer.add_text(name, value, global_step=step, **kwargs)
            elif isinstance(value, Mapping):
                self._writer.add_scalars(name, dict(value), global_step=step, **kwargs)
            elif isinstance(value, torch.Tensor) and value.numel() != 1:
                raise ArgumentTypeError(
                    f"TensorBoard keeps single numbers by log, and {name!r} has shape {tuple(value.shape)}; reduce it, "
                    "or use get_tracker('tensorboard', unwrap=True).add_histogram."
                )
            else:
                self._writer.add_scalar(name, float(value), global_step=step, **kwargs)
        self._writer.flush()

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep images by name; arrays of shape (number, 3, height, width), or as ``dataformats`` says."""
        for name, images in values.items():
            self._writer.add_images(name, images, global_step=step, **kwargs)

    def finish(self) -> None:
        """Close the writer."""
        if self._writer is not None:
            self._writer.close()


def _tensorboard() -> Any:
    try:
        return importlib.import_module("torch.utils.tensorboard")
    except ImportError as error:
        raise ImportError("log_with='tensorboard' needs TensorBoard: pip install tensorboard") from error


_BY_NAME: Final[Mapping[str, type[GeneralTracker]]] = {"tensorboard": TensorBoardTracker}


class _Absent(GeneralTracker):
    """Stands for a tracker on ranks that have none: whatever is called on it does nothing."""

    name = "absent"
    requires_logging_directory = False

    @property
    def tracker(self) -> Any:
        return self

    def store_init_configuration(self, values: dict[str, Any]) -> None: ...

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def check_trackers(log_with: Any) -> list[str | GeneralTracker]:
    """What ``log_with`` asks for, each a known name or a tracker.

    Raises
    ------
    ArgumentValueError
        A name that is not known.
    ArgumentTypeError
        Something that is no tracker; names what it lacks.
    """
    asked = log_with if isinstance(log_with, list | tuple) else [] if log_with is None else [log_with]
    found: list[str | GeneralTracker] = []
    for one in asked:
        name = str(getattr(one, "value", one)) if not isinstance(one, GeneralTracker) else ""
        if isinstance(one, GeneralTracker):
            lacking = [field for field in ("name", "requires_logging_directory") if not hasattr(one, field)]
            if lacking:
                raise ArgumentTypeError(f"{type(one).__name__} lacks {' and '.join(lacking)}; see GeneralTracker.")
            found.append(one)
        elif name == "all":
            found.extend(_BY_NAME)
        elif name in _BY_NAME:
            found.append(name)
        else:
            raise ArgumentValueError(
                f"log_with knows {', '.join(map(repr, [*_BY_NAME, 'all']))}, and trackers derived from GeneralTracker; "
                f"not {one!r}."
            )
    return found


class Tracking(Exchange):
    """The part of ``Accelerator`` that hands measurements on to trackers."""

    project_configuration: ProjectConfiguration
    log_with: list[str | GeneralTracker]
    trackers: list[GeneralTracker]

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start the trackers of ``log_with``.

        Parameters
        ----------
        project_name : str
            The run's name.
        config : dict, optional
            Settings of the run, kept along.
        init_kwargs : dict of dict, optional
            By a tracker's name, arguments for making it.
        """
        self.end_training()
        for asked in self.log_with:
            kind = _BY_NAME[asked] if isinstance(asked, str) else type(asked)
            if kind.main_process_only and not self.is_main_process:
                continue
            tracker = self._make(asked, project_name, (init_kwargs or {}).get(kind.name, {}))
            tracker.start()
            self.trackers.append(tracker)
            if config is not None:
                tracker.store_init_configuration(config)

    def _make(self, asked: str | GeneralTracker, run: str, options: Mapping[str, Any]) -> GeneralTracker:
        if isinstance(asked, GeneralTracker):
            return asked
        kind: Any = _BY_NAME[asked]
        if not kind.requires_logging_directory:
            return kind(run, **options)  # type: ignore[no-any-return]
        folder = self.project_configuration.logging_dir
        if folder is None:
            raise ArgumentValueError(f"log_with={asked!r} needs a directory: Accelerator(project_dir=...).")
        return kind(run, folder, **options)  # type: ignore[no-any-return]

    def log(
        self,
        values: dict[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Hand measurements to every tracker that runs on this rank.

        Parameters
        ----------
        values : dict
            By name.
        step : int, optional
            The step they were measured at.
        log_kwargs : dict of dict, optional
            By a tracker's name, arguments for its ``log``.
        """
        for tracker in self.trackers:
            tracker.log(values, step=step, **(log_kwargs or {}).get(tracker.name, {}))

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """A tracker by its name, or what is inside of it.

        Parameters
        ----------
        name : str
            As in ``log_with``.
        unwrap : bool
            The writer or run of the library itself.

        Returns
        -------
        GeneralTracker or object
            On ranks that the tracker does not run on, something whose methods do nothing.
        """
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        known = [_BY_NAME[asked].name if isinstance(asked, str) else asked.name for asked in self.log_with]
        if name not in known:
            raise ArgumentValueError(f"There is no tracker {name!r}; log_with has {known or 'none'}.")
        if self.is_main_process:
            raise ArgumentValueError(f"Tracker {name!r} is not started; call init_trackers first.")
        return _Absent()

    def end_training(self) -> None:
        """Finish the trackers; to be called when training is done. Trackers can be started anew afterwards."""
        while self.trackers:
            self.trackers.pop(0).finish()

"""Where a project's checkpoints and logs are kept."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from nbstate.errors import ArgumentValueError

__all__ = ["ProjectConfiguration"]


@dataclass
class ProjectConfiguration:
    """Where checkpoints and logs go.

    Attributes
    ----------
    project_dir : path, optional
        The project's directory.
    logging_dir : path, optional
        Where trackers write; ``project_dir`` by default.
    automatic_checkpoint_naming : bool
        ``save_state()`` makes ``project_dir/checkpoints/checkpoint_0``, ``checkpoint_1`` and so on.
    total_limit : int, optional
        How many of these to keep. The oldest are deleted after a new one is whole.
    iteration : int
        Number of the next of these. One that exists already is not overwritten: the first free number is taken.
    save_on_each_node : bool
        What is the same on every rank is written by the first rank of each machine, not of the world: for machines
        that share no disk.
    """

    project_dir: str | os.PathLike[str] | None = None
    logging_dir: str | os.PathLike[str] | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        if self.total_limit is not None and self.total_limit < 1:
            raise ArgumentValueError(f"total_limit is at least 1, not {self.total_limit}.")
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Set the project's directory, and the logs' if it has none of its own."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir

    @property
    def checkpoints(self) -> Path:
        """The directory of the numbered checkpoints."""
        return Path(self.project_dir or ".").resolve() / "checkpoints"

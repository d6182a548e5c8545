"""The dashboard's controls: what a person may ask of a running launch without its cell, as the page wants it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from nbstate.errors import LaunchError

if TYPE_CHECKING:
    from nbstate.launch.launch import Launch

__all__ = ["LaunchControls"]


class LaunchControls:
    """The buttons of one launch; see ``dashboard.Controls``."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in every rank."""
        self._launch.interrupt()

    def stop(self) -> None:
        """End every rank."""
        self._launch.stop()

    def stacks(self) -> str:
        """Where each rank is, as text."""
        return _text_of(self._launch.stacks)

    def diagnose(self) -> str:
        """What is wrong with the launch, if anything is, as text."""
        return _text_of(self._launch.examine)


def _text_of(question: Callable[[], object]) -> str:
    try:
        return repr(question())
    except (LaunchError, OSError) as error:  # a pane that says what is wrong serves better than one that stays empty
        return f"{type(error).__name__}: {error}"

"""What can go wrong, as a tree.

::

    NbstateError
    ├── ArgumentValueError (ValueError)      an argument has a value that is not accepted
    ├── ArgumentTypeError (TypeError)        an argument is of a type that is not accepted
    ├── StateConflictError (ValueError)      asks a built singleton to be something else
    ├── StateNotBuiltError (AttributeError)  reads a singleton that was reset or never built
    ├── MissingRankError (TimeoutError)      a barrier timed out; names the ranks that never came
    ├── MainProcessFailedError (RuntimeError)  the rank that went first failed, so the others may not go on
    ├── StructureError (TypeError)           ranks or containers do not match in a collective
    ├── CheckpointError (OSError)            a checkpoint could not be written, or there is none to read
    └── LaunchError (RuntimeError)
        ├── NestedLaunchError                a launch inside a rank
        ├── ForkUnsafeError                  fork was asked for and this kernel cannot fork safely
        ├── ShippingError                    a function, argument or result cannot travel; names the object
        ├── LaunchTimeoutError (TimeoutError)  the whole launch took longer than its ``timeout``
        ├── LaunchStoppedError               the launch was stopped on request, so there are no results
        └── RankError                        a rank failed: the one error of the launch that matters

Each class is also the built-in error a caller would expect to catch, so ``except ValueError`` works as it reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

__all__ = [
    "ArgumentTypeError",
    "ArgumentValueError",
    "CheckpointError",
    "ForkUnsafeError",
    "LaunchError",
    "LaunchStoppedError",
    "LaunchTimeoutError",
    "MainProcessFailedError",
    "MissingRankError",
    "NbstateError",
    "NestedLaunchError",
    "RankError",
    "ShippingError",
    "StateConflictError",
    "StateNotBuiltError",
    "StructureError",
]


class NbstateError(Exception):
    """Root of every error that nbstate raises on purpose."""


class ArgumentValueError(NbstateError, ValueError):
    """An argument has a value that is not accepted; the text lists the accepted ones."""


class ArgumentTypeError(NbstateError, TypeError):
    """An argument is of a type that is not accepted; the text lists the accepted ones."""


class StateConflictError(NbstateError, ValueError):
    """A singleton that already exists was asked to be something else; nothing was changed."""


class StateNotBuiltError(NbstateError, AttributeError):
    """A singleton was read after its reset, or before it was built."""


class MissingRankError(NbstateError, TimeoutError):
    """A barrier timed out.

    Attributes
    ----------
    missing : tuple of int
        The ranks that never came.
    """

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.missing)


class MainProcessFailedError(NbstateError, RuntimeError):
    """The rank that goes first in ``main_process_first`` failed, so what the others wait for does not exist."""


class StructureError(NbstateError, TypeError):
    """A collective was given containers that do not match, or leaves that cannot be sent."""


class CheckpointError(NbstateError, OSError):
    """A checkpoint could not be written, or there is none that can be read; what was there before is untouched."""


class LaunchError(NbstateError, RuntimeError):
    """Root of what can go wrong between one cell and N ranks."""

    def _render_traceback_(self) -> list[str]:
        """Tell IPython what to print: the text alone, since none of nbstate's own frames would help a reader."""
        return [f"{type(self).__name__}: {line}" if i == 0 else line for i, line in enumerate(str(self).splitlines())]


class NestedLaunchError(LaunchError):
    """A launch was asked for inside a rank."""


class ForkUnsafeError(LaunchError):
    """``start_method="fork"`` was asked for in a kernel that cannot fork safely; the text says what made it so."""


class ShippingError(LaunchError):
    """A function, an argument or a result cannot travel between the kernel and a rank; the text names it."""


class LaunchTimeoutError(LaunchError, TimeoutError):
    """A launch took longer than its ``timeout``; every rank was stopped."""


class LaunchStoppedError(LaunchError):
    """A launch was stopped on request before its ranks were done."""


class RankError(LaunchError):
    """A rank failed: the first cause, not the first noise.

    The text says what is wrong in its first line, then holds the guilty rank's traceback with the notebook's source
    lines, then one line on what each other rank was doing. ``__cause__`` is the rank's own exception, with the causes
    and contexts that it has, where it could travel. A notebook shows the same with the source around each line.

    Attributes
    ----------
    rank : int
        The guilty rank.
    cause_type : str
        Name of the exception's class, or of the signal (``"SIGKILL"``), or ``"exit code 3"``.
    traceback : str
        The guilty rank's traceback, as Python prints it, without nbstate's own frames; empty if the rank died.
    others : dict of int to str
        What each other rank was doing when this one failed.
    log_tail : tuple of str
        The guilty rank's last output lines.
    results : dict of int to object
        Results of the ranks that had already returned.
    drawing : tuple of str
        The lines that IPython shows instead of the text, colours included; empty outside IPython.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        cause_type: str,
        traceback: str = "",
        others: Mapping[int, str] | None = None,
        log_tail: Sequence[str] = (),
        results: Mapping[int, Any] | None = None,
        drawing: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.cause_type = cause_type
        self.traceback = traceback
        self.others = dict(others or {})
        self.log_tail = tuple(log_tail)
        self.results = dict(results or {})
        self.drawing = tuple(drawing)

    def _render_traceback_(self) -> list[str]:
        """Tell IPython what to print: the drawing where there is one."""
        return list(self.drawing) or super()._render_traceback_()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rank_error, (type(self), str(self), {name: getattr(self, name) for name in _RANK_ERROR_FIELDS})


_RANK_ERROR_FIELDS: Final = ("rank", "cause_type", "traceback", "others", "log_tail", "results", "drawing")


def _rank_error(kind: type[RankError], message: str, fields: Mapping[str, Any]) -> RankError:
    """Make a RankError anew; pickle cannot give keyword arguments by itself."""
    return kind(message, **fields)

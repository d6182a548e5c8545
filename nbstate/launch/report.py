"""An exception in a rank, told so that it arrives whatever it is made of."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType
from typing import Final

import cloudpickle
import torch.distributed as dist

from nbstate.errors import MainProcessFailedError, MissingRankError

__all__ = ["Blame", "ErrorReport", "describe", "name_cells"]

_OUR_FIRST_LINES: Final = tuple(
    os.path.join(os.path.dirname(os.path.abspath(__file__)), name) for name in ("rank.py", "shipping.py")
)
_NOISE: Final = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "connection was likely closed",
    "connectfullmesh failed",
    "failed to recv",
    "socket closed",
    "remote process exited",
    "application timeout caused pair closure",
)
_TIMED_OUT: Final = ("timed out", "timeout")


class Blame(IntEnum):
    """Which of several errors is the cause: the lowest. The order is that of the architecture, decision 4."""

    USER = 0
    DIED = 1
    CONNECTION = 2
    TIMEOUT = 3
    INTERRUPTED = 4


@dataclass(frozen=True)
class ErrorReport:
    """One exception as text, and as an object where it could be pickled.

    Attributes
    ----------
    type_name : str
        Name of the exception's class.
    message : str
        ``str()`` of the exception.
    text : str
        The traceback as Python prints it, causes, groups and notes included, from the user's first line on.
    filename, line : str, int
        Where it was raised, in the user's code.
    blame : Blame
        How likely this is the cause rather than a consequence.
    pickled : bytes
        The exception by value; empty if it cannot be pickled.
    """

    type_name: str
    message: str
    text: str
    filename: str
    line: int
    blame: Blame
    pickled: bytes


def describe(error: BaseException) -> ErrorReport:
    """Report an exception that was just caught."""
    error.__traceback__ = _from_users_code(error.__traceback__)
    filename, line = _place(error.__traceback__)
    return ErrorReport(
        type_name=type(error).__qualname__,
        message=_text_of(error),
        text=_format(error),
        filename=filename,
        line=line,
        blame=_blame(error),
        pickled=_pickle(error),
    )


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a user's __str__
        return f"<{type(error).__qualname__} whose text cannot be had>"


def _format(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error)).rstrip("\n")
    except Exception:
        return f"{type(error).__qualname__}: {_text_of(error)}"


def _from_users_code(tb: TracebackType | None) -> TracebackType | None:
    first = tb
    while tb is not None and tb.tb_frame.f_code.co_filename in _OUR_FIRST_LINES:
        tb = tb.tb_next
    return tb or first


def _place(tb: TracebackType | None) -> tuple[str, int]:
    """The innermost line of the user's own code."""
    from nbstate.telemetry.source import is_user_file

    place = ("", 0)
    while tb is not None:
        name = tb.tb_frame.f_code.co_filename
        if is_user_file(name) or not place[0]:
            place = (name, tb.tb_lineno)
        tb = tb.tb_next
    return place


def _blame(error: BaseException) -> Blame:
    text = _text_of(error).lower()
    if isinstance(error, MainProcessFailedError):
        return Blame.CONNECTION
    if isinstance(error, MissingRankError):
        return Blame.TIMEOUT
    torch_made = isinstance(error, (dist.DistError, RuntimeError, ConnectionError))
    if torch_made and any(words in text for words in _NOISE):
        return Blame.CONNECTION
    if isinstance(error, (dist.DistNetworkError, dist.DistStoreError)):
        return Blame.TIMEOUT if any(words in text for words in _TIMED_OUT) else Blame.CONNECTION
    if isinstance(error, (dist.DistError, RuntimeError)) and "timed out" in text:
        return Blame.TIMEOUT
    return Blame.USER


def _pickle(error: BaseException) -> bytes:
    """The exception by value, if it survives the way there and back."""
    try:
        data = cloudpickle.dumps(error)
        pickle.loads(data)
    except BaseException:  # a user's __reduce__ or __init__ may raise anything
        return b""
    return data if isinstance(data, bytes) else b""


def name_cells(text: str, cells: Mapping[str, str]) -> str:
    """Put the notebook's names for its cells where a traceback has the files that exist nowhere."""
    for filename, shown in cells.items():
        text = text.replace(f'File "{filename}", line', f"Cell {shown}, line")
    return text

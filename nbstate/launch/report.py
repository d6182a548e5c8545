"""An exception in a rank, told so that it arrives whatever it is made of."""

from __future__ import annotations

import itertools
import os
import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType
from typing import Any, Final

import cloudpickle
import torch
import torch.distributed as dist

from nbstate.errors import MainProcessFailedError, MissingRankError
from nbstate.launch.tracebacks import Link, chain_of, take_apart, tell
from nbstate.telemetry.source import is_user_file

__all__ = ["Blame", "ErrorReport", "describe", "name_cells", "rebuild"]

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
# Who speaks for the connections between ranks: the innermost frame of the error, or, where C++ was called from the
# user's own line (``work.wait()``), words that only its texts have. What else says "timed out" is the user's.
_TORCH: Final = os.path.dirname(os.path.abspath(torch.__file__))
_SPEAKERS: Final = tuple(
    os.path.join(_TORCH, *part) + os.sep for part in (("distributed",), ("autograd",), ("nn", "parallel"))
)
_CPP_WORDS: Final = ("gloo", "nccl", "processgroup", "c10d", "tcpstore")


class Blame(IntEnum):
    """Which of several errors is the cause: the lowest. The order is that of the architecture, decision 4.

    ``SHADOWED`` is a lost connection or a time-out on top of an exception of the user's own: a ``finally`` block that
    calls a barrier, an ``except`` that saves a checkpoint. What lies beneath may be the cause or a trifle that was
    being handled, so a death goes before it, and it goes before bare noise.
    """

    USER = 0
    DIED = 1
    SHADOWED = 2
    CONNECTION = 3
    TIMEOUT = 4
    INTERRUPTED = 5


_HEARSAY: Final = (Blame.CONNECTION, Blame.TIMEOUT)


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
        The exception and its chain by value, for ``rebuild``; empty if it cannot be pickled.
    links : tuple of Link
        The same as ``text``, for a notebook to draw.
    at : float
        ``time.monotonic()`` when it was caught.
    """

    type_name: str
    message: str
    text: str
    filename: str
    line: int
    blame: Blame
    pickled: bytes
    links: tuple[Link, ...] = ()
    at: float = 0.0


def describe(error: BaseException) -> ErrorReport:
    """Report an exception that was just caught."""
    at = time.monotonic()
    filename, line = _place(error.__traceback__)
    text, links = _tell(error)
    return ErrorReport(
        type_name=type(error).__qualname__,
        message=_text_of(error),
        text=text,
        filename=filename,
        line=line,
        blame=_blame(error),
        pickled=_pickle(error),
        links=links,
        at=at,
    )


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:  # a user's __str__ may do anything
        return f"<{type(error).__qualname__} whose text cannot be had>"


def _tell(error: BaseException) -> tuple[str, tuple[Link, ...]]:
    try:
        return tell(take_apart(error))
    except BaseException:  # a user's __notes__, __str__ or source loader
        return f"{type(error).__qualname__}: {_text_of(error)}", ()


def _innermost(tb: TracebackType | None) -> str:
    name = ""
    while tb is not None:
        name = tb.tb_frame.f_code.co_filename
        tb = tb.tb_next
    return name


def _place(tb: TracebackType | None) -> tuple[str, int]:
    """The innermost line of the user's own code."""
    place = ("", 0)
    while tb is not None:
        name = tb.tb_frame.f_code.co_filename
        if is_user_file(name) or not place[0]:
            place = (name, tb.tb_lineno)
        tb = tb.tb_next
    return place


def _blame(error: BaseException) -> Blame:
    """Judge an exception by what it came from: the oldest of its chain is the first cause."""
    blames = [_own_blame(link) for link in chain_of(error)]
    hearsay = [blame for blame in blames if blame in _HEARSAY]
    if not hearsay:
        return Blame.USER
    return hearsay[-1] if blames[-1] in _HEARSAY else Blame.SHADOWED


def _own_blame(error: BaseException) -> Blame:
    members = getattr(error, "exceptions", None)
    if isinstance(members, tuple) and members:
        return min((_blame(each) for each in members if isinstance(each, BaseException)), default=Blame.USER)
    if isinstance(error, MainProcessFailedError):
        return Blame.CONNECTION
    if isinstance(error, MissingRankError):
        return Blame.TIMEOUT
    if not isinstance(error, (dist.DistError, RuntimeError, ConnectionError)):
        return Blame.USER
    text = _text_of(error).lower()
    network = isinstance(error, (dist.DistNetworkError, dist.DistStoreError))
    if not (isinstance(error, dist.DistError) or _of_connections(error, text)):
        return Blame.USER
    if any(words in text for words in _NOISE):
        return Blame.CONNECTION
    if any(words in text for words in _TIMED_OUT):
        return Blame.TIMEOUT
    return Blame.CONNECTION if network else Blame.USER


def _of_connections(error: BaseException, text: str) -> bool:
    """Whether an error was made where ranks talk to each other, rather than by the user or another library."""
    return _innermost(error.__traceback__).startswith(_SPEAKERS) or any(word in text for word in _CPP_WORDS)


def _pickle(error: BaseException) -> bytes:
    """The exception and what it came from by value, as far as they survive the way there and back."""
    chain: list[tuple[bytes, bool, bool]] = []
    for link in chain_of(error):
        data = _pickle_one(link)
        if not data:
            break
        chain.append((data, link.__cause__ is not None, link.__suppress_context__))
    return pickle.dumps(chain) if chain else b""


def _pickle_one(error: BaseException) -> bytes:
    try:
        data = cloudpickle.dumps(error)
        same = isinstance(pickle.loads(data), BaseException)
    except BaseException:  # a user's __reduce__ or __init__ may raise anything
        return b""
    return data if same and isinstance(data, bytes) else b""


def rebuild(pickled: bytes) -> BaseException | None:
    """The exception of a report with its causes and contexts, or None if it could not travel."""
    if not pickled:
        return None
    links = list(_unpickled(pickle.loads(pickled)))
    for (error, from_cause, suppress), (origin, _, _) in itertools.pairwise(links):
        if from_cause:
            error.__cause__ = origin
        else:
            error.__context__ = origin
        error.__suppress_context__ = suppress
    return links[0][0] if links else None


def _unpickled(chain: Sequence[tuple[bytes, bool, bool]]) -> Iterator[tuple[BaseException, bool, bool]]:
    for data, from_cause, suppress in chain:
        try:
            error: Any = pickle.loads(data)
        except KeyboardInterrupt:
            raise
        except BaseException:  # the class is the user's; its text is in the traceback anyway
            return
        if not isinstance(error, BaseException):
            return
        yield error, from_cause, suppress


def name_cells(text: str, cells: Mapping[str, str]) -> str:
    """Put the notebook's names for its cells where a traceback has the files that exist nowhere."""
    for filename, shown in cells.items():
        text = text.replace(f'File "{filename}", line', f"Cell {shown}, line")
    return text

"""Waiting for the other ranks: a barrier that names who is missing, and a turn that one rank takes first.

The barrier is torch's own and costs nothing more while it works. Only when it fails does each waiting rank write its
presence into the group's store and look who else is there; whoever is not never came.

A turn (``main_process_first``) is no barrier of torch's, because then a first rank that fails would leave the others
waiting, or let them go on without what it should have prepared. The first rank leaves word in the store instead, good
or bad, and the others read it. They look often rather than wait inside the store: a wait in C++ does not hear a
keyboard interrupt, and writes warnings to the terminal each time it runs out.

Both count calls for the life of the process, not of the group: a group that is made anew may find the old keys. Turns
within a turn are counted apart, as 3.1, 3.2: a first rank that fails after its inner turns has taken more of them than
the others, who never came that far, and the next outer turn must still be the same one for all.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import torch.distributed as dist

from nbstate.errors import MainProcessFailedError, MissingRankError
from nbstate.telemetry import probe
from nbstate.telemetry.collectives import unseen

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["barrier", "forget_counts", "take_turn"]

_GRACE_AFTER_TIMEOUT: Final = 1.0  # seconds for the others to notice as well; they timed out about now
_GRACE: Final = 0.3
_SHORTEST_LOOK: Final = 0.001  # seconds between two looks into the store, doubled up to the longest
_LONGEST_LOOK: Final = 0.1
_PATIENCE: Final = timedelta(minutes=30)
_WORD_LENGTH: Final = 2000
_DONE: Final = "done"

_barriers = 0
_turns = [0]  # how many were taken at each depth, the outermost first; the last is of the innermost one open


def forget_counts() -> None:
    """Start counting again, in a child whose world is new."""
    global _barriers
    _barriers = 0
    _turns[:] = [0]


def barrier(rank: int, size: int, device_index: int | None) -> None:
    """Wait until every rank of the world is here.

    Parameters
    ----------
    rank, size : int
        This rank and the number of ranks.
    device_index : int, optional
        This rank's device among those of its machine, for backends that synchronise on one.

    Raises
    ------
    MissingRankError
        If it failed because ranks did not come. ``missing`` names them.
    RuntimeError
        Torch's own, if all came, or there is no store to ask.
    """
    global _barriers
    _barriers += 1
    number = _barriers
    written = probe.enter_barrier()
    completed = False
    wait = unseen(dist.barrier)
    try:
        if device_index is None:
            wait()
        else:
            wait(device_ids=[device_index])
        completed = True
    except RuntimeError as error:
        missing = _absent(f"nbstate/barrier/{number}", rank, size, _grace(error))
        if not missing:
            raise
        raise MissingRankError(_sentence(number, missing, size, error), missing) from error
    finally:
        if written:
            probe.leave(completed)


def _grace(error: RuntimeError) -> float:
    text = str(error).lower()
    return _GRACE_AFTER_TIMEOUT if "timed out" in text or "timeout" in text else _GRACE


def _sentence(number: int, missing: tuple[int, ...], size: int, error: RuntimeError) -> str:
    names = ", ".join(map(str, missing))
    who = f"rank {names} is" if len(missing) == 1 else f"ranks {names} are"
    return f"barrier #{number}: {who} missing, {size - len(missing)} of {size} ranks came ({error})"


def _store() -> Store | None:
    try:
        return dist.distributed_c10d._get_default_store()
    except (ValueError, RuntimeError):
        return None


def _absent(prefix: str, rank: int, size: int, grace: float) -> tuple[int, ...]:
    """Ranks that do not write their presence in time; none if the store cannot be asked."""
    store = _store()
    if store is None:
        return ()
    absent: tuple[int, ...] = ()
    deadline = time.monotonic() + grace
    try:
        store.set(f"{prefix}/{rank}", "here")
        while True:
            absent = tuple(other for other in range(size) if not store.check([f"{prefix}/{other}"]))
            if not absent or time.monotonic() > deadline:
                return absent
            time.sleep(_LONGEST_LOOK / 4)
    except RuntimeError:
        # The rank that hosts the store has left. If it answered at first, it was here and went after its own
        # grace; what it said then still holds. If it never answered, nothing is known.
        return absent


@contextlib.contextmanager
def take_turn(rank: int, goes_first: bool, who: str, name: str) -> Iterator[None]:
    """One rank runs the body first, the others after it, and only if it went well.

    Parameters
    ----------
    rank : int
        This rank.
    goes_first : bool
        Whether this rank is the one that the others wait for.
    who : str
        What the ranks that wait for the same one have in common.
    name : str
        What the user called, for the error.

    Raises
    ------
    MainProcessFailedError
        In the ranks that waited, if the first rank's body raised. The text names its exception.
    MissingRankError
        If the first rank gave no word within the group's time-out, or died with the store.
    """
    store = _store()
    if store is None:
        yield
        return
    with _numbered() as number:
        yield from _in_turn(store, f"nbstate/turn/{number}/{who}", rank, goes_first, name)


@contextlib.contextmanager
def _numbered() -> Iterator[str]:
    """The number of the turn that begins here, the same on every rank, as ``"3"`` or ``"3.1"``."""
    depth = len(_turns)
    _turns[-1] += 1
    number = ".".join(map(str, _turns))
    _turns.append(0)
    try:
        yield number
    finally:
        del _turns[depth:]


def _in_turn(store: Store, key: str, rank: int, goes_first: bool, name: str) -> Iterator[None]:
    if not goes_first:
        _hear(store, key, name)
        yield
        return
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(RuntimeError):  # no store, no listeners: the body's own error matters
            store.set(key, f"rank {rank}, which goes first, failed: {_describe(error)}")
        raise
    written = probe.enter_barrier()
    store.set(key, _DONE)
    if written:
        probe.leave()


def _describe(error: BaseException) -> str:
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # its __str__ is the user's own, and the others must hear in any case
        text = type(error).__name__
    # Lone surrogates, as file names have them, do not pass into C++.
    return text[:_WORD_LENGTH].encode("utf-8", "replace").decode()


def _hear(store: Store, key: str, name: str) -> None:
    written = probe.enter_barrier()
    completed = False
    patience = getattr(store, "timeout", None) or _PATIENCE
    deadline, pause = time.monotonic() + patience.total_seconds(), _SHORTEST_LOOK
    try:
        while not store.check([key]):
            if time.monotonic() > deadline:
                raise MissingRankError(f"{name}: the rank that goes first was not done within {patience}")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_LOOK)
        word = store.get(key).decode("utf-8", "replace")
        completed = True
    except RuntimeError as error:
        raise MissingRankError(f"{name}: the rank that goes first, or the store, has gone ({error})") from error
    finally:
        if written:
            probe.leave(completed)
    if word != _DONE:
        raise MainProcessFailedError(f"{name}: {word}")

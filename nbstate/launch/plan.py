"""RankPlan: all that one rank needs to know, and how a descriptor gets to it.

Light on purpose: under spawn this is unpickled before torch is imported.
"""

from __future__ import annotations

import os
import pickle
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

__all__ = ["Fd", "OwnedFd", "Payload", "RankPlan"]


class Fd:
    """A descriptor that the rank inherits. Under forkserver and spawn it is handed over when the plan is pickled."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocess import reduction

        return _adopt, (reduction.DupFd(self.fd),)


def _adopt(handed_over: Any) -> Fd:
    return Fd(handed_over.detach())


class OwnedFd(Fd):
    """A descriptor that the kernel closes, with ``close`` or when the last reference to this object goes."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._closer = weakref.finalize(self, os.close, fd)

    def close(self) -> None:
        """Close the descriptor. Safe to call twice."""
        self._closer()


@dataclass(frozen=True)
class Payload:
    """A function and its arguments, ready to travel.

    Attributes
    ----------
    data : bytes
        The pickle, for ``shipping.unpack``. Empty if it is large: then it is the first block of the shared file.
    sources : dict of str to str
        Source text of the cells whose functions are inside, by file name, so that tracebacks and ``inspect`` in the
        rank can show lines of a file that exists nowhere on disk.
    shared : Fd or None
        The file that holds what is large (see ``tensors``), if anything is. All ranks inherit the same one.
    places : tuple of tuple of int
        Offset and length in bytes of each block in it.
    warning : str
        One line on what makes the pickle large, or nothing.
    """

    data: bytes
    sources: Mapping[str, str] = field(default_factory=dict)
    shared: Fd | None = None
    places: tuple[tuple[int, int], ...] = ()
    warning: str = ""

    def close(self) -> None:
        """Close the shared file in the kernel. Ranks that have mapped it keep it. Safe to call twice."""
        if isinstance(self.shared, OwnedFd):
            self.shared.close()


@dataclass(frozen=True)
class RankPlan:
    """All that one rank needs to know; the engine fills in ``parent``, ``control``, ``stdout`` and ``stderr``."""

    rank: int
    world_size: int
    parent: int
    """Pid of the process that makes the rank, the kernel or its fork server; filled in by the engine."""
    group: int
    """The kernel's process group, where a front end's interrupt arrives."""
    env: Mapping[str, str]
    directory: str
    path: tuple[str, ...]
    argv: tuple[str, ...]
    threads: int
    board: Fd
    listener: Fd | None
    """Rank 0 only: the bound socket on which it hosts the store."""
    payload: Payload | None
    direct: tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]] | None = None
    """Under fork: the call itself, for a function that cannot travel."""
    control: Fd = field(default_factory=lambda: Fd(-1))
    stdout: Fd = field(default_factory=lambda: Fd(-1))
    stderr: Fd = field(default_factory=lambda: Fd(-1))
    dump: Fd = field(default_factory=lambda: Fd(-1))
    """Where the rank writes its stacks when it is asked for them (see ``dumps``)."""
    forked_from_kernel: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        # multiprocess pickles with dill, in Python: 1 ms for an environment. Only the descriptors need it.
        state = {one.name: getattr(self, one.name) for one in fields(self)}
        handed_over = {name: state.pop(name) for name in ("board", "listener", "control", "stdout", "stderr", "dump")}
        return _rebuild, (pickle.dumps(state, protocol=pickle.HIGHEST_PROTOCOL), handed_over)


def _rebuild(state: bytes, handed_over: dict[str, Any]) -> RankPlan:
    return RankPlan(**pickle.loads(state), **handed_over)

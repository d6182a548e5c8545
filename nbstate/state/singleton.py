"""One state behind any number of instances, that survives pickling and forking for what it is: a handle.

Every instance of a class shares one dictionary as its ``__dict__``, so ``PartialState()`` in another cell, another
module or another thread is the same state. What an instance carries is no data but the question "who am I here?", and
that decides what happens at the borders of a process:

* *Reset*: the shared dictionary is emptied, and every instance anywhere says so when it is read.
* *Fork*: the child holds the parent's answer, which is wrong there. The rank's prologue calls ``reset_inherited()``;
  from then on the first reading of any inherited instance builds the child's own state.
* *Pickle*: an instance travels as its class alone. Read in another process it answers for that process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from nbstate.errors import StateNotBuiltError

__all__ = ["SharedState", "building", "renew_lock"]

_Self = TypeVar("_Self", bound="SharedState")

_lock = threading.RLock()


def building() -> threading.RLock:
    """The one lock under which singletons are built and reset."""
    return _lock


def renew_lock() -> None:
    """Replace the lock: in a forked child it may be held by a thread that was left behind."""
    global _lock
    _lock = threading.RLock()


class _Handles(type):
    """Of a state that is built, ``PartialState()`` hands out one instance again and again.

    Training loops write ``PartialState()`` where they want to know a rank's number, so it must cost no more than that.
    Any argument takes the long way, where it is compared with what the state was built with.
    """

    _kept: Any
    _is_built: Callable[[], bool]

    def __init__(cls, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        cls._kept = None  # a subclass has a handle of its own

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return super().__call__(*args, **kwargs)
        if cls._kept is None or not cls._is_built():
            cls._kept = super().__call__()
        return cls._kept


class SharedState(metaclass=_Handles):
    """Base of the singletons.

    A subclass gives its own ``_shared_state`` dictionary, and in ``_names`` every attribute that exists once it is
    built.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}
    _inherited: ClassVar[bool] = False
    _names: ClassVar[frozenset[str]] = frozenset()

    def __new__(cls: type[_Self], *args: Any, **kwargs: Any) -> _Self:
        instance = super().__new__(cls)
        object.__setattr__(instance, "__dict__", cls._shared_state)
        return instance

    def __getattr__(self, name: str) -> Any:
        cls = type(self)
        if name not in cls._names:
            raise AttributeError(f"{cls.__name__} has no attribute {name!r}")
        cls._build_if_inherited(name)
        return getattr(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # One attribute alone would look like a state that is built.
        if not type(self)._shared_state:
            type(self)._build_if_inherited(name)
        super().__setattr__(name, value)

    @classmethod
    def _build_if_inherited(cls, name: str) -> None:
        """Build the state for who reads or sets ``name`` on an instance from another process; else it was reset."""
        if cls._shared_state or not cls._inherited:
            raise StateNotBuiltError(
                f"{cls.__name__} was reset, so it has no {name!r} now; build it again with {cls.__name__}()"
            )
        cls()

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) or NotImplemented

    def __hash__(self) -> int:
        return hash(type(self))

    def __copy__(self: _Self) -> _Self:
        return self

    def __deepcopy__(self: _Self, memo: dict[int, Any]) -> _Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _handle, (type(self), os.getpid())

    @classmethod
    def _is_built(cls) -> bool:
        return bool(cls._shared_state)

    @property
    def initialized(self) -> bool:
        """Whether the state is built. Builds nothing."""
        return self._is_built()

    @classmethod
    def _forget(cls) -> None:
        """Empty the state of a child that was forked: what it holds is its parent's."""
        cls._shared_state.clear()
        cls._inherited = True


def _handle(cls: type[SharedState], born: int) -> SharedState:
    """An instance that arrived by pickle."""
    if born != os.getpid() and not cls._shared_state:
        cls._inherited = True
    return cls.__new__(cls)

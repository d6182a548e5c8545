"""What a rank can do with knowing who it is: run on some ranks only, go first, split, wait, print.

A mixin, because the same methods are wanted on more than one singleton. It needs the attributes below and nothing else,
and reads them when a method runs, never when a function is decorated: a cell that was decorated in the kernel and runs
in a rank must ask the rank.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar, overload

import torch

from nbstate.errors import ArgumentTypeError
from nbstate.state.devices import DEVICE_KINDS
from nbstate.state.environment import LaunchEnvironment
from nbstate.state.group import destroy_group, grouped
from nbstate.state.kinds import DistributedType
from nbstate.state.splitting import split
from nbstate.state.waiting import barrier, take_turn

__all__ = ["ProcessControl"]

P = ParamSpec("P")
R = TypeVar("R")


class ProcessControl:
    """Process control on top of ``process_index``, ``local_process_index``, ``num_processes`` and ``device``."""

    device: torch.device
    backend: str | None
    distributed_type: DistributedType
    num_processes: int
    process_index: int
    local_process_index: int
    environment: LaunchEnvironment

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.num_processes > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is process 0."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the process with the highest number."""
        return self.process_index == self.num_processes - 1

    def wait_for_everyone(self) -> None:
        """Wait until every process is here. Returns at once where there is only one.

        Raises
        ------
        MissingRankError
            If processes did not come within the time-out, or have gone. ``missing`` names them.
        """
        size = self.num_processes
        if size < 2:
            return
        device = self.device
        name = device.type
        if name == "xla":
            importlib.import_module("torch_xla.core.xla_model").rendezvous("nbstate.wait_for_everyone")
            return
        kind = DEVICE_KINDS.get(name)
        bound = kind is not None and kind.binds_device and self.backend == kind.backend
        barrier(self.process_index, size, device.index if bound else None)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This process's part of ``inputs``, contiguous and of the same type.

        Parameters
        ----------
        inputs : sequence, tensor, array, pandas object, datasets.Dataset, or dict of these
            What every process has whole. A dict is split value by value.
        apply_padding : bool
            Whether short parts are filled with the last item, so that all have one length.

        Examples
        --------
        >>> from nbstate.state import PartialState
        >>> with PartialState().split_between_processes(["A", "B", "C"]) as part:
        ...     part
        ['A', 'B', 'C']
        """
        yield split(inputs, self.num_processes, self.process_index, apply_padding)

    def main_process_first(self) -> AbstractContextManager[None]:
        """A ``with`` body that process 0 runs first and the others after it.

        If process 0's body raises, the others do not run theirs: they raise ``MainProcessFailedError``.
        """
        return self._first(self.is_main_process, "all", "main_process_first")

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """As ``main_process_first``, on each machine by itself."""
        return self._first(self.is_local_main_process, f"{self.environment.machine}", "local_main_process_first")

    @contextmanager
    def _first(self, goes_first: bool, who: str, name: str) -> Iterator[None]:
        if not self.use_distributed:
            yield
            return
        with take_turn(self.process_index, goes_first, who, name):
            yield

    @overload
    def on_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]: ...
    @overload
    def on_main_process(self) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...
    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorator: run in process 0 only; None elsewhere.

        With and without parentheses, on functions, coroutine functions and methods of any kind. The process is looked
        up at each call.
        """
        return self._only(function, lambda: self.is_main_process)

    @overload
    def on_local_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]: ...
    @overload
    def on_local_main_process(self) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...
    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorator: run in the first process of each machine only; None elsewhere."""
        return self._only(function, lambda: self.is_local_main_process)

    @overload
    def on_last_process(self, function: Callable[P, R]) -> Callable[P, R | None]: ...
    @overload
    def on_last_process(self) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...
    def on_last_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorator: run in the last process only; None elsewhere."""
        return self._only(function, lambda: self.is_last_process)

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """Decorator: run in one process only; None elsewhere. Alone, it always runs.

        Parameters
        ----------
        function : callable, optional
            Left out in ``@state.on_process(process_index=2)``.
        process_index : int
            Which process.
        """
        index = _checked(process_index, "on_process", "process_index")
        return self._only(function, lambda: self.process_index == index)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """Decorator: run in one process of each machine only; None elsewhere. Alone, it always runs.

        Parameters
        ----------
        function : callable, optional
            Left out in ``@state.on_local_process(local_process_index=2)``.
        local_process_index : int
            Which process of each machine.
        """
        index = _checked(local_process_index, "on_local_process", "local_process_index")
        return self._only(function, lambda: self.local_process_index == index)

    def _only(self, function: Callable[..., Any] | None, chosen: Callable[[], bool]) -> Any:
        def runs_here() -> bool:
            return not self.use_distributed or chosen()

        def decorate(function: Any) -> Any:
            # Both hold the function that is to be decorated, and stand above @classmethod as well as below.
            if isinstance(function, classmethod | staticmethod):
                return type(function)(decorate(function.__func__))
            if not callable(function):
                raise ArgumentTypeError(f"only a function can be decorated, not {function!r}")
            return _run_if(runs_here, function)

        return decorate if function is None else decorate(function)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` in the first process of each machine only."""
        if self.is_local_main_process:
            builtins.print(*args, **kwargs)

    def set_device(self) -> None:
        """Make ``device`` the current one of its module (``torch.cuda.set_device``). Nothing to do on a CPU."""
        kind = DEVICE_KINDS.get(self.device.type)
        if kind is not None:
            kind.use(self.device)

    def destroy_process_group(self, group: Any = None) -> None:
        """Destroy a process group, if there is one.

        Parameters
        ----------
        group : ProcessGroup, optional
            Default: the whole world's, and with it every other.
        """
        if group is None:
            destroy_group()
        elif grouped():
            torch.distributed.destroy_process_group(group)


def _run_if(runs_here: Callable[[], bool], function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that asks at each call whether to run; None if not. One that is awaited is awaited in any case."""
    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def await_if_chosen(*args: Any, **kwargs: Any) -> Any:
            return await function(*args, **kwargs) if runs_here() else None

        return await_if_chosen

    @wraps(function)
    def run_if_chosen(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if runs_here() else None

    return run_if_chosen


def _checked(index: int | None, decorator: str, argument: str) -> int:
    if not isinstance(index, int) or isinstance(index, bool):
        raise ArgumentTypeError(f"{decorator} needs a number, as in {decorator}({argument}=2), not {index!r}")
    return index

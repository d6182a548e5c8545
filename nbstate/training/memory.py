"""Memory: giving it back, and finding the batch size that fits."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable
from typing import Any, Final, TypeVar, overload

import torch

from nbstate.errors import ArgumentTypeError, ArgumentValueError
from nbstate.state import pick_device_kind

__all__ = ["clear_device_cache", "find_executable_batch_size", "is_out_of_memory", "release_memory"]

Result = TypeVar("Result")

# How allocators that raise a plain RuntimeError say it, in lower case.
_COMPLAINTS: Final = (
    "out of memory",  # cuda, hip, xpu, npu, and mps as "MPS backend out of memory"
    "can't allocate memory",  # the CPU's allocator on Linux and macOS
    "not enough memory",  # the CPU's allocator on Windows
    "cudnn error: cudnn_status_not_supported",  # cuDNN found no algorithm that fits into what is left
    "cublas_status_alloc_failed",
    "failed to allocate",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory, the device's or the CPU's, did not suffice.

    Examples
    --------
    >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shapes differ"))
    (True, False)
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(part in str(error).lower() for part in _COMPLAINTS)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give the device memory that torch keeps for later back to the system.

    Parameters
    ----------
    garbage_collection : bool
        Collect Python's garbage first, so that tensors which only it holds are freed too.
    """
    if garbage_collection:
        gc.collect()
    module = getattr(torch, pick_device_kind().name, None)
    empty = getattr(module, "empty_cache", None)
    # On a device that was never used this would make its context, which is memory taken, not given.
    if empty is not None and getattr(module, "is_initialized", lambda: True)():
        empty()


def release_memory(*objects: Any) -> list[None]:
    """Give back what the caller is about to drop.

    Parameters
    ----------
    *objects
        What is to go. The caller's own names hold on to it until they are set to what is returned.

    Returns
    -------
    list of None
        One for each object: ``model, optimizer = release_memory(model, optimizer)``.
    """
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


@overload
def find_executable_batch_size(
    function: Callable[..., Result],
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[..., Result]: ...
@overload
def find_executable_batch_size(
    function: None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[[Callable[..., Result]], Callable[..., Result]]: ...
def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Decorator: call a function with ever smaller batch sizes until memory suffices.

    Parameters
    ----------
    function : callable
        Its first parameter is ``batch_size``, which callers leave out. It must build what it trains anew on each call.
    starting_batch_size : int
        What to try first.
    reduce_batch_size_fn : callable, optional
        Called without arguments after each failure; returns what to try next. By default the size is halved.

    Returns
    -------
    callable
        The function without its first parameter. It starts at ``starting_batch_size`` at each call.

    Raises
    ------
    ArgumentTypeError
        The function has no first parameter ``batch_size``.
    RuntimeError
        At call: not even the smallest size fitted.

    Notes
    -----
    Each rank decides by its own memory. In several ranks of unequal memory, or where collectives are under way when
    one of them runs out, find the size in one rank first.

    Examples
    --------
    >>> @find_executable_batch_size(starting_batch_size=64)
    ... def train(batch_size, rate):
    ...     if batch_size > 20:
    ...         raise MemoryError
    ...     return batch_size, rate
    >>> train(0.1)
    (16, 0.1)
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    if starting_batch_size < 1:
        raise ArgumentValueError(f"starting_batch_size is at least 1, not {starting_batch_size}.")
    called = getattr(function, "__name__", repr(function))
    names = list(inspect.signature(function).parameters)
    if names[:1] != ["batch_size"]:
        raise ArgumentTypeError(
            f"find_executable_batch_size calls {called} with the batch size first, so its first parameter must be "
            f"batch_size; it has ({', '.join(names)})."
        )

    @functools.wraps(function)
    def with_a_size_that_fits(*args: Any, **kwargs: Any) -> Any:
        if "batch_size" in kwargs:
            raise ArgumentTypeError(f"{called} gets its batch_size from find_executable_batch_size; leave it out.")
        clear_device_cache(garbage_collection=True)
        batch_size = starting_batch_size
        while batch_size > 0:
            try:
                return function(batch_size, *args, **kwargs)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            # The error, and with it the frames that hold the tensors, is gone only outside the except block.
            clear_device_cache(garbage_collection=True)
            batch_size = batch_size // 2 if reduce_batch_size_fn is None else int(reduce_batch_size_fn())
        raise RuntimeError(f"{called}: no batch size fits into memory, from {starting_batch_size} down.")

    # What tools and people see is what callers may pass.
    signature = inspect.signature(function)
    with_a_size_that_fits.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=list(signature.parameters.values())[1:]
    )
    return with_a_size_that_fits

"""Functions, arguments and results by value, and the name of what cannot travel.

multiprocessing's own pickling leaves the globals of a notebook's functions behind (NameError in the child), so a
launch ships cloudpickle bytes and unpacks them in an importable module.

Two details make a class of the notebook stay one class:

* In the rank, what came from the notebook's ``__main__`` is put into a fresh ``__main__``, so that plain pickle (a
  ``DataLoader`` worker, ``all_gather_object``) finds it by name.
* On the way back, such a class goes by name. cloudpickle would send it by value and, on arrival, overwrite the
  attributes of the notebook's own class with copies that no longer see the notebook's globals.

Big tensors and arrays take another way, see ``tensors``. What else is large travels in the pickle. It is written once,
too, but each rank makes objects of its own out of it, so from 64 MB on the launch says what it is.
"""

from __future__ import annotations

import io
import linecache
import marshal
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import cloudpickle

from nbstate.errors import ShippingError
from nbstate.launch.plan import Payload
from nbstate.launch.tensors import BIG, lay_out, map_places, raw_bytes, reduce_storage

__all__ = ["LARGE_PAYLOAD", "Payload", "pack", "pack_result", "unpack", "unpack_result"]

LARGE_PAYLOAD: Final = 64 * 1024 * 1024
_DEEP_ENOUGH: Final = 3


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]
    """Sends code as it is, and remembers from which files it came.

    cloudpickle calls every file ``<dynamic-code>``, so that equal functions give equal bytes. Here kernel and rank run
    the same Python, and a traceback without the notebook's lines would be worth little.
    """

    def __init__(self, file: io.BytesIO | _Scales) -> None:
        self.files: set[str] = set()
        self.blocks: list[memoryview] = []
        # Not a method of this object: in a circle with itself it would keep all that it has seen.
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=partial(_keep_out, self.blocks))

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, CodeType):
            self.files.add(obj.co_filename)
            return marshal.loads, (marshal.dumps(obj),)
        reduced = reduce_storage(obj)
        return super().reducer_override(obj) if reduced is NotImplemented else reduced


def _keep_out(blocks: list[memoryview], buffer: pickle.PickleBuffer) -> bool:
    """Set a buffer aside if it is large. Returns whether it stays in the pickle."""
    raw = raw_bytes(buffer)
    if raw is None:
        return True
    blocks.append(raw)
    return False


class _Scales:
    """A file that keeps nothing but the number of bytes written."""

    def __init__(self) -> None:
        self.nbytes = 0

    def write(self, data: Any) -> int:
        self.nbytes += len(data)
        return len(data)


def pack(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Payload:
    """Turn a call into bytes, and what is big in it into shared memory, which ``Payload.close`` gives back.

    Raises
    ------
    ShippingError
        Something in it cannot travel; the text names the global, the argument or the captured variable.
    """
    buffer = io.BytesIO()
    packer = _Packer(buffer)
    try:
        packer.dump((function, args, dict(kwargs)))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's __reduce__ may raise anything, SystemExit too
        culprit = _find_culprit(function, args, kwargs)
        raise ShippingError(
            f"{culprit} cannot travel to the ranks: {type(error).__name__}: {error}. "
            "Build it inside the function, or pass what it is built from."
        ) from error
    sources = {name: "".join(linecache.getlines(name)) for name in packer.files if _only_in_memory(name)}
    return _payload(
        buffer.getvalue(),
        packer.blocks,
        {name: text for name, text in sources.items() if text},
        lambda: _heaviest(function, args, kwargs),
    )


def _payload(data: bytes, blocks: list[memoryview], sources: Mapping[str, str], heaviest: Callable[[], str]) -> Payload:
    warning = ""
    if len(data) > LARGE_PAYLOAD:
        warning = (
            f"besides big tensors the call carries {_megabytes(len(data))}, of which every rank makes a copy of its "
            f"own; the most is in {heaviest()}"
        )
    if len(data) >= BIG:
        blocks, data = [memoryview(data), *blocks], b""
    if not blocks:
        return Payload(data, sources)
    try:
        shared, places = lay_out(blocks)
    except OSError as error:
        size = _megabytes(sum(block.nbytes for block in blocks))
        raise ShippingError(
            f"the call, with tensors and arrays {size}, cannot travel to the ranks: there is no shared memory for it: "
            f"{error}"
        ) from error
    return Payload(data, sources, shared, places, warning)


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f} MB"


def _only_in_memory(filename: str) -> bool:
    entry = linecache.cache.get(filename)
    return entry is not None and len(entry) == 4 and entry[1] is None


def unpack(payload: Payload) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Undo ``pack``, in a rank, once. Whatever the unpickling raises comes through."""
    install_sources(payload.sources)
    blocks: list[memoryview] = []
    if payload.shared is not None:
        blocks = map_places(payload.shared.fd, payload.places)
        os.close(payload.shared.fd)
    data = payload.data or blocks.pop(0)
    function, args, kwargs = pickle.loads(data, buffers=blocks)
    install_main(function)
    return function, args, kwargs


def install_sources(sources: Mapping[str, str]) -> None:
    """Let ``linecache`` know the source of cells. The size None keeps ``checkcache`` from dropping them."""
    for name, text in sources.items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)


def install_main(function: Any) -> None:
    """Make a fresh ``__main__`` that holds what came along with a notebook's function."""
    inner = getattr(function, "__func__", function)
    inner = getattr(inner, "func", inner)
    if not isinstance(inner, FunctionType) or inner.__module__ != "__main__":
        return
    main = ModuleType("__main__")
    main.__dict__.update({k: v for k, v in inner.__globals__.items() if k not in main.__dict__})
    main.__dict__.setdefault(inner.__name__, inner)
    sys.modules["__main__"] = main


class _ResultPacker(cloudpickle.Pickler):  # type: ignore[misc]
    """Sends classes of the notebook's ``__main__`` by name, with a copy by value for one that the kernel has not."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) and obj.__module__ == "__main__" and "<locals>" not in obj.__qualname__:
            buffer = io.BytesIO()
            cloudpickle.Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(obj)
            return _notebook_class, (obj.__qualname__, buffer.getvalue())
        return super().reducer_override(obj)


def _notebook_class(qualname: str, by_value: bytes) -> Any:
    found: Any = sys.modules.get("__main__")
    for name in qualname.split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, type) else pickle.loads(by_value)


def pack_result(result: Any) -> bytes:
    """Turn a result into bytes, in a rank. Whatever the pickling raises comes through."""
    buffer = io.BytesIO()
    _ResultPacker(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(result)
    return buffer.getvalue()


def unpack_result(data: bytes) -> Any:
    """Undo ``pack_result``, in the kernel."""
    return pickle.loads(data)


def can_travel(obj: Any) -> bool:
    """Whether an object can be pickled by value, tried for real."""
    return _weigh(obj) is not None


def _weigh(obj: Any) -> int | None:
    """The bytes that an object takes in a pickle, big tensors and arrays left out; None if it cannot be pickled."""
    scales = _Scales()
    try:
        _Packer(scales).dump(obj)
    except KeyboardInterrupt:
        raise
    except BaseException:
        return None
    return scales.nbytes


def _find_culprit(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Name the smallest thing that cannot travel: an argument, or a global or captured variable, however deep."""
    for shown, value in _arguments(args, kwargs):
        if not can_travel(value):
            return f"{shown} ({type(value).__name__})"
    return _find_in_function(function, _DEEP_ENOUGH) or _whole(function)


def _find_in_function(function: Any, depth: int) -> str | None:
    for shown, value in _reached(function):
        if value is function or can_travel(value):
            continue
        deeper = _find_in_function(value, depth - 1) if depth > 0 else None
        return deeper or f"{shown} ({type(value).__name__})"
    return None


def _heaviest(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Name what takes most of a call's pickle: the smallest thing that still takes more than half of it."""
    shown, nbytes = _whole(function), 0
    value: Any = function
    reached = [*_arguments(args, kwargs), *_reached(function)]
    seen = {id(function)}
    for _ in range(_DEEP_ENOUGH):
        weighed = [(_weigh(one) or 0, name, one) for name, one in reached if id(one) not in seen]
        heaviest = max(weighed, key=lambda entry: entry[0], default=(0, "", None))
        if heaviest[0] <= nbytes // 2:
            break
        nbytes, shown, value = heaviest
        seen.add(id(value))
        reached = list(_reached(value))
    return f"{shown} ({type(value).__name__}, {_megabytes(nbytes or _weigh(value) or 0)})"


def _whole(function: Any) -> str:
    return f"the function {getattr(function, '__name__', function)!r}"


def _arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for index, value in enumerate(args):
        yield f"args[{index}]", value
    for name, value in kwargs.items():
        yield f"kwargs[{name!r}]", value


def _reached(function: Any) -> Iterator[tuple[str, Any]]:
    """What a function uses and would take along: its globals and captured variables, and what was bound to it."""
    while True:
        if isinstance(function, partial):
            yield from (
                (f"{shown} of the partial", value) for shown, value in _arguments(function.args, function.keywords)
            )
            function = function.func
        elif isinstance(function, MethodType):
            yield f"the object that {function.__name__}() is bound to", function.__self__
            function = function.__func__
        else:
            break
    if not isinstance(function, FunctionType):
        return
    name = function.__name__
    for key in sorted(_names_used(function.__code__)):
        if key in function.__globals__:
            yield f"the global {key!r} that {name}() uses", function.__globals__[key]
    for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f"the variable {key!r} that {name}() captured", cell.cell_contents
        except ValueError:  # an empty cell
            continue


def _names_used(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, CodeType):
            names |= _names_used(const)
    return names

"""Functions, arguments and results by value, and the name of what cannot travel.

multiprocessing's own pickling leaves the globals of a notebook's functions behind (NameError in the child), so a
launch ships cloudpickle bytes and unpacks them in an importable module.

Two details make a class of the notebook stay one class:

* In the rank, what came from the notebook's ``__main__`` is put into a fresh ``__main__``, so that plain pickle (a
  ``DataLoader`` worker, ``all_gather_object``) finds it by name.
* On the way back, such a class goes by name. cloudpickle would send it by value and, on arrival, overwrite the
  attributes of the notebook's own class with copies that no longer see the notebook's globals.
"""

from __future__ import annotations

import io
import linecache
import marshal
import pickle
import sys
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

import cloudpickle

from nbstate.errors import ShippingError
from nbstate.launch.plan import Payload

__all__ = ["LARGE_PAYLOAD", "Payload", "pack", "pack_result", "unpack", "unpack_result"]

LARGE_PAYLOAD: Final = 64 * 1024 * 1024
_DEEP_ENOUGH: Final = 3


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]
    """Sends code as it is, and remembers from which files it came.

    cloudpickle calls every file ``<dynamic-code>``, so that equal functions give equal bytes. Here kernel and rank run
    the same Python, and a traceback without the notebook's lines would be worth little.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.files: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, CodeType):
            self.files.add(obj.co_filename)
            return marshal.loads, (marshal.dumps(obj),)
        return super().reducer_override(obj)


def pack(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Payload:
    """Turn a call into bytes.

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
    return Payload(buffer.getvalue(), {name: text for name, text in sources.items() if text})


def _only_in_memory(filename: str) -> bool:
    entry = linecache.cache.get(filename)
    return entry is not None and len(entry) == 4 and entry[1] is None


def unpack(payload: Payload) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Undo ``pack``, in a rank. Whatever the unpickling raises comes through."""
    install_sources(payload.sources)
    function, args, kwargs = pickle.loads(payload.data)
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
    try:
        cloudpickle.dumps(obj)
    except KeyboardInterrupt:
        raise
    except BaseException:
        return False
    return True


def _find_culprit(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Name the smallest thing that cannot travel: an argument, or a global or captured variable, however deep."""
    for index, value in enumerate(args):
        if not can_travel(value):
            return f"args[{index}] ({type(value).__name__})"
    for name, value in kwargs.items():
        if not can_travel(value):
            return f"kwargs[{name!r}] ({type(value).__name__})"
    return _find_in_function(function, _DEEP_ENOUGH) or f"the function {getattr(function, '__name__', function)!r}"


def _find_in_function(function: Any, depth: int) -> str | None:
    while hasattr(function, "func") or hasattr(function, "__func__"):
        function = getattr(function, "func", None) or function.__func__
    if not isinstance(function, FunctionType):
        return None
    name = function.__name__
    used = _names_used(function.__code__)
    reached: list[tuple[str, Any]] = [
        (f"the global {key!r} that {name}() uses", function.__globals__[key])
        for key in sorted(used)
        if key in function.__globals__
    ]
    for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            reached.append((f"the variable {key!r} that {name}() captured", cell.cell_contents))
        except ValueError:  # an empty cell
            continue
    for shown, value in reached:
        if value is function or can_travel(value):
            continue
        deeper = _find_in_function(value, depth - 1) if depth > 0 else None
        return deeper or f"{shown} ({type(value).__name__})"
    return None


def _names_used(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, CodeType):
            names |= _names_used(const)
    return names

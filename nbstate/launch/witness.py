"""Which cell, or which import, made this kernel one that must not fork?

The problem: a device that was touched once spoils every later fork, and the notebook does not show who touched it:
often a library, at import, several imports below the one in the cell.

What does not work: to compare ``sys.modules`` before and after a cell (one import brings a hundred modules), or to wrap
loaders (every traceback of a failing import would show our frame).

What does: to look whether a device is in use, which takes 2 microseconds, at the moments between which code has one
owner. Those are the start and the end of a cell, which IPython announces, and the start and the end of a module's
execution. The import system marks the latter on the module's spec (``_initializing``), so for that time the spec gets a
class whose attribute can be watched; afterwards it is an ordinary spec again, and nothing stands in any traceback. The
first moment that sees a device in use blames whoever owned the time since the moment before.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

import torch

from nbstate.launch.notebook import current_cell
from nbstate.state import DEVICE_KINDS

__all__ = ["Origin", "kinds_in_use", "origin", "started_in", "unwatch", "watch", "watching"]


@dataclass(frozen=True)
class Origin:
    """Who touched a device first.

    Attributes
    ----------
    cell : str
        ``"In[5]"``; empty if no cell was running.
    module : str
        The module whose import did it; empty if the cell's own code did.
    through : str
        The outermost import under way, if that is another module: what the cell's ``import`` says.
    after : str
        For what happened while no cell ran: the cell before it, or what else is known of the time.
    """

    cell: str = ""
    module: str = ""
    through: str = ""
    after: str = ""

    def __str__(self) -> str:
        if not self.module:
            return f"in {self.cell}" if self.cell else self.after
        through = f", through {self.through}" if self.through else ""
        return f"by the import of {self.module}{through}" + (f" in {self.cell}" if self.cell else "")


def kinds_in_use() -> tuple[str, ...]:
    """Kinds of accelerator that this process has initialised, as far as torch knows. To ask initialises nothing."""
    return tuple(name for name in _ACCELERATORS if _in_use(name))


_ACCELERATORS: Final = tuple(name for name, kind in DEVICE_KINDS.items() if not kind.shareable)


def _in_use(name: str) -> bool:
    if name == "xla":
        module, question = sys.modules.get("torch_xla._XLAC"), "_xla_runtime_is_initialized"
    else:
        # not getattr: for a kind that torch lacks, torch's own __getattr__ takes longer than all the rest
        module, question = vars(torch).get(name), "is_initialized"
    if module is None:
        return False
    try:
        return bool(getattr(module, question)())
    except Exception:  # a kind that cannot be asked (mps), or a plugin that fails: an import must not fail for it
        return False


class _Witness:
    """Looks at the moments that matter, and remembers."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._clean = list(_ACCELERATORS)
        self._importing = threading.local()
        self._last_cell = ""
        self.origins: dict[str, Origin] = {}
        self.threads: weakref.WeakKeyDictionary[threading.Thread, str] = weakref.WeakKeyDictionary()
        self._finder = _Finder()

    def start(self) -> None:
        here = current_cell()
        self._look(Origin(after=f"before nbstate's extension was loaded{f' in {here}' if here else ''}"))
        self.threads.update(dict.fromkeys(threading.enumerate(), ""))
        self._shell.events.register("pre_run_cell", self._cell_begins)
        self._shell.events.register("post_run_cell", self._cell_ended)
        sys.meta_path.insert(0, self._finder)

    def stop(self) -> None:
        for event, callback in (("pre_run_cell", self._cell_begins), ("post_run_cell", self._cell_ended)):
            with contextlib.suppress(ValueError):
                self._shell.events.unregister(event, callback)
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self._finder)

    def _look(self, blamed: Origin) -> None:
        used = [name for name in self._clean if _in_use(name)]
        for name in used:
            self._clean.remove(name)
            self.origins[name] = blamed

    def _cell_begins(self, info: Any) -> None:
        self._look(Origin(after=f"between two cells, after {self._last_cell or 'the extension was loaded'}"))
        self._note_threads("")

    def _cell_ended(self, result: Any) -> None:
        number = result.execution_count
        self._last_cell = "a cell without a number" if number is None else f"In[{number}]"
        self._look(Origin(cell=self._last_cell))
        self._note_threads(self._last_cell)

    def _note_threads(self, cell: str) -> None:
        for thread in threading.enumerate():
            self.threads.setdefault(thread, cell)

    def module_begins(self, name: str) -> None:
        modules = self._modules()
        self._blame_import(modules)
        modules.append(name)

    def module_ended(self, name: str) -> None:
        modules = self._modules()
        self._blame_import(modules)
        if name in modules:
            del modules[modules.index(name) :]

    def _modules(self) -> list[str]:
        """Modules whose code is under way on this thread, outermost first."""
        try:
            return self._importing.names  # type: ignore[no-any-return]
        except AttributeError:
            self._importing.names = []
            return self._importing.names  # type: ignore[no-any-return]

    def _blame_import(self, modules: Sequence[str]) -> None:
        if not any(_in_use(name) for name in self._clean):
            return
        cell = current_cell()
        if modules:
            through = modules[0] if modules[0] != modules[-1] else ""
            self._look(Origin(cell, modules[-1], through))
        elif cell:
            self._look(Origin(cell))


class _WatchedSpec(ModuleSpec):
    """A module's spec while the module is being executed."""

    @property
    def _initializing(self) -> bool:
        return bool(self.__dict__.get("_initializing"))

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        self.__dict__["_initializing"] = value
        if not value:
            self.__class__ = ModuleSpec  # type: ignore[assignment]
        witness = _the_witness
        if witness is not None:
            with contextlib.suppress(Exception):  # whatever goes wrong here, the user's import must not fail
                (witness.module_begins if value else witness.module_ended)(self.name)


class _Finder:
    """Lets the finders behind it find a module, and has its spec watched."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        for finder in self._behind():
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(name, path, target)
            if spec is not None:
                if type(spec) is ModuleSpec:
                    spec.__class__ = _WatchedSpec
                return spec
        return None

    def _behind(self) -> Iterator[Any]:
        finders = list(sys.meta_path)
        return iter(finders[finders.index(self) + 1 :] if self in finders else ())


_the_witness: _Witness | None = None


def watch(shell: Any) -> None:
    """Begin to watch the cells and imports of an IPython shell. Again: nothing more happens."""
    global _the_witness
    if _the_witness is None:
        _the_witness = _Witness(shell)
        _the_witness.start()


def unwatch() -> None:
    """Stop watching, and forget what was seen."""
    global _the_witness
    if _the_witness is not None:
        _the_witness.stop()
        _the_witness = None


def watching() -> bool:
    """Whether cells and imports are watched, which the extension sees to."""
    return _the_witness is not None


def origin(kind: str) -> Origin | None:
    """Who touched a kind of device first, or None if that is not known."""
    return None if _the_witness is None else _the_witness.origins.get(kind)


def started_in(thread: threading.Thread) -> str:
    """The cell during which a thread was started: ``"In[5]"``, or empty if that is not known."""
    return "" if _the_witness is None else _the_witness.threads.get(thread, "")

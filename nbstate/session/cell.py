"""A cell's body as a function that can be launched.

What the body must find in a rank is what it would find in the notebook: its own names, those of earlier cells, and
functions of earlier cells that see both. To run it over a dictionary of copied names is not enough: a function of an
earlier cell would look into a dictionary of its own, where what the body assigns never arrives.

So the body travels inside one small function over the notebook's own namespace. The names it needs are that function's
globals, cloudpickle rebuilds one dictionary for it and for every function that comes along, and the body runs in that
one.

The function's code bears the cell's file and its first line, so a traceback begins at the magic, as in any cell.
"""

from __future__ import annotations
import __future__

import ast
import dis
import sys
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

__all__ = ["cell_function", "enter_namespace", "names_needed"]

# {names} is never run: it makes them globals of the function, so that they come along.
_TEMPLATE: Final = """
def cell(body, last):
    from nbstate.session.cell import enter_namespace
    enter_namespace(globals(), lambda: ({names}))
    exec(body, globals())
    return None if last is None else eval(last, globals())
"""
_READS: Final = frozenset(
    {"LOAD_NAME", "LOAD_GLOBAL", "DELETE_NAME", "DELETE_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS", "LOAD_CLASSDEREF"}
)
_OF_THE_MODULE: Final = frozenset({"__annotations__", "__builtins__", "__name__"})  # every namespace has its own
# Statements after which the names that they bind are bound for sure.
_BINDS: Final = (
    ast.Assign,
    ast.AnnAssign,
    ast.Import,
    ast.ImportFrom,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
)


def cell_function(
    source: str, filename: str, namespace: dict[str, Any], hidden: Mapping[str, Any], flags: int = 0
) -> tuple[Callable[..., Any], tuple[CodeType, CodeType | None]]:
    """Make a function, and its arguments, that runs a cell's body and returns the value of its last expression.

    Parameters
    ----------
    source : str
        The cell as plain Python, after a first line that stands for the magic.
    filename : str
        What tracebacks call it.
    namespace : dict of str to object
        The notebook's names.
    hidden : mapping of str to object
        Those of them that are IPython's own and stay behind.
    flags : int
        Compiler flags of the notebook, for a ``from __future__ import annotations`` in an earlier cell.

    Returns
    -------
    tuple of (function, tuple)
        For a rank to call as ``function(*args)``. That replaces the ``__main__`` of its process.

    Raises
    ------
    SyntaxError
        The body is not Python.
    """
    first_line, _, rest = source.partition("\n")
    tree = ast.parse("\n" + rest, filename)
    needed = sorted(
        name
        for name in names_needed(tree, filename)
        if name in namespace and not (name in hidden and hidden[name] is namespace[name])
    )
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    # Without dont_inherit the cell would be compiled with the __future__ imports of this file.
    flags &= __future__.annotations.compiler_flag
    body = compile(tree, filename, "exec", flags, dont_inherit=True)
    value = None
    if isinstance(last, ast.Expr):
        value = compile(ast.Expression(last.value), filename, "eval", flags, dont_inherit=True)
    return _carrier(needed, filename, first_line, namespace), (body, value)


def names_needed(tree: ast.Module, filename: str = "<cell>") -> set[str]:
    r"""Names that a cell's body reads before it has surely given them a value itself.

    Examples
    --------
    >>> sorted(names_needed(ast.parse("import math\nx = y\nprint(x, math.pi)\ndef f(z): return z + w")))
    ['print', 'w', 'y']
    """
    needed: set[str] = set()
    bound: set[str] = set()
    for statement in tree.body:
        code = compile(ast.Module([statement], []), filename, "exec", dont_inherit=True)
        needed |= _reads(code) - bound
        if isinstance(statement, _BINDS):
            bound |= {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_NAME"}
    return needed - _OF_THE_MODULE


def _reads(code: CodeType) -> set[str]:
    names = {step.argval for step in dis.get_instructions(code) if step.opname in _READS}
    return names.union(*(_reads(const) for const in code.co_consts if isinstance(const, CodeType)))


def _carrier(names: list[str], filename: str, first_line: str, namespace: dict[str, Any]) -> Callable[..., Any]:
    tree = ast.parse(_TEMPLATE.format(names="".join(f"{name}, " for name in names)))
    for node in ast.walk(tree):
        if isinstance(node, (ast.expr, ast.stmt, ast.arg, ast.alias)):
            node.lineno = node.end_lineno = 1
            # A place as wide as the line: Python underlines no part of it.
            node.col_offset, node.end_col_offset = 0, len(first_line.encode())
    made: dict[str, Any] = {}
    exec(compile(tree, filename, "exec", dont_inherit=True), made)
    return FunctionType(made["cell"].__code__, namespace, "cell")


def enter_namespace(namespace: dict[str, Any], _: object = None) -> None:
    """Let ``__main__`` be a namespace, so that plain pickle finds by name what a cell in it defines."""
    main = sys.modules.get("__main__")
    if main is None or main.__dict__ is not namespace:
        sys.modules["__main__"] = _Main(namespace)


class _Main(ModuleType):
    """A ``__main__`` whose names are those of a dictionary that exists already."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        super().__init__("__main__")
        object.__setattr__(self, "_namespace", namespace)

    def __getattr__(self, name: str) -> Any:
        try:
            return object.__getattribute__(self, "_namespace")[name]
        except KeyError:
            raise AttributeError(f"module '__main__' has no attribute {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._namespace[name] = value

    def __delattr__(self, name: str) -> None:
        if name not in self._namespace:
            raise AttributeError(f"module '__main__' has no attribute {name!r}")
        del self._namespace[name]

    def __dir__(self) -> list[str]:
        return sorted(self._namespace)

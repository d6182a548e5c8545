"""A cell's body as a function: which names it needs, where it runs, what its tracebacks show."""

from __future__ import annotations
import __future__

import ast
import pickle
import sys
import traceback
from types import ModuleType

import pytest

from nbstate.launch.shipping import pack, unpack
from nbstate.session.cell import cell_function, enter_namespace, names_needed


@pytest.mark.parametrize(
    ("body", "needed"),
    [
        ("x", {"x"}),
        ("x = 1\nx", set()),
        ("x = x + 1", {"x"}),
        ("x += 1", {"x"}),
        ("del x", {"x"}),
        ("x = y = 1\nx + y + z", {"z"}),
        ("(a, b), c = q\na + b + c", {"q"}),
        ("x: int = 3\nx", {"int"}),
        ("import a.b, c as d\nfrom e import f\na + d + f + c + e", {"c", "e"}),
        ("if q:\n    x = 1\nx", {"q", "x"}),
        ("for i in q:\n    pass\ni", {"q", "i"}),
        ("try:\n    x = 1\nexcept E:\n    pass\nx", {"x", "E"}),
        ("def f(a, b=q):\n    c = a\n    return b + c + g\nf(1)", {"q", "g"}),
        ("def f():\n    global h\n    h = k\nf()", {"k"}),
        ("f = lambda a: a + w", {"w"}),
        ("class A(B):\n    y = 1\n    def m(self): return n\nA", {"B", "n"}),
        ("@dec\ndef f(): pass", {"dec"}),
        ("f'{x}'", {"x"}),
        ("def f():\n    def g():\n        return deep\n    return g", {"deep"}),
        ("", set()),
    ],
)
def test_names_that_a_body_needs(body: str, needed: set[str]) -> None:
    assert names_needed(ast.parse(body)) == needed


@pytest.mark.parametrize("body", ["[a for a in q]", "{a: b for a, b in q}", "sum(a for a in q)"])
def test_variables_of_a_comprehension_are_its_own(body: str) -> None:
    assert names_needed(ast.parse(body)) - {"sum"} == {"q"}


@pytest.fixture
def own_main(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A ``__main__`` that is put back afterwards."""
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    return main


def shipped(source: str, namespace: dict, hidden: dict | None = None, flags: int = 0) -> object:
    """Run a cell as a rank would: over what came by value."""
    namespace.setdefault("__name__", "__main__")
    function, args = cell_function(source, "<cell>", namespace, hidden or {}, flags)
    function, args, _ = unpack(pack(function, args, {}))
    return function(*args)


@pytest.mark.usefixtures("own_main")
def test_the_value_is_that_of_the_last_expression() -> None:
    assert shipped("%%launch\nx = 2\nx + 1", {}) == 3
    assert shipped("%%launch\nx = 2", {}) is None
    assert shipped("%%launch", {}) is None
    assert shipped("%%launch\n\n# nothing", {}) is None


@pytest.mark.usefixtures("own_main")
def test_functions_of_earlier_cells_see_what_the_body_assigns_and_the_notebook_does_not() -> None:
    namespace = {"__name__": "__main__"}
    exec("scale = 2\ndef times(x): return x * scale", namespace)
    assert shipped("%%launch\nscale = 10\ntimes(4)", namespace) == 40
    assert namespace["scale"] == 2


@pytest.mark.usefixtures("own_main")
def test_annotations_are_as_the_notebook_has_them() -> None:
    body = "%%launch\ndef f(x: int): pass\nf.__annotations__['x']"
    assert shipped(body, {}) is int
    assert shipped(body, {}, flags=__future__.annotations.compiler_flag) == "int"


@pytest.mark.usefixtures("own_main")
def test_names_of_ipython_stay_behind_unless_the_user_took_them() -> None:
    history = ["first"]
    with pytest.raises(NameError, match="'In'"):
        shipped("%%launch\nIn", {"In": history}, {"In": history})
    assert shipped("%%launch\nIn", {"In": 5}, {"In": history}) == 5


@pytest.mark.usefixtures("own_main")
def test_a_traceback_begins_at_the_magic_and_has_the_cells_lines() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        shipped("%%launch -n 2\n\nx = 0\n1 / x", {})
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(caught.tb)]
    assert places[-2:] == [("<cell>", 1), ("<cell>", 4)]


def test_what_is_not_python_is_said_with_its_line() -> None:
    with pytest.raises(SyntaxError) as caught:
        cell_function("%%launch\nx = 1\n1 +", "<cell>", {}, {})
    assert caught.value.lineno == 3


def test_main_is_the_namespace_and_stays_if_it_is_already(own_main: ModuleType) -> None:
    enter_namespace(own_main.__dict__)
    assert sys.modules["__main__"] is own_main
    namespace = {"x": 1}
    enter_namespace(namespace)
    import __main__

    assert __main__.x == 1
    namespace["y"] = 2
    assert __main__.y == 2
    __main__.z = 3
    assert namespace["z"] == 3
    del __main__.z
    assert "z" not in namespace
    assert dir(__main__) == ["x", "y"]
    for absent in (lambda: __main__.nothing, lambda: delattr(__main__, "nothing")):
        with pytest.raises(AttributeError, match="'__main__' has no attribute 'nothing'"):
            absent()


@pytest.mark.usefixtures("own_main")
def test_plain_pickle_finds_what_a_namespace_defines() -> None:
    namespace: dict = {"__name__": "__main__"}
    enter_namespace(namespace)
    exec("class A: pass\ndef f(): pass", namespace)
    assert type(pickle.loads(pickle.dumps(namespace["A"]()))) is namespace["A"]
    assert pickle.loads(pickle.dumps(namespace["f"])) is namespace["f"]

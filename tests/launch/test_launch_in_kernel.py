"""The whole path from a cell of a real Jupyter kernel."""

from __future__ import annotations

import os
import time
from pathlib import Path

from real_kernel import IT_HUNG, RealKernel

SETUP = """
import os, sys, time, functools
import torch
import nbstate
from nbstate import notebook_launcher, PartialState
"""


def test_the_error_shows_the_guilty_ranks_cell_and_line(kernel: RealKernel, start_method: str) -> None:
    """Case C03."""
    cell = kernel.good(
        "def train():\n"
        "    state = PartialState()\n"
        "    if state.process_index == 1:\n"
        "        time.sleep(0.3); raise ValueError('boom')\n"
        "    state.wait_for_everyone()\n"
    )
    reply = kernel.run(f"notebook_launcher(train, num_processes=2, start_method={start_method!r}, dashboard=False)")
    assert reply.error.startswith(f"RankError: rank 1 raised ValueError: boom (In[{cell.number}], line 4)")
    assert f"Cell In[{cell.number}], line 4, in train" in reply.traceback
    assert "raise ValueError('boom')" in reply.traceback
    assert f"rank 0 waited in barrier #1 at In[{cell.number}], line 5" in reply.traceback
    assert "launcher.py" not in reply.traceback
    assert reply.traceback.count("boom") == 3  # the headline, the line of source, the exception: told once each


CHAINED = """
def inner(x):
    return x["missing"]  # the guilty line

def train():
    rank = int(os.environ["RANK"])
    if rank == 1:
        try:
            inner({})
        except KeyError as error:
            raise ValueError("boom") from error
    nbstate.PartialState().wait_for_everyone()
"""


def test_the_notebook_shows_the_cells_source(kernel: RealKernel) -> None:
    number = kernel.good(CHAINED).number
    reply = kernel.run("nbstate.notebook_launcher(train, num_processes=2, dashboard=False)")
    text = reply.traceback
    assert text.startswith("RankError: rank 1 raised ValueError: boom")
    assert f"Cell In[{number}], line 2, in inner\n" in text
    assert '----> 2     return x["missing"]  # the guilty line\n' in text
    assert '---> 10             raise ValueError("boom") from error\n' in text
    assert "      1 def inner(x):\n" in text
    assert "direct cause" in text
    assert "ValueError: boom" in text
    assert "nbstate/" not in text
    assert "\nMeanwhile:\n  rank 0 " in text


NOTEBOOK_THINGS = """
factor = 3

def helper(x):
    return x * factor

def even(n):
    return True if n == 0 else odd(n - 1)

def odd(n):
    return False if n == 0 else even(n - 1)

class Outer:
    class Inner:
        value = 5

class Base(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

class Net(Base):
    def __init__(self):
        super().__init__()
        self.scale = factor

    def forward(self, x):
        return self.layer(x) * self.scale

def make(n):
    def inner(x):
        return x + n
    return inner

def work(add, net):
    import pickle
    inner = pickle.loads(pickle.dumps(Net()))       # plain pickle finds the notebook's class, too
    y = net(torch.ones(1, 2))
    return helper(2), even(10), Outer.Inner.value, add(1), tuple(y.shape), type(inner).__name__
"""


def test_whatever_a_notebook_defines_travels_by_value(kernel: RealKernel, start_method: str) -> None:
    """Cases C20 and C40."""
    kernel.good(NOTEBOOK_THINGS)
    launch = f"num_processes=2, start_method={start_method!r}, dashboard=False)"
    reply = kernel.good(f"notebook_launcher(work, (make(10), Net()), {launch}")
    assert reply.result == str([(6, True, 5, 11, (1, 2), "Net")] * 2)
    assert kernel.good(f"notebook_launcher(lambda x: x + factor, (1,), {launch}").result == "[4, 4]"
    assert kernel.good(f"notebook_launcher(functools.partial(helper, 5), {launch}").result == "[15, 15]"


def test_results_are_of_the_notebooks_own_class(kernel: RealKernel, start_method: str) -> None:
    """Case C10."""
    kernel.good(
        "unit = 'm'\n"
        "class Result:\n"
        "    def __init__(self, rank): self.rank = rank\n"
        "    def show(self): return f'{self.rank} {unit}'\n"
        "before = Result.show\n"
        "def f():\n"
        "    rank = int(os.environ['RANK'])\n"
        "    return {'rank': rank}, torch.full((2,), rank), Result(rank)\n"
    )
    kernel.good(f"results = notebook_launcher(f, num_processes=2, start_method={start_method!r}, dashboard=False)")
    assert kernel.good("[r[0]['rank'] for r in results], [r[1].tolist() for r in results]").result == (
        "([0, 1], [[0, 0], [1, 1]])"
    )
    assert kernel.good("all(type(r[2]) is Result for r in results), Result.show is before").result == "(True, True)"
    assert kernel.good("unit = 'km'\n[r[2].show() for r in results]").result == "['0 km', '1 km']"


def test_settings_of_one_launch_do_not_stay_for_the_next(kernel: RealKernel) -> None:
    """Cases C01 and C22."""
    kernel.good("x = torch.randn(300, 300, requires_grad=True); (x @ x).sum().backward()")
    kernel.good(
        "def f():\n"
        "    x = torch.randn(300, 300, requires_grad=True); (x @ x).sum().backward()\n"
        "    return nbstate.AcceleratorState().mixed_precision, PartialState().num_processes\n"
    )
    for method in ("auto", "fork"):
        first = kernel.good(
            f"notebook_launcher(f, (), 2, 'bf16', start_method={method!r}, dashboard=False, timeout=60)"
        )
        second = kernel.good(f"notebook_launcher(f, (), 3, 'no', start_method={method!r}, dashboard=False, timeout=60)")
        assert first.result == "[('bf16', 2), ('bf16', 2)]"
        assert second.result == "[('no', 3), ('no', 3), ('no', 3)]"


def test_ranks_see_the_kernels_directory_path_environment_and_files_as_they_are_now(
    own_kernel: RealKernel, tmp_path: Path
) -> None:
    """Case C41."""
    own_kernel.good(SETUP + "nbstate.load_ipython_extension(get_ipython())")
    own_kernel.good("notebook_launcher(lambda: None, num_processes=2, dashboard=False)")  # the helper is warm now
    (tmp_path / "local_module.py").write_text("value = 1\n")
    own_kernel.good(
        f"os.chdir({str(tmp_path)!r}); sys.path.insert(0, {str(tmp_path)!r}); os.environ['SET_LATER'] = 'yes'\n"
        "os.environ.pop('HOME', None)\n"
        "def f():\n"
        "    import local_module\n"
        "    return os.getcwd(), os.environ.get('SET_LATER'), 'HOME' in os.environ, local_module.value\n"
        "def launch(method): return notebook_launcher(f, num_processes=1, start_method=method, dashboard=False)\n"
    )
    # a fork has what the kernel has imported, so the kernel imports it only after that
    for method, value in (("auto", 1), ("fork", 22), ("spawn", 333), ("auto", 4444)):
        (tmp_path / "local_module.py").write_text(f"value = {value}\n")
        shown = own_kernel.good(f"print(launch({method!r}))").stdout
        assert shown == f"{[(str(tmp_path), 'yes', False, value)]}\n"
        if method == "fork":
            own_kernel.good("import local_module")


def test_output_of_a_launch_that_was_not_waited_for_goes_to_its_own_cell(kernel: RealKernel, start_method: str) -> None:
    """Case C19."""
    kernel.good(
        "def f(path):\n    while not os.path.exists(path): time.sleep(0.01)\n    print('after the next cell')\n"
    )
    kernel.good("import tempfile; path = os.path.join(tempfile.mkdtemp(), 'go')")
    options = f"num_processes=2, start_method={start_method!r}, block=False, dashboard=False"
    first = kernel.start(f"launch = notebook_launcher(f, (path,), {options})")
    kernel.finish(first)
    second = kernel.start("open(path, 'w').close(); print(launch.wait(30)); time.sleep(0.5)")
    parents: dict[str, str] = {}
    deadline = time.monotonic() + IT_HUNG
    idle = False
    while not idle and time.monotonic() < deadline:
        message = kernel.client.get_iopub_msg(timeout=IT_HUNG)
        parent = message["parent_header"].get("msg_id", "")
        if message["msg_type"] == "stream":
            parents[parent] = parents.get(parent, "") + message["content"]["text"]
        idle = message["msg_type"] == "status" and parent == second and message["content"]["execution_state"] == "idle"
    assert sorted(parents[first].splitlines()) == ["[0] after the next cell", "[1] after the next cell"]
    assert parents[second] == "True\n"


def test_a_captured_cell_captures_the_ranks_output(kernel: RealKernel) -> None:
    reply = kernel.good("%%capture shown\nnotebook_launcher(print, ('hello',), num_processes=2, dashboard=False)")
    assert reply.stdout == ""
    assert kernel.good("sorted(shown.stdout.splitlines())").result == "['[0] hello', '[1] hello']"


def test_between_launches_nobody_is_in_the_kernels_process_group(kernel: RealKernel, start_method: str) -> None:
    """A restart waits for the kernel's group to be empty; but ranks are in it, for a front end's interrupt."""
    options = f"num_processes=2, start_method={start_method!r}, dashboard=False"
    groups = kernel.good(f"set(notebook_launcher(os.getpgrp, {options})) == {{os.getpgrp()}}")
    assert groups.result == "True"
    assert [p for p in kernel.descendants() if os.getpgid(p.pid) == os.getpgid(kernel.pid)] == []

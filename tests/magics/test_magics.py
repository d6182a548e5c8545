"""``%load_ext nbstate``, ``%nbstate`` and ``%%launch`` in a real kernel."""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Iterator
from html import escape
from typing import Any

import pytest
from real_kernel import IT_HUNG, RealKernel, Reply


@pytest.fixture(scope="module")
def notebook() -> Iterator[RealKernel]:
    """A kernel with the extension, that has launched before: the fork server and its helpers exist."""
    with RealKernel() as kernel:
        kernel.good("%load_ext nbstate\nimport os, threading, torch, nbstate")
        kernel.good("%%launch -n 2 --no-dashboard\nNone")
        yield kernel


def launch(kernel: RealKernel, body: str, options: str = "-n 2 --no-dashboard") -> Reply:
    """Run a launched cell that must not fail."""
    reply = kernel.good(f"%%launch {options}\n{body}")
    assert "UsageError" not in reply.stderr
    return reply


def value(kernel: RealKernel, expression: str) -> Any:
    """What an expression is in the notebook."""
    return ast.literal_eval(kernel.good(expression).result)


def test_results_are_the_last_expressions_in_rank_order(notebook: RealKernel) -> None:
    launch(notebook, "state = nbstate.PartialState()\nstate.process_index * 10, state.num_processes", "-n 3")
    assert value(notebook, "results") == [(0, 3), (10, 3), (20, 3)]


@pytest.mark.parametrize("body", ["x = 1", "for i in range(2):\n    i", "# a comment"])
def test_without_a_last_expression_results_are_none(notebook: RealKernel, body: str) -> None:
    launch(notebook, body)
    assert value(notebook, "results") == [None, None]


def test_names_of_the_notebook_are_visible_by_value(notebook: RealKernel, start_method: str) -> None:
    notebook.good("scale, seen = 2, []\ndef times(x): return x * scale")
    launch(
        notebook,
        "rank = int(os.environ['RANK'])\nbefore = times(1)\nscale = 10 + rank\nseen.append(rank)\n"
        "before, times(1), seen",
        f"-n 2 --no-dashboard --start-method {start_method}",
    )
    assert value(notebook, "results") == [(2, 10, [0]), (2, 11, [1])]
    assert value(notebook, "scale, seen, 'rank' in globals(), 'before' in globals()") == (2, [], False, False)


def test_what_the_cell_defines_can_be_pickled_plainly(notebook: RealKernel, start_method: str) -> None:
    notebook.good("class Earlier: pass")
    launch(
        notebook,
        "import pickle\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self): super().__init__(); self.layer = torch.nn.Linear(2, 2)\n"
        "class Data(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, i): return i\n"
        "def double(x): return 2 * x\n"
        "loader = torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context='fork')\n"
        "found = [type(pickle.loads(pickle.dumps(c()))) is c for c in (Net, Earlier)]\n"
        "found, pickle.loads(pickle.dumps(double))(4), [int(i) for i in loader]",
        f"-n 1 --no-dashboard --start-method {start_method}",
    )
    assert value(notebook, "results") == [([True, True], 8, [0, 1, 2, 3])]


def test_an_instance_of_a_class_of_the_cell_comes_back(notebook: RealKernel) -> None:
    launch(notebook, "class Box:\n    def __init__(self): self.rank = int(os.environ['RANK'])\nBox()")
    assert value(notebook, "[(type(box).__name__, box.rank) for box in results]") == [("Box", 0), ("Box", 1)]


def test_an_error_shows_the_cell_and_its_line_and_leaves_results_alone(notebook: RealKernel) -> None:
    notebook.good("results = 'of before'\ndef fails():\n    raise KeyError('deep')")
    reply = notebook.run("%%launch -n 2 --no-dashboard\n\nx = 1\nraise ValueError('boom')")
    this = f"In[{reply.number}]"
    assert "raised ValueError: boom" in reply.error
    assert f"({this}, line 4)" in reply.error
    assert f"Cell {this}, line 1, in cell\n----> 1 %%launch -n 2 --no-dashboard\n" in reply.traceback
    assert f"Cell {this}, line 4, in <module>\n" in reply.traceback
    assert "----> 4 raise ValueError('boom')\n" in reply.traceback
    assert "site-packages" not in reply.traceback
    assert "nbstate/" not in reply.traceback
    assert value(notebook, "results") == "of before"
    helper = f"In[{reply.number - 1}]"
    assert f"({helper}, line 3)" in notebook.run("%%launch -n 1 --no-dashboard\nfails()").error


def test_device_precision_accumulation_and_threads_reach_the_ranks(notebook: RealKernel) -> None:
    ask = (
        "accelerator = nbstate.Accelerator()\n"
        "state = nbstate.AcceleratorState()\n"
        "(state.device.type, state.mixed_precision, accelerator.gradient_accumulation_steps,"
        " nbstate.GradientState().num_steps, torch.get_num_threads())"
    )
    launch(notebook, ask, "-n 2 --no-dashboard --device cpu --precision bf16 --accumulate 4 --threads 3")
    assert value(notebook, "results") == [("cpu", "bf16", 4, 4, 3)] * 2
    launch(notebook, ask, "-n 2 --no-dashboard --device cpu --threads 1")
    assert value(notebook, "results") == [("cpu", "no", 1, 1, 1)] * 2


def test_accumulation_that_the_cell_asks_for_itself_wins(notebook: RealKernel) -> None:
    body = "nbstate.Accelerator(gradient_accumulation_steps=2).gradient_accumulation_steps"
    launch(notebook, body, "-n 1 --no-dashboard --accumulate 4")
    assert value(notebook, "results") == [2]


def test_a_timeout_ends_the_launch(notebook: RealKernel) -> None:
    reply = notebook.run("%%launch -n 1 --no-dashboard --timeout 0.5\nimport time\nwhile True: time.sleep(0.01)")
    assert reply.error.startswith("LaunchTimeoutError: the launch took longer than its timeout of 0.5 s")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("-n 0", "-n/--num-processes: '0' is not a whole number of 1 or more"),
        ("-n two", "-n/--num-processes: 'two' is not"),
        ("-n 1.5", "-n/--num-processes: '1.5' is not"),
        ("--accumulate 0", "--accumulate: '0' is not"),
        ("--threads -1", "--threads: '-1' is not"),
        ("--timeout soon", "--timeout: 'soon' is not a number of seconds above 0"),
        ("--timeout nan", "--timeout: 'nan' is not"),
        ("--precision half", "--precision: invalid choice: 'half' (choose from"),
        ("--device toaster", "--device: invalid choice: 'toaster' (choose from"),
        ("--start-method magic", "--start-method: invalid choice: 'magic' (choose from"),
        ("--device xpu", "device='xpu': this machine has no such device"),
        ("--ranks 2", "unrecognized arguments: --ranks 2"),
        ("4", "unrecognized arguments: 4"),
    ],
)
def test_a_bad_option_is_a_usage_error_and_starts_nothing(notebook: RealKernel, options: str, said: str) -> None:
    _starts_nothing(notebook, f"%%launch {options}\nprint('ran')", said)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("x = 1\n1 +", "invalid syntax ({cell}, line 3): 1 +"),
        ("%time 1", "a rank has no IPython"),
        ("!ls", "a rank has no IPython"),
        ("nbstate?", "a rank has no IPython"),
    ],
)
def test_a_body_that_no_rank_can_run_is_a_usage_error_and_starts_nothing(
    notebook: RealKernel, body: str, said: str
) -> None:
    _starts_nothing(notebook, f"%%launch -n 2\n{body}", said)


def _starts_nothing(notebook: RealKernel, cell: str, said: str) -> None:
    notebook.good("last = nbstate.last_launch()")
    processes = {process.pid for process in notebook.descendants()}
    reply = notebook.run(cell)
    assert reply.stderr.startswith("UsageError: ")
    assert said.format(cell=f"In[{reply.number}]") in reply.stderr
    assert len(reply.stderr.splitlines()) == 1
    assert reply.stdout == ""
    assert reply.displays == []
    assert value(notebook, "nbstate.last_launch() is last") is True
    assert {process.pid for process in notebook.descendants()} == processes


def test_a_name_that_cannot_travel_makes_it_fork_and_says_so_in_one_line(notebook: RealKernel) -> None:  # C21
    notebook.good("lock = threading.Lock()")
    reply = launch(notebook, "with lock:\n    held = lock.locked()\nheld")
    assert reply.stdout == "nbstate: start method fork, since the global 'lock' that cell() uses (lock) cannot travel\n"
    assert value(notebook, "results, nbstate.last_launch().start_method") == ([True, True], "fork")


def test_a_name_that_the_cell_sets_first_need_not_travel(notebook: RealKernel) -> None:
    notebook.good("lock = threading.Lock()")
    assert launch(notebook, "lock = 'a string'\nlock").stdout == ""
    assert value(notebook, "results, nbstate.last_launch().start_method") == (["a string"] * 2, "forkserver")


def test_output_and_dashboard_are_shown(notebook: RealKernel) -> None:
    body = "print('hello')"
    reply = launch(notebook, body, "-n 2")
    assert sorted(reply.stdout.splitlines()) == ["[0] hello", "[1] hello"]
    assert {shown["text/plain"] for shown in reply.displays} == {"nbstate dashboard"}
    assert "finished" in reply.displays[-1]["text/html"]
    assert launch(notebook, body).displays == []


@pytest.mark.parametrize(
    ("magic", "words"),
    [
        ("%%launch", ("Run the cell's body in N ranks", "-n N, --num-processes N", "{no,fp16,bf16,fp8}", "results")),
        (
            "%nbstate",
            (
                "Show this kernel's states, its devices, and the last launch",
                "``%nbstate doctor`` examines the kernel",
                "``%nbstate stacks`` shows where each rank",
                "``%nbstate diagnose`` says what is wrong",
                "--native",
                "What to show instead of the overview.",
            ),
        ),
    ],
)
def test_magics_explain_themselves(notebook: RealKernel, magic: str, words: tuple[str, ...]) -> None:
    sent = notebook.client.execute(f"{magic}?")
    reply: dict[str, Any] = {}
    while reply.get("parent_header", {}).get("msg_id") != sent:
        reply = notebook.client.get_shell_msg(timeout=IT_HUNG)
    [page] = reply["content"]["payload"]
    for word in words:
        assert word in page["data"]["text/plain"]


def test_the_overview_says_what_is_there_and_builds_nothing(own_kernel: RealKernel) -> None:
    kernel = own_kernel
    kernel.good("%load_ext nbstate\nimport nbstate")
    for word in ("stacks", "diagnose"):
        assert kernel.good(f"%nbstate {word}").stderr.endswith(
            f"%nbstate {word}: this kernel has launched nothing yet\n"
        )
    for _ in range(2):
        rows = overview(kernel)
        assert rows["PartialState"] == rows["AcceleratorState"] == rows["GradientState"] == "not built"
        assert rows["last launch"] == "none"
    assert rows["nbstate"] == value(kernel, "nbstate.__version__")
    assert rows["torch"] == value(kernel, "str(__import__('torch').__version__)")
    assert rows["devices"]
    kernel.good("nbstate.AcceleratorState(cpu=True); nbstate.GradientState()")
    kernel.good("def work(): pass\nnbstate.notebook_launcher(work, num_processes=3, dashboard=False)")
    rows = overview(kernel)
    assert rows["PartialState"].startswith("process 0 of 1")
    assert "cpu" in rows["AcceleratorState"]
    assert "num_steps=1" in rows["GradientState"]
    assert rows["last launch"] == "work on 3 ranks, forkserver, finished"


def overview(kernel: RealKernel) -> dict[str, str]:
    """The rows of %nbstate, which its html shows, too."""
    [shown] = kernel.good("%nbstate").displays
    rows = dict(
        line.split(maxsplit=1) for line in shown["text/plain"].replace("last launch", "last_launch").split("\n")
    )
    assert [text for text in rows.values() if escape(text) not in shown["text/html"]] == []
    return {label.replace("_", " "): text for label, text in rows.items()}


def test_the_doctor_examines_the_kernel_and_leaves_nothing(notebook: RealKernel) -> None:
    notebook.good("from nbstate import last_launch\nbefore = last_launch()")
    processes = {process.pid for process in notebook.descendants()}
    reply = notebook.good("%nbstate doctor")
    [shown] = reply.displays
    text, html = shown["text/plain"], shown["text/html"]
    for pattern in (
        r"^doctor +this kernel may fork$",
        r"^versions .*nbstate \d.*, Python 3\..*, torch \d.*, ipython \d.*, ipykernel \d.*, ipywidgets \d",
        r"^versions .*, anywidget \d[^ ]*$",
        r"^memory +machine [\d.]+ of [\d.]+ GiB free",
        r"^auto takes +forkserver: ",
        r"^busy threads +none$",
        r"^native threads +\d+ running beside Python's \d+; torch computes on \d+$",
        r"^canary +a forked child printed and computed, and was gone after \d+ ms$",
        r"^test launch +2 ranks met in a barrier and returned within \d+ ms, and again within \d+ ms$",
    ):
        assert re.search(pattern, text, re.MULTILINE), f"{pattern}\n{text}"
    assert text.splitlines()[-1].startswith("what to do      Nothing: launch with start_method='auto'")
    for label in ("versions", "canary", "test launch", "what to do"):
        assert f">{label}</th>" in html
    assert reply.stdout == reply.stderr == ""
    assert {process.pid for process in notebook.descendants()} == processes
    assert notebook.good("last_launch() is before").result == "True"


def test_the_doctor_names_the_cell_that_spoilt_the_kernel(notebook: RealKernel) -> None:  # C23
    # a fake, since no GPU is here: what a cell that uses one leaves in torch
    guilty = notebook.good("honest = torch.cuda.is_initialized; torch.cuda.is_initialized = lambda: True")
    shown = notebook.good("%nbstate doctor").displays[-1]["text/plain"]
    notebook.good("torch.cuda.is_initialized = honest")
    assert shown.startswith("doctor          this kernel must not fork\n")
    assert f"cuda was already used in this process, in In[{guilty.number}]" in shown
    assert "2 ranks met in a barrier" in shown
    assert f"move what In[{guilty.number}] does with the device into the launched function" in shown


@pytest.mark.parametrize("words", ["docter", "doctor now", "Doctor"])
def test_an_unknown_word_is_a_usage_error_that_lists_the_accepted_ones(notebook: RealKernel, words: str) -> None:
    said = f"UsageError: %nbstate: {words!r} is not known; accepted: doctor, stacks, diagnose, or nothing\n"
    _starts_nothing(notebook, f"%nbstate {words}", said)


def test_stacks_and_diagnosis_of_a_launch_beside_the_notebook(notebook: RealKernel, start_method: str) -> None:
    cell = notebook.good(
        "import time\n"
        "def waits(seconds):\n"
        "    state = nbstate.PartialState()\n"
        "    if state.process_index == 1:\n"
        "        time.sleep(seconds)\n"
        "    state.wait_for_everyone()\n"
        f"launch = nbstate.notebook_launcher(waits, (60,), num_processes=3, start_method={start_method!r}, block=False,"
        " dashboard=False)"
    )
    here = f"In[{cell.number}]"
    notebook.good("while sum(rank.board.in_barrier for rank in launch.ranks) < 2: time.sleep(0.01)")
    shown = notebook.good("%nbstate stacks").displays[-1]
    blocks = shown["text/plain"].split("\n\n")
    assert [block.split("\n")[0] for block in blocks] == [
        "ranks 0 and 2 (MainThread), innermost call first:",
        "rank 1 (MainThread), innermost call first:",
    ]
    assert f"\n  {here}, line 6, in waits\n      state.wait_for_everyone()" in blocks[0]
    assert f"\n  {here}, line 5, in waits\n      time.sleep(seconds)" in blocks[1]
    assert f"{here}, line 5, in waits" in shown["text/html"]
    found = notebook.good("time.sleep(0.6)\n%nbstate diagnose").displays[-1]["text/plain"]
    assert "rank 1" in found.split("\n")[0]
    assert f"{here}, line 5" in found
    assert value(notebook, "launch.done") is False
    notebook.good("launch.stop(); launch.wait()")
    assert notebook.good("%nbstate stacks").displays[-1]["text/plain"] == "no stack of ranks 0 to 2: ended"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("doctor --native", "--native goes with stacks only"),
        ("--native", "--native goes with stacks only"),
        ("stacks diagnose", "'stacks diagnose' is not known; accepted: doctor, stacks, diagnose, or nothing"),
    ],
)
def test_words_that_do_not_go_together_are_a_usage_error(notebook: RealKernel, line: str, said: str) -> None:
    _starts_nothing(notebook, f"%nbstate {line}", f"UsageError: %nbstate: {said}\n")


def test_loading_warms_the_fork_server_and_unloading_takes_the_magics_away(own_kernel: RealKernel) -> None:
    kernel = own_kernel
    kernel.good("%load_ext nbstate")
    deadline = time.monotonic() + IT_HUNG
    while not any("forkserver" in " ".join(process.cmdline()) for process in kernel.descendants()):
        assert time.monotonic() < deadline, "no fork server"
        time.sleep(0.02)
    server = value(kernel, "__import__('multiprocess.forkserver').forkserver._forkserver._forkserver_pid")
    kernel.good("%%launch -n 1 --no-dashboard\n1")
    assert value(kernel, "__import__('multiprocess.forkserver').forkserver._forkserver._forkserver_pid") == server
    kernel.good("%unload_ext nbstate")
    assert "`%nbstate` not found" in kernel.run("%nbstate").stderr
    assert "`%%launch` not found" in kernel.run("%%launch -n 1\n1").stderr
    kernel.good("%load_ext nbstate")
    kernel.good("%%launch -n 1 --no-dashboard\n2")
    assert value(kernel, "results") == [2]

from __future__ import annotations

import importlib
import sysconfig
import threading

import pytest
import torch

from nbstate.telemetry import probe
from nbstate.telemetry.source import caller, is_user_file, show_line

CELL = "/tmp/ipykernel_4711/123456.py"


def run_in_cell(code: str, **names):
    """Run code as a kernel does: compiled with the file name of a cell."""
    exec(compile(code, CELL, "exec"), names)
    return names


@pytest.mark.parametrize("filename", [CELL, "/home/me/train.py", "<ipython-input-5-abc>", "train.py", __file__])
def test_what_a_user_wrote_is_a_users_file(filename):
    assert is_user_file(filename)
    assert is_user_file(filename)


@pytest.mark.parametrize(
    "filename",
    [
        probe.__file__,
        torch.__file__,
        importlib.__file__,
        sysconfig.get_paths()["stdlib"] + "/threading.py",
        "/home/me/.venv/lib/python3.11/site-packages/accelerate/accelerator.py",
        "/usr/lib/python3/dist-packages/numpy/core.py",
        "<frozen importlib._bootstrap>",
    ],
)
def test_what_was_installed_is_not(filename):
    assert not is_user_file(filename)


def test_the_caller_is_the_line_of_the_cell():
    names = run_in_cell("\n\ndef train():\n    return caller(0)\n\nfound = train()", caller=caller)
    assert names["found"] == (CELL, 4)


def test_frames_of_packages_are_passed_over():
    library: dict = {"caller": caller}
    package = "/x/lib/python3.11/site-packages/lib/comm.py"
    exec(compile("def reduce():\n    return caller(0)", package, "exec"), library)
    names = run_in_cell("def train():\n\n    return reduce()\n\nfound = train()", reduce=library["reduce"])
    assert names["found"] == (CELL, 3)


def test_depth_leaves_frames_out():
    code = "def inner():\n    return caller(2)\n\ndef outer():\n    return inner()\n\nfound = outer()"
    assert run_in_cell(code, caller=caller)["found"] == (CELL, 5)


def test_no_user_frame_is_said_as_none():
    found: list[tuple[str, int]] = []
    library = {"caller": caller, "found": found}
    exec(compile("def watch():\n    found.append(caller(0))", "/x/site-packages/lib.py", "exec"), library)
    thread = threading.Thread(target=library["watch"])  # below it are only frames of the standard library
    thread.start()
    thread.join()
    assert found == [("", 0)]


@pytest.mark.parametrize(
    ("filename", "shown"),
    [
        (CELL, "In[5], line 14"),
        (CELL[-12:], "In[5], line 14"),
        ("/home/me/train.py", "train.py:14"),
        ("", ""),
    ],
)
def test_a_line_is_shown_as_people_call_it(filename, shown):
    assert show_line(filename, 14, {"/tmp/ipykernel_4711/9.py": "In[4]", CELL: "In[5]"}) == shown


def test_without_cells_a_cell_is_a_file():
    assert show_line(CELL, 14) == "123456.py:14"

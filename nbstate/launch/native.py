"""Stacks with the C++ in them, through ``py-spy`` where it is installed.

``py-spy`` stops a process for a moment and reads its memory from outside, for which the system must allow it to trace:
as root, or on most systems for one's own children. Where it does not, the error says so.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import psutil

from nbstate.errors import LaunchError
from nbstate.launch.dumps import ENDED, STARTING
from nbstate.launch.stacks import MAIN, OTHER, Stacks, ThreadStack, own_frames
from nbstate.telemetry.observed import StackFrame

__all__ = ["take_native_stacks"]

_AT_ONCE: Final = 4
_TIMEOUT: Final = 60.0  # seconds; to read the symbols of torch's libraries takes a while on a slow disk
_INSTALL: Final = (
    "stacks(native=True) needs py-spy, which is not installed here. Install it with: %pip install py-spy. "
    "stacks() without native shows the Python frames and needs nothing"
)
_REFUSED: Final = ("permission denied", "operation not permitted", "eperm", "eacces")
_ALLOW: Final = (
    "the system does not let py-spy look into it: allow tracing (sysctl kernel.yama.ptrace_scope=0, or "
    "--cap-add SYS_PTRACE for a container)"
)


def take_native_stacks(pids: Mapping[int, int], cells: Mapping[str, str] | None = None) -> Stacks:
    """Stacks of ranks with the C and C++ frames between the Python ones.

    Parameters
    ----------
    pids : mapping of int to int
        Ranks and their processes; 0 for a rank that has not started, negative for one that has ended.
    cells : mapping of str to str, optional
        File names of cells to what the notebook calls them.

    Raises
    ------
    LaunchError
        ``py-spy`` is not installed, or may not look into any of the ranks.
    """
    program = _find()
    with ThreadPoolExecutor(_AT_ONCE, "nbstate-py-spy") as pool:
        found = dict(zip(pids, pool.map(lambda pid: _dump(program, pid), pids.values()), strict=True))
    ranks = {rank: threads for rank, threads in found.items() if not isinstance(threads, str)}
    silent = {rank: why for rank, why in found.items() if isinstance(why, str)}
    if silent and not ranks and set(silent.values()) == {_ALLOW}:
        raise LaunchError(f"stacks(native=True): {_ALLOW}. stacks() without native needs no permission")
    return Stacks(ranks, silent, cells or {})


def _find() -> str:
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")  # in an environment that is not on PATH
    program = beside if os.access(beside, os.X_OK) else shutil.which("py-spy")
    if program is None:
        raise LaunchError(_INSTALL)
    return program


def _dump(program: str, pid: int) -> tuple[ThreadStack, ...] | str:
    """The threads of one process, or why there are none."""
    if pid <= 0 or not psutil.pid_exists(pid):
        return ENDED if pid else STARTING
    command = [program, "dump", "--native", "--json", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return f"py-spy did not come back within {_TIMEOUT:g} s"
    if done.returncode:
        said = done.stderr.strip()
        if any(word in said.lower() for word in _REFUSED):
            return _ALLOW
        return f"py-spy: {said.splitlines()[0] if said else f'exit code {done.returncode}'}"
    threads = [_thread(row, pid) for row in json.loads(done.stdout)]
    return tuple(sorted(threads, key=lambda thread: thread.name != MAIN))


def _thread(row: Mapping[str, Any], pid: int) -> ThreadStack:
    frames = (StackFrame(f["filename"] or "", f["line"] or 0, _brief(f["name"])) for f in row["frames"])
    name = MAIN if row["os_thread_id"] == pid else row["thread_name"]  # under fork it has the name of another
    return ThreadStack(name or OTHER, own_frames(frames), int(row["thread_id"]))


def _brief(function: str) -> str:
    """A C++ function without what stands in its angle brackets and parentheses, which may fill a page."""
    kept, depth = [], 0
    for character in function:
        depth -= character in ">)"
        if depth <= 0:
            kept.append(character)
        depth += character in "<("
    brief = "".join(kept).replace("<>", "").replace("()", "")
    return brief if brief and "<" in function and "::" in function else function

"""The environment of this process, for processes that it starts while another thread may be changing it.

The C library's environment is one array. A process that is started with it as it is may find it in pieces, and then
cannot begin: with a thread that did nothing but set and delete variables, 78 of 400 processes ended at once, with exit
code 255. A copy that was made under Python's lock is whole.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from typing import Any

__all__ = ["copy_environ", "spawn"]


def copy_environ() -> dict[str, str]:
    """A copy of the environment, also while another thread changes it."""
    while True:
        try:
            return dict(os.environ)
        except (RuntimeError, KeyError):
            continue


def spawn(path: Any, args: Sequence[Any], passfds: Sequence[Any]) -> int:
    """Start a process with a copy of the environment, in place of ``multiprocess.util.spawnv_passfds``; its pid."""
    process = subprocess.Popen(args, executable=path, env=copy_environ(), pass_fds=tuple(map(int, passfds)))
    process.returncode = 0  # multiprocess waits for it, not subprocess
    return process.pid

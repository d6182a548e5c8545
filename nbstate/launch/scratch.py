"""Where a rank's own child processes keep their sockets, and who clears up after ranks that are killed.

The problem: a data loader's worker that hands over a tensor opens a socket with a name, in a ``pymp-`` directory that
``multiprocessing`` removes when the worker ends in good order. A rank is killed with its workers as soon as its launch
has failed or its kernel is gone, and the directory stays for ever.

What does not work: to clear up in the kernel, which may be what is gone. To keep sockets in Linux's abstract namespace,
where every user can reach them.

What does: the first child process that a rank starts by ``multiprocessing`` gets, and with it all later ones, one run
directory of the rank's, and a shell beside them that waits for the end of a pipe. The rank and what it forks hold the
pipe's other end; when the last of them is gone, whoever ended it, the shell removes the directory and is gone, too.
It also removes what torch names in shared memory for a moment: a worker may be killed in that moment.
Where there is no shell, or it was killed, the next launch sweeps the directory (see ``rundir``).

The shell is nobody's child: code in a rank may wait for all of its children, and a kernel ends all of its own.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import Any, Final

from nbstate.launch.rundir import RunDirectory

__all__ = ["install"]

_SHELL: Final = "/bin/sh"
# A command in the background has the null device as its 0, so the pipe goes to 3 before.
_WAIT_AND_REMOVE: Final = """exec 3<&0
(trap '' HUP INT TERM
 read -r _ <&3
 while read -r pid; do rm -f /dev/shm/torch_"$pid"_*; done <"$0/pids"
 rm -rf -- "$0") &"""

_directory: RunDirectory | None = None
_pipe = -1


def install() -> None:
    """Make ``multiprocessing`` (and ``multiprocess``) keep its files where they are cleared up. Called in a rank."""
    for package in ("multiprocessing", "multiprocess"):
        util, process = sys.modules.get(f"{package}.util"), sys.modules.get(f"{package}.process")
        if util is None or process is None:
            continue
        process.current_process()._config.pop("tempdir", None)
        util.get_temp_dir = _path  # type: ignore[attr-defined]
        _hand_down(process.BaseProcess)


def _hand_down(process_class: Any) -> None:
    """Tell each process that is started, however it is: one that is spawned has our ``get_temp_dir`` no more."""
    start = process_class.start

    def start_with_directory(self: Any) -> None:
        with contextlib.suppress(OSError):  # it may never need one
            self._config["tempdir"] = _path()
        start(self)
        with contextlib.suppress(OSError):
            _note(self.pid)

    process_class.start = start_with_directory


def _path() -> str:
    """The rank's directory, made when it is first asked for."""
    global _directory, _pipe
    if _directory is None:
        _directory = RunDirectory()
        _note(os.getpid())
        read, _pipe = os.pipe()
        try:
            _start_shell(read)
        finally:
            os.close(read)
    return _directory.path


def _note(pid: int) -> None:
    """Remember who may leave a tensor in shared memory, if it is killed before it has taken the name away."""
    with open(os.path.join(_path(), "pids"), "a") as file:
        file.write(f"{pid}\n")


def _start_shell(read: int) -> None:
    assert _directory is not None
    with contextlib.suppress(OSError):  # there may be no shell
        subprocess.run(
            [_SHELL, "-c", _WAIT_AND_REMOVE, _directory.path],
            stdin=read,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
            check=False,
        )

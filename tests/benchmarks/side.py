"""One side of a benchmark: a process of its own that does one thing at a time and says what it measured.

Both halves of the conversation are here. A request is one JSON line on the side's standard input, a list; the answer
is one JSON line on a descriptor of its own, an object, so that what ranks print cannot get between. A side has a
process to itself because a launcher may leave something behind (a store's server, its thread, environment variables)
that the next one would stumble over.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TextIO

HERE: Final = Path(__file__).parent
PATIENCE: Final = 60.0  # seconds for one request; far more than any takes that does not hang


class LaunchFailedError(Exception):
    """A launch hung or raised; there is no sample."""


class Side:
    """One side's process, started anew after a launch that hung.

    Parameters
    ----------
    script : str
        File in this folder whose ``__main__`` calls ``serve``.
    name : str
        Which of the script's sides.
    log : file
        Takes what it and its ranks print.
    """

    def __init__(self, script: str, name: str, log: TextIO) -> None:
        self.name = name
        self._script, self._log = script, log
        self._start()

    def _start(self) -> None:
        self.is_warm = False
        self._answers, theirs = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / self._script), self.name, str(theirs)],
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs],
            start_new_session=True,
            text=True,
        )
        os.close(theirs)

    def ask(self, *request: Any) -> dict[str, Any]:
        """Send a request, with a new folder as its last item, and wait for the answer.

        Raises
        ------
        LaunchFailedError
            It hung, or raised.
        """
        assert self._process.stdin is not None
        with tempfile.TemporaryDirectory() as folder:
            self._process.stdin.write(json.dumps([*request, folder]) + "\n")
            self._process.stdin.flush()
            try:
                answer = json.loads(self._answer())
            except LaunchFailedError:
                # while the folder still stands: ranks that are left may write into it
                self.close()
                self._start()
                raise
        if "error" in answer:
            raise LaunchFailedError(answer["error"])
        return dict(answer)

    def _answer(self) -> str:
        until, answer = time.monotonic() + PATIENCE, b""
        while not answer.endswith(b"\n"):
            ready, _, _ = select.select([self._answers], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise LaunchFailedError(f"hung for {PATIENCE:.0f} s")
            piece = os.read(self._answers, 65536)
            if not piece:
                raise LaunchFailedError(f"its process ended with {self._process.wait()}: {self._last_words()}")
            answer += piece
        return answer.decode()

    def _last_words(self) -> str:
        self._log.seek(0)
        return self._log.read()[-2000:].strip()

    def close(self) -> None:
        """End the process and everything that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        os.close(self._answers)


def _environment() -> dict[str, str]:
    root = str(HERE.parents[1])
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")])),
        "CUDA_VISIBLE_DEVICES": "",
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }


@contextmanager
def all_sides(script: str, names: Iterable[str]) -> Iterator[list[Side]]:
    """One process per side; all are gone afterwards."""
    with ExitStack() as stack:
        sides = []
        for name in names:
            sides.append(Side(script, name, stack.enter_context(tempfile.TemporaryFile("w+"))))
            stack.callback(sides[-1].close)
        yield sides


def serve(fd: int, respond: Callable[..., dict[str, Any]]) -> None:
    """In the side's process: answer each request with what ``respond(*request)`` returns, until standard input ends."""
    os.set_inheritable(fd, False)
    with os.fdopen(fd, "w", buffering=1) as answers:
        for line in sys.stdin:
            answer: dict[str, Any]
            try:
                answer = respond(*json.loads(line))
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(answer) + "\n")

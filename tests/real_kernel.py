"""A real Jupyter kernel, driven as a front end drives it."""

from __future__ import annotations

import queue
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil
from jupyter_client.manager import KernelManager

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
IT_HUNG = 60.0


def wait_until(condition: Callable[[], bool], what: str, seconds: float = IT_HUNG) -> None:
    """Wait for something that must happen; fail with its name if it has not after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.01)


@dataclass
class Reply:
    """What one cell did."""

    stdout: str = ""
    stderr: str = ""
    error: str = ""
    traceback: str = ""
    displays: list[dict[str, Any]] = field(default_factory=list)
    number: int = 0
    """n of In[n]."""
    seconds: float = 0.0

    @property
    def result(self) -> str:
        """text/plain of the cell's value."""
        return str(self.displays[-1]["text/plain"]) if self.displays else ""


class RealKernel:
    """``with RealKernel() as kernel: kernel.run("1 + 1").result``."""

    def __enter__(self) -> RealKernel:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel()
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=IT_HUNG)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=not self.alive)
        self.manager.cleanup_resources()
        self.client.context.destroy(linger=0)

    @property
    def alive(self) -> bool:
        """Whether the kernel's process runs."""
        return bool(self.manager.is_alive())

    @property
    def pid(self) -> int:
        """The kernel's process."""
        return int(self.manager.provisioner.pid)

    def descendants(self) -> list[psutil.Process]:
        """Every process below the kernel."""
        return list(psutil.Process(self.pid).children(recursive=True))

    def interrupt(self) -> None:
        """What the Interrupt button of a front end does."""
        self.manager.interrupt_kernel()

    def kill(self) -> None:
        """``kill -9`` of the kernel alone."""
        psutil.Process(self.pid).send_signal(signal.SIGKILL)

    def start(self, code: str) -> str:
        """Send a cell; ``finish`` waits for it."""
        return str(self.client.execute(code))

    def run(self, code: str, timeout: float = IT_HUNG) -> Reply:
        """Run a cell to its end."""
        return self.finish(self.start(code), timeout)

    def finish(self, sent: str, timeout: float = IT_HUNG) -> Reply:
        """Wait for a cell that was sent. Raises TimeoutError if it hangs."""
        reply, began = Reply(), time.monotonic()
        while True:
            left = timeout - (time.monotonic() - began)
            if left <= 0:
                raise TimeoutError(f"the cell has not ended after {timeout} s; so far: {reply}")
            try:
                message = self.client.get_iopub_msg(timeout=min(left, 1.0))
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") != sent:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                setattr(reply, content["name"], getattr(reply, content["name"]) + content["text"])
            elif kind == "execute_input":
                reply.number = content["execution_count"]
            elif kind in ("execute_result", "display_data", "update_display_data"):
                reply.displays.append(content["data"])
            elif kind == "error":
                reply.error = f"{content['ename']}: {content['evalue']}"
                reply.traceback = _COLOURS.sub("", "\n".join(content["traceback"]))
            elif kind == "status" and content["execution_state"] == "idle":
                reply.seconds = time.monotonic() - began
                return reply

    def good(self, code: str, timeout: float = IT_HUNG) -> Reply:
        """Run a cell that must not fail."""
        reply = self.run(code, timeout)
        assert not reply.error, reply.traceback
        return reply

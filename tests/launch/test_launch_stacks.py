"""Stacks of every rank, while ranks are stuck in C++, hold the GIL, are stopped, or are gone."""

from __future__ import annotations

import faulthandler
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from real_kernel import wait_until

from nbstate import LaunchError, PartialState, notebook_launcher
from nbstate.launch.dumps import SIGNAL
from nbstate.launch.launch import Launch
from nbstate.launch.native import _find, take_native_stacks
from nbstate.launch.stacks import Stacks, ThreadStack, parse_dump
from nbstate.telemetry.observed import StackFrame

IT_HUNG = 30.0
HERE = Path(__file__).name


@contextmanager
def running(function: Callable[..., Any], *args: Any, ranks: int = 2, start_method: str = "fork") -> Iterator[Launch]:
    launch = notebook_launcher(
        function, args, num_processes=ranks, start_method=start_method, timeout=IT_HUNG, dashboard=False, block=False
    )
    try:
        yield launch
    finally:
        launch.stop()
        launch.wait()


def line_of(function: Callable[..., Any], offset: int) -> str:
    return f"{HERE}:{function.__code__.co_firstlineno + offset}"


def wait_for_file(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(0.01)


def one_comes_late(until: str) -> float:
    state = PartialState()
    slept = 0.0
    if state.process_index == 1:
        threading.Thread(target=wait_for_file, args=(until,), name="helper").start()
        while not os.path.exists(until):
            began = time.monotonic()
            time.sleep(0.3)
            slept = time.monotonic() - began
    dist.barrier()
    return slept


def test_stacks_of_ranks_that_wait_in_c(start_method: str, tmp_path: Path) -> None:
    until = tmp_path / "go"
    with running(one_comes_late, str(until), ranks=3, start_method=start_method) as launch:
        wait_until(lambda: all(launch.ranks[rank].board.in_barrier for rank in (0, 2)), "ranks 0 and 2 wait")
        wait_until(lambda: len(launch.stacks().ranks.get(1, ())) == 2, "rank 1 has its thread")
        with ThreadPoolExecutor(4) as pool:
            taken = list(pool.map(lambda _: launch.stacks(), range(20)))
        until.touch()
        launch.wait(IT_HUNG)
        results = launch.results()
    assert results[0] == results[2] == 0.0
    assert results[1] >= 0.3  # no signal has cut a sleep short
    for stacks in taken:
        assert stacks.silent == {}
        assert stacks.ranks[0] == stacks.ranks[2]
        assert [thread.name for thread in stacks.ranks[1]] == ["MainThread", "another thread"]
    blocks = repr(taken[0]).split("\n\n")
    assert blocks[0].startswith("ranks 0 and 2 (MainThread), innermost call first:\n")
    assert f"{line_of(one_comes_late, 9)}, in one_comes_late\n      dist.barrier()" in blocks[0]
    assert blocks[1] == (
        "rank 1 (MainThread), innermost call first:\n"
        f"  {line_of(one_comes_late, 7)}, in one_comes_late\n      time.sleep(0.3)"
    )
    assert blocks[2] == (
        "rank 1 (another thread), innermost call first:\n"
        f"  {line_of(wait_for_file, 2)}, in wait_for_file\n      time.sleep(0.01)"
    )
    files = {frame.file for threads in taken[0].ranks.values() for thread in threads for frame in thread.frames}
    assert [file for file in files if "/nbstate/" in file or file.endswith("threading.py")] == []
    assert repr(launch.stacks()) == "no stack of ranks 0 to 2: ended"


def holds_the_gil(ready: str) -> None:
    Path(ready).touch()
    all(itertools.repeat(True, 10**12))


def test_a_rank_that_holds_the_gil_answers(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    with running(holds_the_gil, str(ready), ranks=1) as launch:
        wait_until(ready.exists, "the rank runs")
        time.sleep(0.05)
        [main] = launch.stacks().ranks[0]
    assert main.frames[0] == StackFrame(__file__, holds_the_gil.__code__.co_firstlineno + 2, "holds_the_gil")


def has_handlers_of_its_own(ready: str, go: str) -> list[int]:
    seen: list[int] = []
    rank = int(os.environ["RANK"])
    if rank == 0:
        signal.signal(SIGNAL, lambda number, _: seen.append(number))
    signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    if rank == 1:
        faulthandler.dump_traceback_later(0.2, exit=False)
    os.kill(os.getpid(), signal.SIGUSR1)
    Path(f"{ready}{rank}").touch()
    wait_for_file(go)
    time.sleep(0.3)
    return seen


def test_a_users_own_handlers_stay_the_users(start_method: str, tmp_path: Path) -> None:
    ready, go = tmp_path / "ready", tmp_path / "go"
    with running(has_handlers_of_its_own, str(ready), str(go), start_method=start_method) as launch:
        wait_until(lambda: all(Path(f"{ready}{rank}").exists() for rank in (0, 1)), "both ranks are ready")
        stacks = launch.stacks()
        go.touch()
        launch.wait(IT_HUNG)
        assert launch.results() == [[signal.SIGUSR1, SIGNAL], [signal.SIGUSR1]]
        assert "Timeout (0:00:00.200000)!" in launch.logs(1)
    assert set(stacks.ranks) == {1}
    assert f"no stack of rank 0: no answer, since code in it handles signal {SIGNAL}" in repr(stacks)


def sleeps() -> None:
    time.sleep(IT_HUNG)


def test_stopped_and_blocking_and_dead_ranks_are_named(tmp_path: Path) -> None:
    def blocks(ready: str) -> None:
        if os.environ["RANK"] == "1":
            signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})
        Path(f"{ready}{os.environ['RANK']}").touch()
        time.sleep(IT_HUNG)

    ready = str(tmp_path / "ready")
    with running(blocks, ready, ranks=3) as launch:
        wait_until(lambda: all(Path(f"{ready}{rank}").exists() for rank in range(3)), "all ranks are ready")
        stopped = psutil.Process(launch.ranks[0].pid)
        stopped.suspend()
        wait_until(lambda: stopped.status() == psutil.STATUS_STOPPED, "rank 0 is stopped")
        stacks = launch.stacks()
        stopped.resume()
        again = launch.stacks()
    assert (set(stacks.ranks), set(again.ranks)) == ({2}, {0, 2})
    assert stacks.silent[0] == "stopped by a signal, such as SIGSTOP"
    assert stacks.silent[1].startswith(f"the main thread blocks signal {SIGNAL}")
    assert launch.stacks().silent == dict.fromkeys(range(3), "ended")


# Reading a dump


DUMP = """Thread 0x0000000a [pump] (most recent call first):
  File "/a/f\\xe9\\u20ac.py", line 3 in \\xfcber
  File ???, line ??? in ???
  ...

Thread 0x0000000b (most recent call first):
  <no Python frame>

Current thread 0x0000000c (most recent call first):
  Garbage-collecting
  File "/a/b "quoted", line 1 in x.py", line 14 in <module>
"""


def test_a_dump_is_read_as_it_is_written() -> None:
    assert parse_dump(DUMP) == (
        ThreadStack("MainThread", (StackFrame('/a/b "quoted", line 1 in x.py', 14, "<module>"),)),
        ThreadStack("pump", (StackFrame("/a/f\xe9\u20ac.py", 3, "\xfcber"), StackFrame("?", 0, "???"))),
        ThreadStack("another thread", ()),
    )
    assert parse_dump("") == ()


def test_the_newer_of_two_dumps_counts_and_half_a_line_does_not() -> None:
    newer = DUMP.replace("line 14", "line 15")
    assert parse_dump(f'line 3 in f\n{DUMP}{newer}  File "/a') == parse_dump(newer)


def test_nothing_is_shown_twice() -> None:
    def stack(function: str) -> ThreadStack:
        return ThreadStack("MainThread", (StackFrame("/a/train.py", 3, function),))

    worker = ThreadStack("another thread", (StackFrame("/a/train.py", 9, "work"),))
    stacks = Stacks({0: (stack("f"), worker, worker), 1: (stack("g"),), 2: (stack("f"),)}, {3: "ended"})
    heads = [block.split("\n")[0] for block in repr(stacks).split("\n\n")]
    assert heads == [
        "ranks 0 and 2 (MainThread), innermost call first:",
        "rank 1 (MainThread), innermost call first:",
        "rank 0 (another thread, 2 times), innermost call first:",
        "no stack of rank 3: ended",
    ]
    assert "&lt;" not in stacks._repr_html_()
    assert repr(Stacks({0: (ThreadStack("MainThread", ()),)})) == "rank 0 (MainThread): in nbstate's own code"


# With the C++ in them


def test_without_py_spy_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(LaunchError, match="Install it with: %pip install py-spy"):
        take_native_stacks({0: os.getpid()})


def test_native_stacks(tmp_path: Path) -> None:
    try:
        _find()
    except LaunchError:
        pytest.skip("py-spy is not installed")
    until = tmp_path / "go"
    with running(one_comes_late, str(until), ranks=2) as launch:
        wait_until(lambda: launch.ranks[0].board.in_barrier, "rank 0 waits")
        try:
            stacks = launch.stacks(native=True)
        except LaunchError as error:
            pytest.skip(f"this machine does not let py-spy trace: {error}")
        until.touch()
        launch.wait(IT_HUNG)
        assert len(launch.results()) == 2
    names = [frame.function for frame in stacks.main(0)]
    assert names[-1] == "one_comes_late"
    assert "c10d::Work::wait" in names
    assert [frame for frame in stacks.main(0) if "/nbstate/" in frame.file] == []
    assert "libtorch_cpu.so, in c10d::Work::wait" in repr(stacks)

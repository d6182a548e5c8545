"""A launch that stands is found out by itself, told once, and let alone; one that is only slow is left in peace."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from real_kernel import RealKernel, wait_until

from nbstate import LaunchTimeoutError, PartialState, RankError, notebook_launcher
from nbstate.launch.launch import Launch
from nbstate.launch.observing import Finding, has_worked, observe
from nbstate.launch.stall import StallWatch, stall_after
from nbstate.telemetry.board import Board, Phase
from nbstate.telemetry.observed import Observed, StackFrame

IT_HUNG = 60.0
AFTER = 1.0
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


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBSTATE_STALL_AFTER", str(AFTER))


def line_of(function: Callable[..., Any], offset: int) -> str:
    return f"{HERE}:{function.__code__.co_firstlineno + offset}"


# Alarms


def different_operations() -> None:
    state = PartialState()  # with the default time-out, half an hour
    x = torch.ones(4)
    if state.process_index == 0:
        dist.all_reduce(x)
    else:
        dist.broadcast(x, src=0)


def test_a_mismatch_is_named_long_before_its_time_out(start_method: str, capsys: pytest.CaptureFixture[str]) -> None:
    with running(different_operations, start_method=start_method) as launch:  # C06
        wait_until(lambda: launch.alarm is not None, "an alarm")
        alarm = launch.alarm
        time.sleep(1.5)  # in which it is judged again
        assert launch.alarm is not None
        assert not launch.done
    assert alarm is not None
    assert alarm.kind == "mismatch"
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("nbstate: ")]
    assert len(said) == 1
    assert re.search(rf"all_reduce #\d+ \({line_of(different_operations, 4)}\)", said[0])
    assert re.search(rf"broadcast #\d+ \({line_of(different_operations, 6)}\)", said[0])
    assert launch.alarm is None


def comes_late(until: str, rounds: int) -> None:
    state = PartialState()
    for number in range(rounds):
        while state.process_index == 1 and not os.path.exists(f"{until}{number}"):
            time.sleep(0.05)
        state.wait_for_everyone()


def test_progress_ends_the_alarm_and_the_same_one_is_not_told_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    until = str(tmp_path / "go")
    with running(comes_late, until, 2, ranks=3) as launch:
        for number in range(2):
            wait_until(lambda: launch.alarm is not None, "an alarm")
            assert launch.alarm is not None
            assert launch.alarm.ranks == (1,)
            Path(f"{until}{number}").touch()
            wait_until(lambda: launch.alarm is None, "its end")
        launch.wait(IT_HUNG)
        assert launch.results() == [None] * 3
    said = capsys.readouterr().err
    assert len(re.findall(r"^nbstate: .*rank 1", said, re.MULTILINE)) <= 2
    assert line_of(comes_late, 4) in said  # where rank 1 was


def test_a_stopped_rank_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with running(comes_late, str(tmp_path / "never"), 1) as launch:
        wait_until(lambda: launch.ranks[0].board.in_barrier, "rank 0 waits")
        psutil.Process(launch.ranks[1].pid).suspend()
        wait_until(lambda: launch.alarm is not None, "an alarm")
        assert launch.alarm is not None
        assert launch.alarm.ranks == (1,)
        psutil.Process(launch.ranks[1].pid).resume()
    assert "nbstate: rank 1" in capsys.readouterr().err


def test_the_cell_is_told_while_it_blocks(kernel: RealKernel) -> None:
    reply = kernel.run(
        "os.environ['NBSTATE_STALL_AFTER'] = '1'\n"
        "def stands():\n"
        "    state = PartialState()\n"
        "    if state.process_index == 1:\n"
        "        time.sleep(4)\n"
        "    state.wait_for_everyone()\n"
        "    return 'done'\n"
        "notebook_launcher(stands, num_processes=2, dashboard=False)"
    )
    assert reply.result == "['done', 'done']"
    assert reply.stderr.startswith("nbstate: rank 1 ")
    assert f"In[{reply.number}], line 5" in reply.stderr
    assert reply.stderr.count("nbstate: ") == 1


# No alarms


def computes_while_others_wait(seconds: float) -> None:
    state = PartialState()
    if state.process_index == 0:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            sum(range(1000))
    state.wait_for_everyone()


def reads_while_others_wait(seconds: float) -> None:
    state = PartialState()
    if state.process_index == 0:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            Path(torch.__file__).read_bytes()
            time.sleep(0.2)
    state.wait_for_everyone()


def lets_a_child_work_while_others_wait(seconds: float) -> None:
    state = PartialState()
    if state.process_index == 0:
        work = f"import time\nend = time.monotonic() + {seconds}\nwhile time.monotonic() < end: pass"
        subprocess.run([sys.executable, "-c", work], check=True)
    state.wait_for_everyone()


def writes_steps_and_sleeps(seconds: float) -> None:
    from nbstate.telemetry import probe

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        probe.step(sync=True)
        time.sleep(0.4)


def sleeps_all_together(seconds: float) -> None:
    time.sleep(seconds)


SLOW = (
    computes_while_others_wait,
    reads_while_others_wait,
    lets_a_child_work_while_others_wait,
    writes_steps_and_sleeps,
    sleeps_all_together,
)


def test_a_slow_launch_raises_no_alarm(capsys: pytest.CaptureFixture[str]) -> None:
    with ExitStack() as all_at_once:
        launches = [all_at_once.enter_context(running(function, 4.0 * AFTER)) for function in SLOW]
        while not all(launch.done for launch in launches):
            assert [launch for launch in launches if launch.alarm] == []
            time.sleep(0.02)
        for launch in launches:
            assert launch.results() == [None, None]
    assert capsys.readouterr().err == ""


# Errors carry what was found


def is_late_for_a_barrier_with_a_time_out() -> None:
    from datetime import timedelta

    state = PartialState(timeout=timedelta(seconds=1))
    if state.process_index == 1:
        time.sleep(IT_HUNG)
    state.wait_for_everyone()


def test_a_collectives_time_out_says_where_the_late_rank_is(start_method: str) -> None:
    with (
        pytest.raises(RankError) as caught,
        running(is_late_for_a_barrier_with_a_time_out, start_method=start_method) as launch,
    ):
        launch.results()
    assert str(caught.value).startswith("rank 1 is ")
    assert f"late for barrier #1 ({line_of(is_late_for_a_barrier_with_a_time_out, 6)})" in str(caught.value)
    assert caught.value.others[1] == f"ran its own code, at {line_of(is_late_for_a_barrier_with_a_time_out, 5)}"


def test_a_launchs_own_time_out_says_what_was_wrong() -> None:
    with pytest.raises(LaunchTimeoutError) as caught:
        notebook_launcher(comes_late, ("/nowhere/", 1), num_processes=2, timeout=1.5, dashboard=False)
    first, *rest = str(caught.value).splitlines()
    assert first.startswith("the launch took longer than its timeout of 1.5 s: rank 1 ")
    assert f"  rank 1 ran its own code, at {line_of(comes_late, 4)}" in rest


# The watch by itself


@pytest.mark.parametrize(
    ("text", "seconds"), [(None, 10.0), ("2.5", 2.5), ("0", math.inf), ("-1", math.inf), ("soon", 10.0), ("", 10.0)]
)
def test_the_threshold_comes_from_the_environment(
    text: str | None, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NBSTATE_STALL_AFTER")
    if text is not None:
        monkeypatch.setenv("NBSTATE_STALL_AFTER", text)
    assert stall_after() == seconds


def test_nobody_is_disturbed_while_there_is_progress() -> None:
    board, asked = Board.create(2), []

    def look() -> Any:
        return board.snapshot(), time.monotonic_ns()

    def note(with_stacks: bool) -> dict[int, Observed]:
        asked.append(with_stacks)
        return {}

    watch = StallWatch(0.4, look, note, {}, lambda text: None)
    try:
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            board.slot(0).write(phase=Phase.RUNNING, step=int(1e6 * time.monotonic()))
            watch.tick(active=True)
            time.sleep(0.05)
        assert asked == []
        wait_until(lambda: watch.tick(active=True) or True in asked, "a closer look")
        assert asked[:2] == [False, False]  # whether it works, before it is asked for its stack
        assert watch.verdict is None
    finally:
        watch.rest()
        board.close()


def test_what_waits_for_others_does_not_count_as_work() -> None:
    board = Board.create(2)
    board.slot(0).write(phase=Phase.COLLECTIVE)
    board.slot(1).write(phase=Phase.RUNNING)
    snapshots = board.snapshot()
    board.close()
    before = {rank: Observed(rank, "running", 1.0, 1000) for rank in (0, 1)}

    def after(rank: int, cpu: float, moved: int) -> dict[int, Observed]:
        return {**before, rank: Observed(rank, "running", 1.0 + cpu, 1000 + moved)}

    assert not has_worked(snapshots, before, after(0, 5.0, 1 << 30), 5.0)
    assert not has_worked(snapshots, before, after(1, 0.02, 1000), 5.0)
    assert has_worked(snapshots, before, after(1, 0.1, 0), 5.0)
    assert has_worked(snapshots, before, after(1, 0.0, 1 << 20), 5.0)
    assert not has_worked(snapshots, {}, after(1, 9.0, 1 << 30), 5.0)
    unknown = {1: Observed(1)}
    assert not has_worked(snapshots, unknown, unknown, 5.0)


def test_what_is_seen_of_processes() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        psutil.Process(child.pid).suspend()
        seen = observe({0: os.getpid(), 1: child.pid, 2: 0, 3: -1})
    finally:
        child.kill()
        child.communicate()
    assert seen[0].process in ("running", "sleeping")
    assert seen[0].cpu_seconds > 0
    assert seen[0].io_bytes > 0
    assert seen[1].process == "stopped"
    assert (seen[2].process, seen[3].process) == ("unknown", "gone")
    assert observe({1: child.pid})[1].process == "gone"


def test_a_finding_says_where_a_guilty_rank_is_once() -> None:
    from nbstate.telemetry.diagnosis import Verdict

    stack = (StackFrame("/lib/python3/site-packages/a.py", 1, "a"), StackFrame("/home/me/train.py", 14, "train"))
    seen = {1: Observed(1, stack=stack)}
    assert Finding(Verdict("late", "rank 1 is late", (1,)), seen).lines[-1] == "rank 1 is at train.py:14"
    assert Finding(Verdict("late", "rank 1 is late at train.py:14", (1,)), seen).lines[1:] == ()
    assert Finding(Verdict("late", "rank 1 is late at train.py:141", (1,)), seen).lines[1:] == (
        "rank 1 is at train.py:14",
    )
    assert Finding(Verdict("well", "all is well"), seen).lines == ("all is well",)

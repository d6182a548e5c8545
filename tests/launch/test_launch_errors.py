"""Who is to blame, what the error says, and that nothing waits for a rank that will never come."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from nbstate import (
    LaunchStoppedError,
    LaunchTimeoutError,
    PartialState,
    RankError,
    ShippingError,
    notebook_launcher,
)

IT_HUNG = 30.0


def fails_while_the_other_waits() -> None:
    state = PartialState()
    if state.process_index == 1:
        time.sleep(0.2)
        raise ValueError("boom")
    state.wait_for_everyone()


def test_the_rank_that_raised_is_blamed_not_the_one_that_waited(start_method: str) -> None:
    """Case C03."""
    with pytest.raises(RankError) as caught:
        notebook_launcher(fails_while_the_other_waits, num_processes=2, start_method=start_method)
    error = caught.value
    assert error.rank == 1
    assert error.cause_type == "ValueError"
    assert isinstance(error.__cause__, ValueError)
    assert str(error.__cause__) == "boom"
    assert 'raise ValueError("boom")' in error.traceback
    assert "rank.py" not in error.traceback
    assert "waited in barrier #1" in error.others[0]
    assert str(error).startswith("rank 1 raised ValueError: boom (test_launch_errors.py:")
    assert "rank 0 waited in barrier #1" in str(error)


def only_rank_3_fails(path: str) -> None:
    if int(os.environ["RANK"]) == 3:
        with open(path, "w") as file:
            file.write(str(time.monotonic()))
        raise RuntimeError("before any collective")
    PartialState().wait_for_everyone()


def test_one_of_four_fails_before_its_first_collective(start_method: str, tmp_path: Path) -> None:
    """Case C04."""
    with pytest.raises(RankError, match="before any collective") as caught:
        notebook_launcher(only_rank_3_fails, (str(tmp_path / "at"),), num_processes=4, start_method=start_method)
    assert time.monotonic() - float((tmp_path / "at").read_text()) < 1.0  # all ranks gone, and the cell back
    assert caught.value.rank == 3


def dies(how: str) -> None:
    print("my last words", flush=True)
    if int(os.environ["RANK"]) == 1:
        os._exit(3) if how == "exit code 3" else os.kill(os.getpid(), signal.Signals[how])
    PartialState().wait_for_everyone()


@pytest.mark.parametrize(
    ("how", "start_method"),
    [("exit code 3", "fork"), ("SIGSEGV", "fork"), ("exit code 3", "forkserver"), ("SIGSEGV", "spawn")],
)
def test_a_rank_that_dies_is_named_with_its_phase_and_its_last_words(how: str, start_method: str) -> None:
    """Case C09; the fault matrix has more ways to die."""
    with pytest.raises(RankError) as caught:
        notebook_launcher(dies, (how,), num_processes=2, start_method=start_method)
    assert (caught.value.rank, caught.value.cause_type) == (1, how)
    assert "it ran its own code" in str(caught.value).split("\n")[0]
    assert caught.value.log_tail == ("my last words",)
    assert "my last words" in str(caught.value)


def exits_with_4() -> None:
    sys.exit(4)


def test_sys_exit_with_a_code_is_a_failure() -> None:
    with pytest.raises(RankError, match="SystemExit: 4"):
        notebook_launcher(exits_with_4, num_processes=1)


class AwkwardError(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")
        self.lock = threading.Lock()


def raises_what_cannot_be_pickled() -> None:
    raise AwkwardError(1, 2)


def test_an_exception_that_cannot_be_pickled_arrives_as_text(start_method: str) -> None:
    """Case C12."""
    with pytest.raises(RankError) as caught:
        notebook_launcher(raises_what_cannot_be_pickled, num_processes=1, start_method=start_method)
    assert caught.value.cause_type == "AwkwardError"
    assert caught.value.__cause__ is None
    assert "1 and 2" in caught.value.traceback


def rank_1_returns_a_lock() -> Any:
    rank = int(os.environ["RANK"])
    return threading.Lock() if rank == 1 else rank * 10


def test_a_result_that_cannot_be_pickled_is_named_and_the_others_stay(start_method: str) -> None:
    """Case C11."""
    with pytest.raises(ShippingError, match="rank 1 returned a lock") as caught:
        notebook_launcher(rank_1_returns_a_lock, num_processes=3, start_method=start_method)
    assert caught.value.results == {0: 0, 2: 20}


def finishes_early() -> None:
    state = PartialState()
    if state.is_main_process:
        state.wait_for_everyone()


def test_a_barrier_that_only_one_rank_enters_ends_with_the_absent_ranks_named() -> None:
    """Case C05."""
    with pytest.raises(RankError) as caught:
        notebook_launcher(finishes_early, num_processes=3, timeout=IT_HUNG)
    assert caught.value.rank == 0
    assert caught.value.others == {1: "had finished", 2: "had finished"}
    assert "[1, 2]" in str(caught.value) or "1, 2" in str(caught.value)


def the_others_wait_for_rank_0() -> None:
    state = PartialState()
    if not state.is_main_process:
        state.wait_for_everyone()


def test_a_barrier_that_rank_0_never_enters_ends_too() -> None:
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        notebook_launcher(the_others_wait_for_rank_0, num_processes=2, timeout=IT_HUNG)
    assert caught.value.rank == 1
    assert time.monotonic() - began < IT_HUNG


def sleeps() -> None:
    time.sleep(60)


def test_timeout_bounds_the_whole_launch(start_method: str) -> None:
    began = time.monotonic()
    with pytest.raises(LaunchTimeoutError, match=r"its timeout of 0\.5 s"):
        notebook_launcher(sleeps, num_processes=2, timeout=0.5, start_method=start_method)
    assert time.monotonic() - began < IT_HUNG


def loops(path: str) -> None:
    try:
        while True:
            time.sleep(0.01)
    finally:
        with open(os.path.join(path, os.environ["RANK"]), "w") as file:
            file.write("unwound")


def wait_until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + IT_HUNG
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.01)


def test_stop_lets_finally_blocks_run(start_method: str, tmp_path: Any) -> None:
    launch = notebook_launcher(loops, (str(tmp_path),), num_processes=2, start_method=start_method, block=False)
    wait_until(lambda: all(rank.board.phase.name == "RUNNING" for rank in launch.ranks), "the ranks run")
    launch.stop(grace=5.0)
    with pytest.raises(LaunchStoppedError):
        launch.results()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "1"]


def ignores_everything() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(0.01)


def test_stop_ends_ranks_that_will_not_listen(start_method: str) -> None:
    launch = notebook_launcher(ignores_everything, num_processes=2, start_method=start_method, block=False)
    wait_until(lambda: all(rank.board.phase.name == "RUNNING" for rank in launch.ranks), "the ranks run")
    launch.stop()
    assert launch.wait(IT_HUNG)
    assert [rank.alive for rank in launch.ranks] == [False, False]


def test_interrupt_from_python(start_method: str, tmp_path: Any) -> None:
    launch = notebook_launcher(loops, (str(tmp_path),), num_processes=2, start_method=start_method, block=False)
    wait_until(lambda: all(rank.board.phase.name == "RUNNING" for rank in launch.ranks), "the ranks run")
    launch.interrupt()
    with pytest.raises(KeyboardInterrupt):
        launch.results()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "1"]


def stuck_in_cpp() -> None:
    state = PartialState()
    if state.process_index == 0:
        state.wait_for_everyone()
    while True:
        time.sleep(0.01)


def test_stop_ends_a_rank_that_is_stuck_in_a_collective(start_method: str) -> None:
    launch = notebook_launcher(stuck_in_cpp, num_processes=2, start_method=start_method, block=False)
    wait_until(lambda: launch.ranks[0].board.in_barrier, "rank 0 waits in the barrier")
    launch.stop()
    assert launch.wait(IT_HUNG)


def dies_after_its_result() -> int:
    import atexit

    atexit.register(os.kill, os.getpid(), signal.SIGSEGV)
    return 7


def test_a_death_after_the_result_is_a_warning(capfd: pytest.CaptureFixture[str]) -> None:
    """Case C39."""
    assert notebook_launcher(dies_after_its_result, num_processes=1) == [7]
    assert "rank 0 was ended by SIGSEGV after its result had arrived" in capfd.readouterr().err

"""What ``max_restarts`` and ``timeout`` do: new ranks after a failure, never after somebody's wish, and one clock."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from nbstate import LaunchStoppedError, LaunchTimeoutError, PartialState, RankError, last_launch, notebook_launcher
from nbstate.launch.attempts import Attempts
from nbstate.launch.supervisor import Supervisor

IT_HUNG = 60.0


def fails_until(attempt: int) -> tuple[int, str, int]:
    state = PartialState()
    now = int(os.environ["NBSTATE_ATTEMPT"])
    print(f"attempt {now}")
    if now < attempt and state.process_index == 1:
        raise ValueError(f"not yet, {now}")
    state.wait_for_everyone()
    return now, os.environ["TORCHELASTIC_RESTART_COUNT"], int(os.environ["MASTER_PORT"])


def test_ranks_are_restarted_until_all_is_well(start_method: str, capsys: pytest.CaptureFixture[str]) -> None:
    last = 1 if start_method == "spawn" else 2
    results = notebook_launcher(fails_until, (last,), 2, max_restarts=3, start_method=start_method)
    assert [r[:2] for r in results] == [(last, str(last))] * 2
    launch = last_launch()
    assert launch is not None
    assert (launch.attempt, launch.port) == (last, results[0][2])
    assert [rank.board.attempt for rank in launch.ranks] == [last, last]
    assert launch.logs(1).splitlines() == [f"attempt {number}" for number in range(last + 1)]
    shown = capsys.readouterr()
    lines = [line for line in shown.err.splitlines() if line.startswith("nbstate")]
    where = f"({os.path.basename(__file__)}:{fails_until.__code__.co_firstlineno + 5})"
    assert lines == [
        f"nbstate: rank 1 raised ValueError: not yet, {n} {where}; restarting all 2 ranks (attempt {n + 2} of 4)"
        for n in range(last)
    ]
    assert shown.out.count(f"[1] attempt {last}") == 1


def dies_in_each_attempt() -> None:
    if os.environ["RANK"] == "0":
        print(f"dying in attempt {os.environ['NBSTATE_ATTEMPT']}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


def test_the_last_failure_is_raised_and_says_how_many_there_were() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 0 was ended by SIGKILL.*ended attempt 2 of 2") as caught:
        notebook_launcher(dies_in_each_attempt, num_processes=2, max_restarts=1, start_method="fork")
    assert caught.value.cause_type == "SIGKILL"
    assert caught.value.log_tail[-1] == "dying in attempt 1"


def notes_the_attempt_and_waits(folder: str) -> None:
    (Path(folder) / f"{os.environ['NBSTATE_ATTEMPT']}-{os.environ['RANK']}").touch()
    if os.environ["NBSTATE_ATTEMPT"] == "0" and os.environ["RANK"] == "1":
        raise ValueError("once")
    threading.Event().wait()


@pytest.mark.parametrize("order", ["interrupt", "stop"])
def test_no_restart_after_an_interrupt_or_a_stop(tmp_path: Path, order: str) -> None:
    launch = notebook_launcher(
        notes_the_attempt_and_waits, (str(tmp_path),), 2, max_restarts=5, start_method="fork", block=False
    )
    deadline = time.monotonic() + IT_HUNG
    while not {"1-0", "1-1"} <= {path.name for path in tmp_path.iterdir()}:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    getattr(launch, order)()
    with pytest.raises(KeyboardInterrupt if order == "interrupt" else LaunchStoppedError):
        launch.results()
    assert launch.attempt == 1


def test_a_stop_between_two_attempts_starts_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Attempts._next

    def stopped_meanwhile(self: Attempts) -> None:
        self.stop(0.0)
        real(self)

    monkeypatch.setattr(Attempts, "_next", stopped_meanwhile)
    launch = notebook_launcher(dies_in_each_attempt, num_processes=2, max_restarts=1, start_method="fork", block=False)
    with pytest.raises(LaunchStoppedError):
        launch.results()
    assert [rank.pid for rank in launch.ranks] == [0, 0]


def test_the_timeout_bounds_all_attempts_together() -> None:
    def fails_slowly() -> None:
        time.sleep(0.2)
        raise ValueError("again")

    began = time.monotonic()
    with pytest.raises((LaunchTimeoutError, RankError)):
        notebook_launcher(fails_slowly, num_processes=1, max_restarts=10_000, timeout=0.7, start_method="fork")
    assert time.monotonic() - began < IT_HUNG
    launch = last_launch()
    assert launch is not None
    assert launch.attempt < 4


def test_a_time_out_says_the_verdict() -> None:
    def one_stays_away() -> None:
        state = PartialState()
        if state.process_index == 1:
            time.sleep(IT_HUNG)
        state.wait_for_everyone()

    with pytest.raises(LaunchTimeoutError) as caught:
        notebook_launcher(one_stays_away, num_processes=2, timeout=2.0, start_method="fork")
    first, *rest = str(caught.value).splitlines()
    assert first.startswith("the launch took longer than its timeout of 2 s: rank 1 is ")
    assert "late for barrier #1" in first
    assert any("rank 0 waited in barrier #1" in line for line in rest)


def test_a_port_that_was_asked_for_is_used_again_after_a_restart() -> None:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = notebook_launcher(fails_until, (1,), 2, use_port=port, max_restarts=1, start_method="fork")
    assert [r[2] for r in results] == [port, port]


def test_an_interrupt_while_the_engine_comes_up_starts_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    from nbstate.launch.engines import LocalEngine

    monkeypatch.setattr(LocalEngine, "ready", lambda self: False)
    launch = notebook_launcher(print, num_processes=2, block=False)
    launch.interrupt()
    with pytest.raises(KeyboardInterrupt):
        launch.results()
    assert launch.ranks[0].pid == 0


def test_orders_may_be_given_from_a_signals_handler_at_any_moment() -> None:
    """The handler of a second SIGINT may run in the middle of the first one's, on the same thread."""
    launch = notebook_launcher(threading.Event().wait, num_processes=2, start_method="fork", block=False)
    supervisor = launch._supervisor
    assert isinstance(supervisor, Supervisor)
    with supervisor._wake_lock:
        launch.interrupt()
        launch.interrupt()
    with pytest.raises(KeyboardInterrupt):
        launch.results()
    assert not any(psutil.pid_exists(rank.pid) for rank in launch.ranks)

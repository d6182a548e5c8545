"""What users' objects do on the way to a rank and back: the kernel lives on, and the error names who and what."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from nbstate import LaunchError, RankError, ShippingError, last_launch, notebook_launcher
from nbstate.launch import environ
from nbstate.launch.engines import LocalEngine


class Trap:
    """Does something bad when unpickled."""

    def __init__(self, act: Any, argument: Any) -> None:
        self.act, self.argument = act, argument

    def __reduce__(self) -> Any:
        return self.act, (self.argument,)


def fail(text: str) -> None:
    raise ValueError(text)


@pytest.mark.parametrize(
    ("act", "argument", "cause"),
    [(fail, "bad luck", "ValueError"), (sys.exit, 0, "SystemExit"), (os._exit, 5, "exit code 5")],
)
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_an_argument_whose_unpickling_fails_in_the_rank(start_method: str, act: Any, argument: Any, cause: str) -> None:
    """Case C37."""
    with pytest.raises(RankError) as caught:
        notebook_launcher(repr, (Trap(act, argument),), num_processes=2, start_method=start_method)
    assert caught.value.cause_type == cause


class LeavesWhenPickled:
    def __reduce__(self) -> Any:
        sys.exit(3)


cannot_travel = LeavesWhenPickled()


def uses_a_global() -> Any:
    return cannot_travel


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_a_global_whose_pickling_leaves_is_named(start_method: str) -> None:
    """Case C37."""
    with pytest.raises(ShippingError, match=r"the global 'cannot_travel' that uses_a_global\(\) uses .*SystemExit: 3"):
        notebook_launcher(uses_a_global, num_processes=2, start_method=start_method)


class RefusesToReturn:
    def __init__(self, act: Any) -> None:
        self.act = act

    def __reduce__(self) -> Any:
        return self.act()


def exits() -> Any:
    sys.exit(3)


def dies() -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def returns_trouble_from_rank_1(act: Any) -> Any:
    return RefusesToReturn(act) if os.environ["RANK"] == "1" else "fine"


def test_a_result_whose_pickling_leaves(start_method: str) -> None:
    """Case C38."""
    with pytest.raises(ShippingError, match=r"rank 1 returned a RefusesToReturn .*SystemExit: 3") as caught:
        notebook_launcher(returns_trouble_from_rank_1, (exits,), num_processes=2, start_method=start_method)
    assert caught.value.results == {0: "fine"}


def test_a_result_whose_pickling_kills_the_rank(start_method: str) -> None:
    """Case C38."""
    with pytest.raises(RankError, match="SIGKILL") as caught:
        notebook_launcher(returns_trouble_from_rank_1, (dies,), num_processes=2, start_method=start_method)
    assert caught.value.rank == 1


def returns_a_bomb(act: Any, argument: Any) -> Any:
    return Trap(act, argument) if os.environ["RANK"] == "0" else "fine"


@pytest.mark.parametrize(
    ("start_method", "act", "argument", "said"),
    [
        ("fork", fail, "on arrival", "ValueError: on arrival"),
        ("fork", sys.exit, 3, "SystemExit: 3"),
        ("forkserver", fail, "on arrival", "ValueError: on arrival"),
        ("spawn", sys.exit, 3, "SystemExit: 3"),
    ],
)
def test_a_result_whose_unpickling_fails_in_the_kernel(start_method: str, act: Any, argument: Any, said: str) -> None:
    """Case C38."""
    with pytest.raises(ShippingError, match=rf"rank 0 returned a result .*{said}") as caught:
        notebook_launcher(returns_a_bomb, (act, argument), num_processes=2, start_method=start_method)
    assert caught.value.results == {1: "fine"}


def test_a_rank_that_cannot_be_started_takes_those_before_it_along(monkeypatch: pytest.MonkeyPatch) -> None:
    real, started = LocalEngine._start_one, []

    def start_one(self: LocalEngine, plan: Any) -> Any:
        if plan.rank == 2:
            raise LaunchError("no more processes")
        started.append(real(self, plan))
        return started[-1]

    monkeypatch.setattr(LocalEngine, "_start_one", start_one)
    with pytest.raises(LaunchError, match="no more processes"):
        notebook_launcher(threading.Event().wait, num_processes=3, start_method="fork")
    assert len(started) == 2


@contextlib.contextmanager
def changing_environment() -> Iterator[None]:
    """A thread that does nothing but set and delete variables."""
    stop = threading.Event()

    def change() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            os.environ[f"CHANGES_{number % 50}"] = str(number)
            os.environ.pop(f"CHANGES_{(number + 25) % 50}", None)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        for name in [name for name in os.environ if name.startswith("CHANGES_")]:
            del os.environ[name]


@pytest.mark.parametrize(("start_method", "launches"), [("forkserver", 20), ("spawn", 3)])
def test_environment_changes_all_the_time_while_launches_start(start_method: str, launches: int) -> None:
    """Case C42; a fork is refused beside such a thread."""
    with changing_environment():
        for _ in range(launches):
            assert notebook_launcher(int, num_processes=2, start_method=start_method) == [0, 0]


def test_a_process_starts_while_a_thread_changes_the_environment() -> None:
    """Case C42, at its cause: one in five ended at once before."""
    with changing_environment():
        started = [environ.spawn("/bin/true", ["true"], []) for _ in range(50)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in started]
    assert codes == [0] * 50


def test_the_last_launch_can_be_looked_at_after_its_end() -> None:
    notebook_launcher(print, ("hello",), num_processes=2)
    launch = last_launch()
    assert launch is not None
    assert [rank.alive for rank in launch.ranks] == [False, False]
    assert [rank.exitcode for rank in launch.ranks] == [0, 0]
    assert [rank.board.phase.name for rank in launch.ranks] == ["FINISHED", "FINISHED"]
    assert repr(launch) == "<Launch of print on 2 ranks, forkserver, finished>"

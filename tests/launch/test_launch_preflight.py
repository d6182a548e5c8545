"""Which start method auto takes and why, and when a fork is refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from real_kernel import RealKernel

from nbstate import ForkUnsafeError, ShippingError, notebook_launcher
from nbstate.launch import preflight
from nbstate.launch.preflight import choose_start_method, why_not_fork

lock = threading.Lock()


def uses_a_lock() -> bool:
    with lock:
        return True


def calls_what_uses_a_lock() -> bool:
    return uses_a_lock()


def one() -> int:
    return 1


@pytest.fixture
def busy_thread() -> Iterator[None]:
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            sum(range(100))

    thread = threading.Thread(target=compute, name="busy")
    thread.start()
    yield
    stop.set()
    thread.join()


@pytest.fixture
def fake_cuda_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel in which a cell has touched the GPU; there is none here."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)


def test_a_quiet_process_can_fork() -> None:
    assert why_not_fork() == ()


@pytest.mark.usefixtures("busy_thread")
def test_a_thread_that_computes_makes_a_fork_unsafe() -> None:
    deadline = time.monotonic() + 10
    while not (reasons := why_not_fork()):
        assert time.monotonic() < deadline
    assert reasons == ("thread 'busy' may be computing at the moment of the fork",)
    with pytest.raises(ForkUnsafeError, match="'busy'"):
        notebook_launcher(one, num_processes=2, start_method="fork")
    assert notebook_launcher(one, num_processes=2) == [1, 1]


def test_a_thread_that_is_in_c_counts_as_busy() -> None:
    done = threading.Lock()
    done.acquire()
    thread = threading.Thread(target=done.acquire, name="in C")  # as one in a long call of numpy's
    thread.start()
    try:
        deadline = time.monotonic() + 10
        while not (reasons := why_not_fork()):
            assert time.monotonic() < deadline
        assert reasons == ("thread 'in C' may be computing at the moment of the fork",)
    finally:
        done.release()
        thread.join()


def test_a_pool_without_work_does_not_count_as_busy() -> None:
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(len, ["a", "bc"])) == [1, 2]
        deadline = time.monotonic() + 10
        while why_not_fork():  # its threads may be on the way to their wait
            assert time.monotonic() < deadline
        held = threading.Lock()
        held.acquire()
        pool.submit(held.acquire)
        try:
            while not why_not_fork():
                assert time.monotonic() < deadline + 10
        finally:
            held.release()


@pytest.mark.usefixtures("fake_cuda_was_used")
def test_a_kernel_that_used_the_accelerator_can_still_launch() -> None:  # C23
    with pytest.raises(ForkUnsafeError, match="cuda was already used in this process"):
        notebook_launcher(one, num_processes=2, start_method="fork")
    assert notebook_launcher(one, num_processes=2) == [1, 1]


def test_auto_takes_forkserver() -> None:
    assert choose_start_method("auto", one, (), {}).start_method == "forkserver"


def test_auto_falls_back_to_fork_for_what_cannot_travel_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:  # C21
    assert notebook_launcher(uses_a_lock, num_processes=2) == [True, True]
    out = capsys.readouterr().out
    assert out == "nbstate: start method fork, since the global 'lock' that uses_a_lock() uses (lock) cannot travel\n"


@pytest.mark.parametrize("function", [uses_a_lock, calls_what_uses_a_lock])
@pytest.mark.usefixtures("fake_cuda_was_used")
def test_what_cannot_travel_is_named_where_a_fork_is_unsafe(function: Any) -> None:
    with pytest.raises(ShippingError, match=r"the global 'lock' that uses_a_lock\(\) uses .* not safe: cuda"):
        notebook_launcher(function, num_processes=2)


def test_an_argument_that_cannot_travel_is_named() -> None:
    with pytest.raises(ShippingError, match=r"args\[1\] \(lock\) cannot travel"):
        notebook_launcher(max, (1, lock), num_processes=2, start_method="forkserver")
    with pytest.raises(ShippingError, match=r"kwargs\['key'\] \(lock\) cannot travel"):
        notebook_launcher(max, (1, 2), kwargs={"key": lock}, num_processes=2, start_method="spawn")


class ExitsWhenPickled:
    def __reduce__(self) -> Any:
        raise SystemExit("out")


def test_an_argument_whose_pickling_leaves_is_named_and_the_kernel_lives_on() -> None:  # C37
    with pytest.raises(ShippingError, match=r"args\[0\] \(ExitsWhenPickled\) cannot travel .*SystemExit: out"):
        notebook_launcher(repr, (ExitsWhenPickled(),), num_processes=2, start_method="forkserver")


def test_auto_takes_spawn_where_there_is_no_fork(monkeypatch: pytest.MonkeyPatch) -> None:  # C25
    monkeypatch.setattr(preflight, "available_start_methods", lambda: ("spawn",))
    assert notebook_launcher(one, num_processes=2) == [1, 1]
    for method in ("fork", "forkserver"):
        with pytest.raises(ForkUnsafeError, match="fork"):
            notebook_launcher(one, num_processes=2, start_method=method)


CANNOT_TRAVEL = """
import ipywidgets, threading
lock, slider, shell = threading.Lock(), ipywidgets.IntSlider(value=3), get_ipython()
def locks():
    with lock: return lock.locked()
def slides(): return slider.value
def asks(): return get_ipython() is not None
def shells(): return type(shell).__name__
"""


@pytest.mark.parametrize(
    ("function", "named", "returned"),
    [
        ("locks", "the global 'lock' that locks() uses (lock)", True),
        ("slides", "the global 'slider' that slides() uses (IntSlider)", 3),
        ("asks", "get_ipython", True),
        ("shells", "the global 'shell' that shells() uses (ZMQInteractiveShell)", "ZMQInteractiveShell"),
    ],
)
def test_what_no_notebook_function_can_carry(kernel: RealKernel, function: str, named: str, returned: Any) -> None:
    """C21: forked where that is safe, else refused by name."""
    kernel.good(CANNOT_TRAVEL)
    launch = f"notebook_launcher({function}, num_processes=2, dashboard=False)"
    reply = kernel.good(launch)
    assert reply.result == repr([returned] * 2)
    assert reply.stdout.startswith("nbstate: start method fork, since ")
    assert named in reply.stdout
    kernel.good("honest = torch.cuda.is_initialized; torch.cuda.is_initialized = lambda: True  # a fake: no GPU here")
    try:
        refused = kernel.run(launch)
    finally:
        kernel.good("torch.cuda.is_initialized = honest")
    assert refused.error.startswith("ShippingError: ")
    assert named in refused.error
    assert "A fork would carry it, but is not safe: cuda was already used in this process" in refused.error

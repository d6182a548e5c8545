"""The canary: what becomes of it in good and in bad forks."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from nbstate.launch import canary
from nbstate.launch.canary import send_canary

_in_child: list[Callable[[], object]] = []
os.register_at_fork(after_in_child=lambda: [act() for act in _in_child])  # cannot be taken back, so it asks the list


@pytest.fixture
def bad_fork() -> Iterator[list[Callable[[], object]]]:
    """What a forked child does before anything else, as a library's handler would."""
    yield _in_child
    _in_child.clear()


def test_it_comes_through_and_is_gone() -> None:
    torch.ones(1 << 22).sum()  # starts the pool of threads that a fork does not copy
    report = send_canary()
    assert report.alive, report.text
    assert report.text.startswith("a forked child printed and computed")


def test_it_says_nothing_in_the_notebook(capfd: pytest.CaptureFixture[str]) -> None:
    assert send_canary().alive
    assert capfd.readouterr() == ("", "")


def test_it_comes_through_while_no_interrupt_can_end_it() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert send_canary().alive
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_one_that_hangs_is_killed_at_the_deadline(bad_fork: list[Callable[[], object]]) -> None:
    bad_fork.append(lambda: time.sleep(60))
    began = time.monotonic()
    report = send_canary(deadline=0.3)
    assert not report.alive
    assert report.text.startswith("a forked child hung when it was to print, and was killed after")
    assert time.monotonic() - began < 30


def test_it_says_what_it_was_about_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    held = threading.Lock()
    held.acquire()
    monkeypatch.setattr(canary.torch, "ones", lambda *_: held.acquire())  # as a lock that no thread here releases
    assert "hung when it was to compute" in send_canary(deadline=2.0).text


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "a forked child was ended by SIGKILL"),
        (lambda: os._exit(3), "a forked child ended with exit code 3"),
        (lambda: os._exit(0), "a forked child ended with exit code 0"),
    ],
)
def test_one_that_ends_early_is_no_good_sign(
    bad_fork: list[Callable[[], object]], ends: Callable[[], object], said: str
) -> None:
    bad_fork.append(ends)
    report = send_canary()
    assert (report.alive, report.text) == (False, said)


def test_a_device_that_the_child_cannot_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # a fake, since no GPU is here: what torch says in a child of a process that has asked CUDA for its devices
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    report = send_canary()
    assert (report.alive, report.text) == (False, "in a forked child torch refuses to use cuda")


def test_where_there_is_no_fork_none_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:  # C25
    monkeypatch.setattr(canary, "available_start_methods", lambda: ("spawn",))
    monkeypatch.setattr(os, "fork", None)
    assert "has no fork" in send_canary().text


def test_a_fork_that_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    assert send_canary().text == "the fork itself failed: Resource temporarily unavailable"
    assert (len(os.listdir("/proc/self/fd")) if before else 0) == before

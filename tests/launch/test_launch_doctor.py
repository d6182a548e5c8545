"""nbstate.preflight(): what it finds, what it says to do, and that it only looks."""

from __future__ import annotations

import os
import sys
from types import ModuleType

import pytest
import torch

import nbstate
from nbstate.launch import canary, doctor, preflight
from nbstate.launch.canary import Canary


@pytest.fixture
def fake_cuda_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel in which a cell has touched the GPU; there is none here."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)


def test_a_quiet_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fork", None)  # it starts nothing
    report = nbstate.preflight()
    assert (report.may_fork, report.reasons, report.start_method) == (True, (), "forkserver")
    assert report.canary is None
    assert report.advice == "Nothing: launch with start_method='auto'."
    assert repr(report).splitlines()[0] == "preflight       this kernel may fork"
    assert repr(report).splitlines()[-1] == f"what to do      {report.advice}"


def test_to_look_touches_nothing() -> None:
    before = set(sys.modules)
    nbstate.preflight()
    assert not torch.cuda.is_initialized()
    assert {name.split(".")[0] for name in set(sys.modules) - before} <= {"threadpoolctl"}


@pytest.mark.usefixtures("fake_cuda_was_used")
def test_a_device_in_use_is_the_reason() -> None:
    report = nbstate.preflight()
    assert not report.may_fork
    assert report.reasons == ("cuda was already used in this process, and no fork of it can use cuda again",)
    assert [(use.kind, use.used) for use in report.devices] == [("cuda", True)]
    assert report.start_method == "forkserver"
    assert "a call that cannot travel is refused" in report.why
    assert "restart the kernel and move what uses the device into the launched function" in report.advice


@pytest.mark.parametrize("kind", ["xpu", "npu", "mlu", "musa", "hpu"])
def test_every_kind_of_the_table_is_asked(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    fake = ModuleType(f"Fake{kind}")
    fake.is_initialized = lambda: True  # type: ignore[attr-defined]
    fake.device_count = lambda: 2  # type: ignore[attr-defined]
    monkeypatch.setattr(torch, kind, fake, raising=False)
    [use] = [use for use in nbstate.preflight().devices if use.kind == kind]
    assert str(use) == f"2 {kind}: in use"
    fake.is_initialized = lambda: False  # type: ignore[attr-defined]
    [use] = [use for use in nbstate.preflight().devices if use.kind == kind]
    assert str(use) == f"2 {kind}: not touched"
    assert nbstate.preflight().may_fork


def test_xla_is_asked_without_being_started(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("torch_xla._XLAC")
    monkeypatch.setitem(sys.modules, "torch_xla._XLAC", fake)
    fake._xla_runtime_is_initialized = lambda: False  # type: ignore[attr-defined]
    assert nbstate.preflight().may_fork
    fake._xla_runtime_is_initialized = lambda: True  # type: ignore[attr-defined]
    assert "xla was already used" in nbstate.preflight().reasons[0]


def test_a_plugin_that_fails_when_asked_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> bool:
        raise RuntimeError("driver not loaded")

    monkeypatch.setattr(torch.cuda, "is_initialized", fail)
    assert nbstate.preflight().may_fork


def test_a_dead_canary_outweighs_what_was_inferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "send_canary", lambda: Canary(False, "a forked child was ended by SIGSEGV"))
    report = nbstate.preflight(canary=True)
    assert (report.may_fork, report.reasons) == (False, ("a forked child was ended by SIGSEGV",))
    assert "restart the kernel" in report.advice


def test_where_there_is_no_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case C25."""
    for module in (preflight, doctor, canary):
        monkeypatch.setattr(module, "available_start_methods", lambda: ("spawn",))
    report = nbstate.preflight(canary=True)
    assert (report.may_fork, report.start_method, report.canary) == (False, "spawn", None)
    assert "has no fork" in report.reasons[0]
    assert "each rank is a new Python" in report.why
    assert "start_method='auto'" in report.advice


def test_without_threadpoolctl_torch_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "threadpoolctl", None)
    [line] = nbstate.preflight().pools
    assert line.endswith(f"torch computes on {torch.get_num_threads()}")


def test_html_escapes_what_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "busy_threads", lambda: ("thread '<b>'",))
    html = nbstate.preflight()._repr_html_()
    assert "&lt;b&gt;" in html
    assert "<b>" not in html

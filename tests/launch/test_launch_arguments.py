"""Every bad argument is caught before a process exists, and the text says what is accepted."""

from __future__ import annotations

from typing import Any

import pytest

from nbstate import notebook_launcher
from nbstate.launch.spec import CPU_DEFAULT_RANKS, LaunchSpec


def nothing() -> None: ...


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    from nbstate.launch.engines import LocalEngine

    def refuse(*_: object) -> None:
        pytest.fail("a process was about to be started")

    monkeypatch.setattr(LocalEngine, "start", refuse)


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"function": None}, TypeError, "can be called"),
        ({"function": 3}, TypeError, "can be called"),
        ({"args": 5}, TypeError, r"args=\(5,\)"),
        ({"args": "abc"}, TypeError, "tuple"),
        ({"args": (1,)}, TypeError, "cannot be called with"),
        ({"kwargs": {"x": 1}}, TypeError, "cannot be called with"),
        ({"kwargs": 3}, TypeError, "dict"),
        ({"num_processes": 0}, ValueError, "1 or more"),
        ({"num_processes": -1}, ValueError, "1 or more"),
        ({"num_processes": "2"}, TypeError, "whole number"),
        ({"num_processes": 1.5}, TypeError, "whole number"),
        ({"num_processes": True}, TypeError, "whole number"),
        ({"mixed_precision": "fp17"}, ValueError, "'no', 'fp16', 'bf16', 'fp8'"),
        ({"mixed_precision": 16}, TypeError, "'no', 'fp16', 'bf16', 'fp8'"),
        ({"start_method": "thread"}, ValueError, "'auto', 'fork', 'forkserver', 'spawn'"),
        ({"engine": "slurm"}, ValueError, "'local', 'ray', 'elastic'"),
        ({"device": "tpu"}, ValueError, "'cpu'"),
        ({"use_port": 70000}, ValueError, "65535"),
        ({"use_port": "http"}, TypeError, "port number"),
        ({"use_port": -1}, ValueError, "65535"),
        ({"master_addr": ""}, TypeError, "master_addr"),
        ({"master_addr": "192.0.2.1"}, ValueError, "master_addr"),
        ({"node_rank": 1}, ValueError, "node_rank"),
        ({"num_nodes": 0}, ValueError, "num_nodes"),
        ({"max_restarts": -1}, ValueError, "max_restarts"),
        ({"max_restarts": "1"}, TypeError, "max_restarts"),
        ({"monitor_interval": 0}, ValueError, "monitor_interval"),
        ({"rdzv_backend": "etcd"}, ValueError, "'static', 'c10d'"),
        ({"log_line_prefix_template": 3}, TypeError, "rank"),
        ({"threads_per_rank": 0}, ValueError, "threads_per_rank"),
        ({"threads_per_rank": 1.0}, TypeError, "threads_per_rank"),
        ({"timeout": 0}, ValueError, "timeout"),
        ({"timeout": "1"}, TypeError, "timeout"),
        ({"timeout": float("nan")}, ValueError, "timeout"),
        ({"dashboard": "yes"}, ValueError, "'auto'"),
        ({"block": 1}, TypeError, "block"),
        ({"env": {"A": 1}}, TypeError, "str to str"),
        ({"env": {"A=B": "1"}}, ValueError, "A=B"),
        ({"num_nodes": 2}, NotImplementedError, "one machine"),
        ({"engine": "ray"}, NotImplementedError, "'local'"),
        ({"rdzv_endpoint": "host:1"}, NotImplementedError, "rdzv_endpoint"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], kind: type[Exception], words: str) -> None:  # C26
    with pytest.raises(kind, match=words):
        notebook_launcher(**{"function": nothing, "num_processes": 2, **arguments})


class FakeTable:
    """A machine with two devices of a kind that is not here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        monkeypatch.setattr("nbstate.launch.spec.device_count", lambda kind: count if kind in ("cuda", "cpu") else 0)


def test_more_ranks_than_devices_gives_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeTable(monkeypatch, 2)
    with pytest.raises(ValueError, match=r"num_processes=3, but this machine has 2 cuda device\(s\)"):
        LaunchSpec.check(nothing, num_processes=3)
    assert LaunchSpec.check(nothing, num_processes=3, device="cpu").device == "cpu"
    assert LaunchSpec.check(nothing, num_processes=3, env={"NBSTATE_SHARE_DEVICES": "1"}).num_processes == 3


def test_num_processes_left_out_is_one_rank_per_device(monkeypatch: pytest.MonkeyPatch) -> None:  # C27
    FakeTable(monkeypatch, 2)
    spec = LaunchSpec.check(nothing)
    assert (spec.num_processes, spec.device, spec.notes) == (2, "cuda", ())


def test_num_processes_left_out_on_a_cpu_says_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:  # C27
    assert notebook_launcher(nothing) == [None] * CPU_DEFAULT_RANKS
    assert f"launching {CPU_DEFAULT_RANKS} ranks on the CPU" in capsys.readouterr().out


def test_positional_order_is_accelerates() -> None:
    import inspect

    import accelerate

    theirs = list(inspect.signature(accelerate.notebook_launcher).parameters)
    ours = inspect.signature(notebook_launcher).parameters
    assert [name for name, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD] == theirs


def test_a_mixed_precision_enum_member_is_accepted() -> None:
    from nbstate.utils import PrecisionType

    assert LaunchSpec.check(nothing, num_processes=1, mixed_precision=PrecisionType.BF16).mixed_precision == "bf16"

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from nbstate.errors import ArgumentValueError
from nbstate.state import DEVICE_KINDS, DistributedType, device_count, memory, pick_device_kind

NO_ACCELERATOR = not any(kind.count() for kind in DEVICE_KINDS.values() if kind.automatic and kind.name != "cpu")
only_cpu = pytest.mark.skipif(not NO_ACCELERATOR, reason="this machine has an accelerator")


@pytest.fixture
def fake_cuda(monkeypatch):
    """FakeCuda: a machine with two CUDA devices on which asking for more than their number is an error."""

    def poisons_forks(*args):
        raise AssertionError("this call creates a CUDA context")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    for name in ("is_available", "current_device", "mem_get_info", "set_device", "init"):
        monkeypatch.setattr(torch.cuda, name, poisons_forks)


def test_the_table_has_every_kind():
    assert {name: kind.backend for name, kind in DEVICE_KINDS.items()} == {
        "cuda": "nccl",
        "xpu": "xccl",
        "npu": "hccl",
        "mlu": "cncl",
        "musa": "mccl",
        "hpu": "hccl",
        "mps": "gloo",
        "xla": "xla",
        "cpu": "gloo",
    }
    assert DEVICE_KINDS["cpu"].distributed_type is DistributedType.MULTI_CPU
    assert DEVICE_KINDS["cuda"].distributed_type is DistributedType.MULTI_GPU
    types = [kind.distributed_type for kind in DEVICE_KINDS.values()]
    assert len(types) == len(set(types))


def test_the_table_cannot_be_changed():
    with pytest.raises(TypeError):
        DEVICE_KINDS["tpu"] = DEVICE_KINDS["cpu"]


@only_cpu
def test_a_machine_without_accelerator_computes_on_the_cpu():
    assert pick_device_kind().name == "cpu"
    assert device_count() == 1
    assert device_count("cuda") == 0
    with pytest.raises(ArgumentValueError, match=r"no cuda device here; there is: cpu"):
        pick_device_kind("cuda")


def test_every_row_counts_without_its_package():
    counts = {name: kind.count() for name, kind in DEVICE_KINDS.items()}
    assert counts["cpu"] == 1
    assert all(count >= 0 for count in counts.values())


def test_an_accelerator_is_preferred_and_counted_without_a_context(fake_cuda):
    assert pick_device_kind().name == "cuda"
    assert pick_device_kind("cpu").name == "cpu"
    assert device_count() == device_count("cuda") == 2
    assert pick_device_kind().current_index() == 0
    assert memory("cuda:1") == (0, 0)


def test_memory_of_a_device_in_use(fake_cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30, 100))
    assert memory("cuda:1") == (70, 100)


def test_unknown_kinds_are_refused_with_the_known_ones():
    for ask in (pick_device_kind, device_count):
        with pytest.raises(ArgumentValueError, match="'tpu' is not a device kind; accepted are cuda, xpu"):
            ask("tpu")


def test_a_kind_whose_package_is_missing_is_refused_with_its_name():
    with pytest.raises(ArgumentValueError, match="needs the package torch_npu"):
        pick_device_kind("npu")


def test_xla_is_taken_only_when_asked_for(monkeypatch):
    runtime = SimpleNamespace(addressable_device_count=lambda: 4)
    monkeypatch.setitem(sys.modules, "torch_xla", SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "torch_xla.runtime", runtime)
    assert pick_device_kind().name != "xla"
    assert pick_device_kind("xla").name == "xla"
    assert device_count("xla") == 4


def test_the_cpus_memory_is_this_processs():
    used, total = memory("cpu")
    assert total == psutil.virtual_memory().total
    assert 0 < used < total
    held = b"x" * 50_000_000
    assert memory("cpu")[0] - used > len(held) / 2
    assert memory(torch.device("cpu"))[1] == total
    assert os.getpid() == psutil.Process().pid


def test_devices_by_number():
    assert DEVICE_KINDS["cpu"].device(3) == torch.device("cpu")
    assert DEVICE_KINDS["cuda"].device(3) == torch.device("cuda", 3)

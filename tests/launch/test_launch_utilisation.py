"""How busy ranks are: real processes, and a driver that stands in for the one that is not here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from nbstate.launch.utilisation import NvmlDevices, Sampler
from nbstate.telemetry.board import Board

DEVICES = ["GPU-aaaa", "GPU-bbbb", "GPU-cccc"]


class FakeNvml:
    """Stands in for an NVIDIA driver with three devices, the last of which tells nothing of its use."""

    def __init__(self) -> None:
        self.started = 0

    def nvmlInit(self) -> None:
        self.started += 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        if index >= len(DEVICES):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return DEVICES[index]

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:
        if name not in DEVICES:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return name

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        if handle == "GPU-cccc":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(gpu=10 * (1 + DEVICES.index(handle)))

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(used=1 + DEVICES.index(handle), total=80)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    for name in dir(FakeNvml):
        if name.startswith("nvml"):
            monkeypatch.setattr(pynvml, name, getattr(fake, name))
    return fake


@pytest.fixture
def board() -> Iterator[Board]:
    made = Board.create(3)
    yield made
    made.close()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        yield process
        process.kill()


@pytest.mark.parametrize(
    ("visible", "device", "read"),
    [
        (None, "cuda:1", (20.0, 2, 80)),
        ("2,0", "cuda:1", (10.0, 1, 80)),
        ("GPU-bbbb", "cuda:0", (20.0, 2, 80)),
        ("2", "cuda:0", (None, 3, 80)),
        ("0", "cuda:1", (None, 0, 0)),
        ("", "cuda:0", (None, 0, 0)),
        ("GPU-unheard-of", "cuda:0", (None, 0, 0)),
        (None, "cuda:9", (None, 0, 0)),
    ],
)
def test_a_device_as_the_rank_calls_it(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, visible: str | None, device: str, read: Any
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert NvmlDevices(visible).read(device) == read


def test_the_driver_is_left_alone_without_devices(nvml: FakeNvml) -> None:
    devices = NvmlDevices()
    assert {devices.read(device) for device in ("", "cpu", "xpu:0")} == {(None, 0, 0)}
    assert nvml.started == 0


def test_without_a_driver_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    assert NvmlDevices().read("cuda:0") == (None, 0, 0)


def test_a_busy_process_is_told_from_an_idle_one(
    board: Board, child: subprocess.Popen[bytes], sleeper: subprocess.Popen[bytes]
) -> None:
    board.slot(0).write(pid=child.pid)
    board.slot(2).write(pid=sleeper.pid)
    time = iter([0.0, 0.5, 1.0])
    sampler = Sampler(clock=lambda: next(time))
    first = sampler.sample(board.snapshot())
    assert {rank: use.cpu_percent for rank, use in first.items()} == {0: None, 2: None}
    with subprocess.Popen([sys.executable, "-c", "sum(range(10**7))"]) as some_time:
        some_time.wait()
    assert sampler.sample(board.snapshot()) is first  # too early for another look
    second = sampler.sample(board.snapshot())
    assert second[0].cpu_percent is not None
    assert second[0].cpu_percent > 0
    assert second[2].cpu_percent is not None
    assert second[2].cpu_percent < second[0].cpu_percent


def test_a_rank_that_has_ended_is_left_out(
    board: Board, child: subprocess.Popen[bytes], nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    board.slot(0).write(pid=child.pid)
    board.slot(1).write(pid=os.getpid())
    board.slot(1).write_text(device="cuda:1")
    time = iter([0.0, 10.0])
    sampler = Sampler(clock=lambda: next(time))
    assert set(sampler.sample(board.snapshot())) == {0, 1}
    child.kill()
    child.wait()
    use = sampler.sample(board.snapshot())
    assert set(use) == {1}
    assert (use[1].device_percent, use[1].device_memory_used, use[1].device_memory_total) == (20.0, 2, 80)

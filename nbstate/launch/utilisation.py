"""How busy the ranks and their devices are, as the kernel sees it: psutil for the processes, NVML for the devices.

What torch itself knows of its memory comes over the board. Nothing here touches a device through CUDA: NVML asks the
driver and makes no context, so the kernel can still fork.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import psutil
import pynvml

from nbstate.dashboard import Utilisation
from nbstate.telemetry.board import RankSnapshot

__all__ = ["Devices", "NvmlDevices", "Sampler"]

_EVERY: Final = 1.0  # seconds between two looks
_KIND: Final = "cuda:"


class Devices(Protocol):
    """Reads devices by the names that ranks have for them."""

    def read(self, device: str) -> tuple[float | None, int, int]:
        """Percent of use (None if unknown), used and total bytes (zeros if unknown) of ``"cuda:1"``."""


class NvmlDevices:
    """The NVIDIA devices of this machine.

    Parameters
    ----------
    visible : str, optional
        What the ranks find in ``CUDA_VISIBLE_DEVICES``; the kernel's own if left out. NVML numbers all devices of the
        machine, a rank only those that it can see.

    Notes
    -----
    A slice of a device (MIG) has memory but no use of its own: NVML does not tell.
    """

    def __init__(self, visible: str | None = None) -> None:
        self._visible = os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible
        self._handles: dict[str, Any] = {}
        self._available: bool | None = None

    def read(self, device: str) -> tuple[float | None, int, int]:
        """See ``Devices``. The driver is not asked for anything before the first NVIDIA device."""
        handle = self._handle(device) if device.startswith(_KIND) else None
        if handle is None:
            return None, 0, 0
        percent: float | None = None
        used = total = 0
        with contextlib.suppress(pynvml.NVMLError):
            percent = float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        with contextlib.suppress(pynvml.NVMLError):
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            used, total = int(memory.used), int(memory.total)
        return percent, used, total

    def _handle(self, device: str) -> Any:
        if self._available is None:
            self._available = _has_driver()
        if self._available and device not in self._handles:
            self._handles[device] = None
            with contextlib.suppress(pynvml.NVMLError, ValueError):
                self._handles[device] = self._find(int(device.removeprefix(_KIND)))
        return self._handles.get(device)

    def _find(self, index: int) -> Any:
        """The device that a rank calls ``index``. CUDA ends its list at the first entry that it cannot use."""
        if self._visible is None:
            return pynvml.nvmlDeviceGetHandleByIndex(index)
        names = [name.strip() for name in self._visible.split(",")]
        if index >= len(names):
            return None
        name = names[index]
        if name.isdecimal():
            return pynvml.nvmlDeviceGetHandleByIndex(int(name))
        return pynvml.nvmlDeviceGetHandleByUUID(name)


def _has_driver() -> bool:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    return True


class Sampler:
    """Samples the ranks of one launch that run on this machine, at most once a second.

    Parameters
    ----------
    devices : Devices, optional
        Where devices are read; NVML if left out.
    clock : callable
        Seconds.
    """

    def __init__(self, devices: Devices | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._devices = devices or NvmlDevices()
        self._clock = clock
        self._sampled = float("-inf")
        self._processes: dict[int, tuple[psutil.Process, float]] = {}
        self._latest: dict[int, Utilisation] = {}

    def sample(self, snapshots: Sequence[RankSnapshot]) -> Mapping[int, Utilisation]:
        """How busy each rank is; the last answer again within the same second.

        A rank's use of the CPU is known from its second look on. One whose process has ended is left out.

        Examples
        --------
        >>> from nbstate.telemetry.board import Board
        >>> board = Board.create(1)
        >>> Sampler().sample(board.snapshot())
        {}
        >>> board.close()
        """
        now = self._clock()
        seconds = now - self._sampled
        if seconds < _EVERY:
            return self._latest
        self._sampled = now
        busy = self._cpu_percents({s.pid for s in snapshots if s.pid}, seconds)
        read = {device: self._devices.read(device) for device in {s.device for s in snapshots if s.pid in busy}}
        self._latest = {s.rank: Utilisation(busy[s.pid], *read[s.device]) for s in snapshots if s.pid in busy}
        return self._latest

    def _cpu_percents(self, pids: set[int], seconds: float) -> dict[int, float | None]:
        """Percent of one core that each process has used since the last look, None at its first one."""
        percents: dict[int, float | None] = {}
        seen: dict[int, tuple[psutil.Process, float]] = {}
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                process, before = self._processes.get(pid) or (psutil.Process(pid), -1.0)
                times = process.cpu_times()
                used = times.user + times.system
                seen[pid] = process, used
                percents[pid] = None if before < 0 else max(0.0, 100 * (used - before) / seconds)
        self._processes = seen
        return percents

"""ONE table of device kinds: what each is called, which backend its ranks talk over, and how its memory is read.

A new kind is one row in ``DEVICE_KINDS``. Nothing else in nbstate asks which kinds exist.

Counting devices must leave the process able to fork: a kernel that has created a CUDA context cannot hand it to its
children. ``torch.cuda.device_count`` asks the driver's management library and creates none;
``torch.cuda.is_available`` may, so it is never called here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import psutil
import torch

from nbstate.errors import ArgumentValueError
from nbstate.state.kinds import DistributedType

__all__ = ["DEVICE_KINDS", "DeviceKind", "device_count", "memory", "pick_device_kind"]


@dataclass(frozen=True)
class DeviceKind:
    """One row of the table.

    Attributes
    ----------
    name : str
        As ``torch.device`` writes it.
    backend : str
        The backend of ``torch.distributed`` that its ranks talk over.
    distributed_type : DistributedType
        What a run of several ranks on it is called.
    count : callable
        Number of devices that this process can see. Creates no context.
    read_memory : callable
        Used and total bytes of one device; zeros while that cannot be known without creating a context.
    plugin : str
        The package that adds the kind to torch; empty if torch has it built in. Imported only when asked for by name.
    shareable : bool
        Whether any number of ranks may use one device (a CPU).
    binds_device : bool
        Whether the backend wants to know a rank's device when the group is made and in a barrier.
    automatic : bool
        Whether the kind is taken without being asked for.
    """

    name: str
    backend: str
    distributed_type: DistributedType
    count: Callable[[], int]
    read_memory: Callable[[torch.device], tuple[int, int]]
    plugin: str = ""
    shareable: bool = False
    binds_device: bool = False
    automatic: bool = True

    @property
    def module(self) -> Any:
        """The module of torch that drives it (``torch.cuda``), or None where this torch has none."""
        return getattr(torch, self.name, None)

    def device(self, index: int) -> torch.device:
        """The device with that number; the CPU has no number."""
        return torch.device(self.name) if self.shareable else torch.device(self.name, index)

    def current_index(self) -> int:
        """Number of the device in use; 0 before the first use, found without creating a context."""
        module = self.module
        started = getattr(module, "is_initialized", None)
        if self.shareable or started is None or not started():
            return 0
        return int(module.current_device())

    def use(self, device: torch.device) -> None:
        """Make a device this process's current one."""
        choose = getattr(self.module, "set_device", None)
        if not self.shareable and choose is not None:
            choose(device)


def _counter(name: str) -> Callable[[], int]:
    def count() -> int:
        counter = getattr(getattr(torch, name, None), "device_count", None)
        return int(counter()) if counter is not None else 0

    return count


def _count_mps() -> int:
    return int(torch.backends.mps.is_available())


def _count_xla() -> int:
    try:
        runtime = importlib.import_module("torch_xla.runtime")
    except ImportError:
        return 0
    return int(runtime.addressable_device_count())


def _cpu_memory(device: torch.device) -> tuple[int, int]:
    return psutil.Process().memory_info().rss, psutil.virtual_memory().total


def _mps_memory(device: torch.device) -> tuple[int, int]:
    return torch.mps.driver_allocated_memory(), torch.mps.recommended_max_memory()


def _accelerator_memory(device: torch.device) -> tuple[int, int]:
    module = getattr(torch, device.type, None)
    started = getattr(module, "is_initialized", lambda: True)
    if module is None or not hasattr(module, "mem_get_info") or not started():
        return 0, 0
    free, total = module.mem_get_info(device)
    return int(total - free), int(total)


def _no_memory(device: torch.device) -> tuple[int, int]:
    return 0, 0


def _row(name: str, backend: str, kind: DistributedType, **more: Any) -> DeviceKind:
    more = {"count": _counter(name), "read_memory": _accelerator_memory, **more}
    return DeviceKind(name, backend, kind, **more)


_ROWS: Final = (
    _row("cuda", "nccl", DistributedType.MULTI_GPU, binds_device=True),
    _row("xpu", "xccl", DistributedType.MULTI_XPU, binds_device=True),
    _row("npu", "hccl", DistributedType.MULTI_NPU, plugin="torch_npu"),
    _row("mlu", "cncl", DistributedType.MULTI_MLU, plugin="torch_mlu"),
    _row("musa", "mccl", DistributedType.MULTI_MUSA, plugin="torch_musa"),
    _row("hpu", "hccl", DistributedType.MULTI_HPU, plugin="habana_frameworks.torch"),
    _row("mps", "gloo", DistributedType.MULTI_MPS, count=_count_mps, read_memory=_mps_memory),
    _row(
        "xla",
        "xla",
        DistributedType.XLA,
        count=_count_xla,
        read_memory=_no_memory,
        plugin="torch_xla",
        automatic=False,
    ),
    _row("cpu", "gloo", DistributedType.MULTI_CPU, count=lambda: 1, read_memory=_cpu_memory, shareable=True),
)

#: Kinds by name, in the order in which they are preferred.
DEVICE_KINDS: Final = MappingProxyType({row.name: row for row in _ROWS})


def _named(name: str) -> DeviceKind:
    kind = DEVICE_KINDS.get(name)
    if kind is None:
        raise ArgumentValueError(f"{name!r} is not a device kind; accepted are {', '.join(DEVICE_KINDS)}")
    if kind.plugin and kind.module is None:
        try:
            importlib.import_module(kind.plugin)
        except ImportError as error:
            raise ArgumentValueError(f"device kind {name!r} needs the package {kind.plugin}: {error}") from error
    return kind


def pick_device_kind(prefer: str = "") -> DeviceKind:
    """The kind of device that this process computes on.

    Parameters
    ----------
    prefer : str
        A kind by name. Empty: the first of the table that has a device here, which at last is the CPU.

    Raises
    ------
    ArgumentValueError
        If ``prefer`` is no kind, or there is no such device here.
    """
    if not prefer:
        return next(kind for kind in DEVICE_KINDS.values() if kind.automatic and kind.count() > 0)
    kind = _named(prefer)
    if kind.count() < 1:
        here = [other.name for other in DEVICE_KINDS.values() if other.automatic and other.count() > 0]
        raise ArgumentValueError(f"there is no {prefer} device here; there is: {', '.join(here)}")
    return kind


def device_count(kind: str = "") -> int:
    """Number of devices of a kind that this process can see, found without creating a context.

    Parameters
    ----------
    kind : str
        A kind by name. Empty: the kind that ``pick_device_kind()`` takes.

    Returns
    -------
    int
        0 if there is none; 1 for the CPU, however many cores it has.
    """
    if not kind:
        return pick_device_kind().count()
    if kind not in DEVICE_KINDS:
        raise ArgumentValueError(f"{kind!r} is not a device kind; accepted are {', '.join(DEVICE_KINDS)}")
    return DEVICE_KINDS[kind].count()


def memory(device: torch.device | str) -> tuple[int, int]:
    """Used and total memory of a device, bytes.

    For the CPU: what this process holds, and what the machine has. For an accelerator: what all processes use of it,
    because that is what a rank runs out of; zeros before this process has used it.
    """
    device = torch.device(device)
    kind = DEVICE_KINDS.get(device.type)
    return (0, 0) if kind is None else kind.read_memory(device)

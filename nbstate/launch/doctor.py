"""``nbstate.preflight()``: may this kernel fork, what will ``auto`` take, what spoilt it, and what to do.

It only looks: no process is started (but for the canary, when asked for), no device is touched, nothing is imported
that was not there, except threadpoolctl if it is installed.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import psutil
import torch

from nbstate.launch import witness
from nbstate.launch.canary import Canary, send_canary
from nbstate.launch.engines.local import available_start_methods
from nbstate.launch.preflight import busy_threads, first_choice, why_not_fork
from nbstate.state import DEVICE_KINDS, PartialState
from nbstate.state.html import render_card

__all__ = ["KNOWN_LIBRARIES", "DeviceUse", "Preflight", "meet", "preflight", "render_rows"]

#: Libraries that touch a device when they are imported, or cannot live through a fork, and how.
KNOWN_LIBRARIES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "bitsandbytes": "asks each CUDA device for its capability at import",
        "cudf": "checks the GPU through the CUDA runtime at import, unseen by torch",
        "cupy": "holds a CUDA context of its own from its first array on, unseen by torch",
        "jax": "runs threads of its own from its first array on, and warns of forks itself",
        "pycuda.autoinit": "makes a CUDA context at import, unseen by torch",
        "tensorflow": "runs threads of its own, and does not support forks once it has computed",
        "torchao": "some versions touch CUDA at import",
        "unsloth": "asks the CUDA device for its capability at import",
    }
)


@dataclass(frozen=True)
class DeviceUse:
    """One kind of accelerator in this process.

    Attributes
    ----------
    kind : str
        ``"cuda"`` and so on.
    count : int
        How many this process can see.
    used : bool or None
        Whether this process has initialised it; None where torch cannot say.
    origin : Origin or None
        Who did it, if that is known.
    """

    kind: str
    count: int
    used: bool | None
    origin: witness.Origin | None = None

    def __str__(self) -> str:
        state = {True: "in use", False: "not touched", None: "torch cannot say whether it is in use"}[self.used]
        since = f", first {self.origin}" if self.origin else ""
        name = f"{self.count} {self.kind}" if self.count else self.kind
        return f"{name}: {state}{since}"


@dataclass(frozen=True)
class Preflight:
    """What ``preflight`` found. In a notebook it shows itself as a table.

    Attributes
    ----------
    may_fork : bool
        Whether no reason against a fork is known.
    reasons : tuple of str
        Why this kernel must not fork; empty if it may. They name the cell or the import where that is known.
    start_method : str
        What ``start_method="auto"`` takes for a call that can travel.
    why : str
        And why.
    devices : tuple of DeviceUse
        The accelerators of this machine, and any that is in use.
    threads : tuple of str
        Python threads that may be computing.
    pools : tuple of str
        Native threads, which no fork copies.
    libraries : dict of str to str
        Imported libraries that are known to touch devices or to dislike forks, and how.
    watched : bool
        Whether cells and imports are watched, so that the guilty one can be named.
    canary : Canary or None
        What became of the forked child, if one was asked for.
    advice : str
        What to do.
    """

    may_fork: bool
    reasons: tuple[str, ...]
    start_method: str
    why: str
    devices: tuple[DeviceUse, ...]
    threads: tuple[str, ...]
    pools: tuple[str, ...]
    libraries: Mapping[str, str]
    watched: bool
    canary: Canary | None
    advice: str

    @property
    def summary(self) -> str:
        """The verdict in a few words."""
        return "this kernel may fork" if self.may_fork else "this kernel must not fork"

    def rows(self) -> dict[str, tuple[str, ...]]:
        """Label and lines of each row of the table."""
        watched = () if self.watched else ("%load_ext nbstate, then the guilty cell or import can be named",)
        return {
            "fork": self.reasons + watched if self.reasons else ("no reason against it is known",),
            "auto takes": (f"{self.start_method}: {self.why}",),
            "devices": tuple(map(str, self.devices)) or ("no accelerator; the CPU",),
            "busy threads": self.threads or ("none",),
            "native threads": self.pools,
            "libraries": tuple(f"{name} {how}" for name, how in self.libraries.items())
            or ("none that is known to touch a device at import",),
            "canary": (
                self.canary.text if self.canary else "not sent; preflight(canary=True) forks one and watches it",
            ),
            "what to do": (self.advice,),
        }

    def __repr__(self) -> str:
        return render_rows({"preflight": (self.summary,), **self.rows()})

    def _repr_html_(self) -> str:
        rows = {label: "; ".join(lines) for label, lines in self.rows().items()}
        return render_card("nbstate preflight", self.summary, rows)


def render_rows(rows: Mapping[str, tuple[str, ...]]) -> str:
    """Labels on the left, lines of text beside them."""
    width = max(map(len, rows))
    return "\n".join(
        f"{label if i == 0 else '':<{width}}  {line}" for label, lines in rows.items() for i, line in enumerate(lines)
    )


def preflight(*, canary: bool = False) -> Preflight:
    """Look whether this kernel may fork, and which start method a launch takes.

    Parameters
    ----------
    canary : bool
        Also fork one child, which prints, computes, and is killed if it is not done after 5 s. That is the definitive
        test of a fork; without it no process is started.

    Returns
    -------
    Preflight
        What was found, and what to do; shows itself as a table.

    Examples
    --------
    >>> import nbstate
    >>> report = nbstate.preflight(canary=True)
    >>> report.may_fork, report.start_method, report.canary.alive
    (True, 'forkserver', True)
    """
    reasons = why_not_fork()
    forkable = "fork" in available_start_methods()
    child = send_canary() if canary and forkable else None
    if child is not None and not child.alive:
        reasons += (child.text,)
    method = first_choice()
    devices = _devices()
    libraries = {name: how for name, how in KNOWN_LIBRARIES.items() if name in sys.modules}
    return Preflight(
        may_fork=not reasons,
        reasons=reasons,
        start_method=method,
        why=_why(method, may_fork=not reasons),
        devices=devices,
        threads=busy_threads(),
        pools=_native_threads(),
        libraries=MappingProxyType(libraries),
        watched=witness.watching(),
        canary=child,
        advice=_advice(forkable, bool(reasons), devices, libraries, child),
    )


def _why(method: str, may_fork: bool) -> str:
    if method == "spawn":
        return "there is no fork server on this system, so each rank is a new Python"
    second = "a call that cannot travel is forked" if may_fork else "a call that cannot travel is refused"
    return f"its ranks come from a clean process, whatever this kernel did; {second}"


def _devices() -> tuple[DeviceUse, ...]:
    """Accelerators that are here or in use, from the one table; to count them creates no context."""
    used = witness.kinds_in_use()
    found = []
    for name, kind in DEVICE_KINDS.items():
        if kind.shareable or not (kind.automatic or name in used):  # to count XLA's devices would start its runtime
            continue
        count = kind.count()
        if name in used:
            found.append(DeviceUse(name, count, True, witness.origin(name)))
        elif count:
            found.append(DeviceUse(name, count, False if hasattr(kind.module, "is_initialized") else None))
    return tuple(found)


def _native_threads() -> tuple[str, ...]:
    """Pools that threadpoolctl knows, torch's own number, and how many threads run that are not Python's."""
    pools: list[str] = []
    with contextlib.suppress(ImportError):
        pools = [
            f"{pool['internal_api']}, up to {pool['num_threads']} ({Path(pool['filepath']).name})"
            for pool in importlib.import_module("threadpoolctl").threadpool_info()
        ]
    beside = max(0, _running_threads() - len(threading.enumerate()))
    return (
        f"{beside} running beside Python's {len(threading.enumerate())}; torch computes on {torch.get_num_threads()}",
        *pools,
    )


def _running_threads() -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/task"))
    return int(psutil.Process().num_threads())


def _advice(
    forkable: bool, unsafe: bool, devices: tuple[DeviceUse, ...], libraries: Mapping[str, str], child: Canary | None
) -> str:
    if not forkable:
        return (
            "Launch with start_method='auto'. What cannot travel to a rank (a lock, a widget) has to be built inside "
            "the launched function."
        )
    if unsafe:
        return (
            "Launch with start_method='auto', whose ranks come from a clean process. "
            f"To fork all the same, {_way_to_fork(devices)}."
        )
    if libraries and child is None:
        return (
            "Launch with start_method='auto'. Before you ask for fork, run nbstate.preflight(canary=True): "
            f"{', '.join(libraries)} may have left what no child can use."
        )
    return "Nothing: launch with start_method='auto'."


def _way_to_fork(devices: tuple[DeviceUse, ...]) -> str:
    if not any(use.used for use in devices):
        return "end the threads that compute or, if none is named, restart the kernel"
    first = next((use.origin for use in devices if use.used and use.origin), witness.Origin())
    if first.module:
        culprit = f"the import of {first.through or first.module}"
    else:
        culprit = f"what {first.cell} does with the device" if first.cell else "what uses the device"
    return f"restart the kernel and move {culprit} into the launched function"


def meet() -> int:
    """What each rank of ``%nbstate doctor``'s test launch does: meet the others, and say who it is."""
    state = PartialState()
    state.wait_for_everyone()
    return state.process_index

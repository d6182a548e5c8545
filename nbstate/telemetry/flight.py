"""What torch's own flight recorder tells: operations that pass no public function, DDP's and FSDP's among them.

The recorder stands below Python and keeps the last operations of every process group, whoever issued them: the
all-reduce of gradients that DDP issues from C++ in the middle of ``backward``, an all-gather of FSDP, a functional
collective in compiled code. To read it is too dear for every step, and needs to be done by the rank itself, since the
memory is its own. So a thread of the rank looks, twice a second, whether the rank has written anything on the board
since; if it has not, the thread reads the recorder and puts the oldest operation that is still open on the board. A
rank that waits in C++ has let go of the interpreter, so the thread runs; one that computes in Python writes steps.

Of what the recorder has, ``state`` is not kept up to date with gloo; ``retired``, and the status of each group, are.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch.distributed as dist

from nbstate.telemetry import probe
from nbstate.telemetry.groups import group_of
from nbstate.telemetry.slot import Slot

__all__ = ["NativeOperation", "last_operations", "oldest_open", "watch"]

_EVERY: Final = 0.5  # seconds between two looks
_RECORDERS: Final = ("_dump_fr_trace", "_dump_nccl_trace")  # of the CPU's backends, and of NCCL
_DTYPES: Final = {
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "Half": "float16",
    "Float": "float32",
    "Double": "float64",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}


@dataclass(frozen=True)
class NativeOperation:
    """One operation as the flight recorder has it.

    Attributes
    ----------
    name : str
        As ``"all_reduce"``.
    shape : str
        What this rank put in, as ``"4x8 float32"``.
    group : str
        The members of its group, ``""`` for the whole world.
    sequence : int
        Torch's own number within the group, counted from 1; sends and receives are numbered by themselves.
    since : int
        When it was issued, ``time.monotonic_ns()``.
    over : bool
        Whether it has ended.
    """

    name: str
    shape: str
    group: str
    sequence: int
    since: int
    over: bool


def last_operations(count: int = 20) -> list[NativeOperation]:
    """The last operations of this process, the newest last. Empty where the recorder is off or has seen nothing.

    Parameters
    ----------
    count : int
        How many at most.
    """
    found = [operation for dump in _recorders() for operation in _operations(_read(dump))]
    return sorted(found, key=lambda operation: operation.since)[-count:]


def oldest_open() -> NativeOperation | None:
    """The operation that began first among those that have not ended; None if there is none."""
    traces = [_read(dump, onlyActive=True) for dump in _recorders() if _any_open(dump)]
    found = [operation for trace in traces for operation in _operations(trace) if not operation.over]
    return min(found, key=lambda operation: operation.since, default=None)


def _recorders() -> list[Callable[..., bytes]]:
    import torch._C._distributed_c10d as native

    return [getattr(native, name) for name in _RECORDERS if hasattr(native, name)]


def _read(dump: Callable[..., bytes], **options: bool) -> Mapping[str, Any]:
    trace = pickle.loads(dump(includeStackTraces=False, **options))
    return trace if isinstance(trace, dict) else {}


def _any_open(dump: Callable[..., bytes]) -> bool:
    """Whether a group has an operation under way: the short question, asked before the recorder is read as a whole."""
    groups = _read(dump, includeCollectives=False).get("pg_status", {}).values()
    return any(status["last_enqueued_collective"] > status["last_completed_collective"] for status in groups)


def _operations(trace: Mapping[str, Any]) -> list[NativeOperation]:
    members = _members_by_name()
    done = {group: status["last_completed_collective"] for group, status in trace.get("pg_status", {}).items()}
    offset = time.monotonic_ns() - time.time_ns()
    return [_operation(entry, members, done, offset) for entry in trace.get("entries", ())]


def _operation(
    entry: Mapping[str, Any], members: Mapping[str, str], done: Mapping[str, int], offset: int
) -> NativeOperation:
    pairwise = bool(entry["is_p2p"])
    sequence = entry["p2p_seq_id" if pairwise else "collective_seq_id"]
    overtaken = not pairwise and sequence <= done.get(str(entry["pg_id"]), 0)
    return NativeOperation(
        name=entry["profiling_name"].rpartition(":")[2],
        shape=_shape(entry["input_sizes"], entry["input_dtypes"]),
        group=members.get(entry["process_group"][0], ""),
        sequence=sequence,
        since=entry["time_created_ns"] + offset,
        over=bool(entry["retired"]) or overtaken,
    )


def _members_by_name() -> dict[str, str]:
    names = dict(dist.distributed_c10d._world.pg_names)
    return {name: group_of(group).members for group, name in names.items()}


def _shape(sizes: list[list[int]], dtypes: list[str]) -> str:
    texts = {
        f"{'x'.join(map(str, size)) or 'scalar'} {_DTYPES.get(dtype, dtype.lower())}"
        for size, dtype in zip(sizes, dtypes, strict=False)
    }
    if len(sizes) == len(texts) == 1:
        return texts.pop()
    if len(texts) == 1:
        return f"{len(sizes)} of {texts.pop()}"
    return f"{len(sizes)} tensors" if sizes else ""


class _Watch(threading.Thread):
    def __init__(self, slot: Slot) -> None:
        super().__init__(name="nbstate-flight", daemon=True)
        self.slot = slot
        self._version = -1
        self._shown: tuple[str, str, int] | None = None  # what of an operation does not depend on when one looks

    def run(self) -> None:
        while probe.slot() is self.slot:
            time.sleep(_EVERY)
            try:
                self._look()
            except Exception:
                # The recorder's form is torch's own affair. Where it is another, a rank does without.
                return

    def _look(self) -> None:
        version = self.slot.version
        still, self._version = version == self._version, version
        found = oldest_open() if still else None
        key = (found.name, found.group, found.sequence) if found else None
        if key == self._shown:
            return
        self._shown = key
        if found is None:
            self.slot.write_native(0, 0)
        else:
            self.slot.write_native(found.sequence, found.since, found.name, found.shape, found.group)


_watching: _Watch | None = None


def watch() -> None:
    """Let a thread of this rank put the oldest open operation on the board whenever the rank stands still.

    Does nothing outside a launch, or if the thread is there already. The thread ends with the probe.
    """
    global _watching
    slot = probe.slot()
    if slot is None or (_watching is not None and _watching.slot is slot):
        return
    _watching = _Watch(slot)
    _watching.start()

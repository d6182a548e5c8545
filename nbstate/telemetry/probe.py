"""The rank's pen: writes phase, step, barrier, collective and gradient flags on the board.

Outside a launch there is no board, and every function here returns at once. The functions are module-level and take
plain numbers because they stand on the hot path of a training loop.

A rank is in one phase at a time. ``enter`` and ``leave`` bracket what has an end (a barrier, a collective, the wait
for a loader); they nest, and ``leave`` returns to the phase that was there before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from nbstate.telemetry.board import Barrier, Flag, Phase, Slot
from nbstate.telemetry.source import caller

__all__ = [
    "attach",
    "attached",
    "detach",
    "device",
    "enter",
    "enter_barrier",
    "enter_loader",
    "epoch",
    "gradient",
    "leave",
    "memory_source",
    "optimizer_step",
    "phase",
    "step",
]

_MEMORY_EVERY: Final = 250_000_000  # nanoseconds between two looks at the device's memory
_HISTORY_MASK: Final = (1 << 64) - 1

_now = time.monotonic_ns


class _Pen:
    """What the rank last wrote, so that a write needs no read of shared memory."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.thread = threading.get_ident()
        self.phase = Phase.STARTING
        self.open: list[tuple[Phase, Phase]] = []
        self.step = 0
        self.counted_by = ""
        self.history = 0
        self.flags = 0
        self.barrier = Barrier(0, 0, 0, 0)
        self.collective = 0
        self.optimizer_steps = 0
        self.skipped_steps = 0
        self.memory_at = 0
        self.memory: Callable[[], tuple[int, int]] | None = None


_pen: _Pen | None = None


def attach(slot: Slot) -> None:
    """Start to write on a slot. Called once, by the rank's prologue."""
    global _pen
    _pen = _Pen(slot)


def detach() -> None:
    """Stop writing; every function is a no-op again."""
    global _pen
    _pen = None


def attached() -> bool:
    """Whether this process writes on a board."""
    return _pen is not None


def phase(new: Phase) -> None:
    """Say what the rank is doing from now on; ends everything that was open."""
    pen = _pen
    if pen is None:
        return
    now = _now()
    pen.phase = new
    pen.open.clear()
    pen.slot.write(phase=new, phase_since=now, heartbeat=now)


def device(name: str) -> None:
    """Say which device the rank computes on, as ``"cuda:0"``."""
    if _pen is not None:
        _pen.slot.write_text(device=name)


def memory_source(read: Callable[[], tuple[int, int]]) -> None:
    """Say how to read the device's memory: a function that returns used and total bytes."""
    if _pen is not None:
        _pen.memory = read


def _enter(pen: _Pen, new: Phase, now: int) -> None:
    pen.open.append((pen.phase, new))
    pen.phase = new
    pen.slot.write(phase=new, phase_since=now, heartbeat=now)


def enter_loader() -> None:
    """The rank waits for its data loader."""
    pen = _pen
    if pen is not None and pen.thread == threading.get_ident():
        _enter(pen, Phase.LOADER, _now())


def enter(name: str, nbytes: int = 0) -> bool:
    """The rank enters a collective.

    Parameters
    ----------
    name : str
        The operation, as ``"all_reduce"``.
    nbytes : int
        Size of this rank's own part, bytes.

    Returns
    -------
    bool
        Whether it was written down, which is whether ``leave`` must follow. False outside a launch, inside
        another collective (the outer one is what the user called) and on a thread that is not the rank's first.
    """
    pen = _pen
    if pen is None or pen.thread != threading.get_ident():
        return False
    if pen.open and pen.open[-1][1] in (Phase.COLLECTIVE, Phase.BARRIER):
        return False
    now = _now()
    filename, line = caller(2)
    pen.collective += 1
    pen.slot.write_text(collective_name=name, collective_file=filename)
    pen.slot.write(
        collective=pen.collective, collective_entered=now, collective_line=line, collective_bytes=max(0, nbytes)
    )
    _enter(pen, Phase.COLLECTIVE, now)
    return True


def enter_barrier() -> bool:
    """The rank enters a barrier of the whole world. Returns as ``enter`` does."""
    pen = _pen
    if pen is None or pen.thread != threading.get_ident():
        return False
    if pen.open and pen.open[-1][1] in (Phase.COLLECTIVE, Phase.BARRIER):
        return False
    now = _now()
    filename, line = caller(2)
    pen.barrier = Barrier(pen.barrier.number + 1, now, 0, line)
    pen.slot.write_text(barrier_file=filename)
    pen.slot.write(barrier=pen.barrier.number, barrier_entered=now, barrier_line=line)
    pen.slot.write_barrier(pen.barrier)
    _enter(pen, Phase.BARRIER, now)
    return True


def leave(completed: bool = True) -> None:
    """Leave what was entered last and return to the phase before it.

    Parameters
    ----------
    completed : bool
        False if a barrier or collective raised. Then its ``left`` time is not written: the kernel can still see
        where the rank was stuck.
    """
    pen = _pen
    if pen is None or not pen.open:
        return
    before, ended = pen.open.pop()
    now = _now()
    pen.phase = before
    if completed and ended is Phase.BARRIER:
        pen.barrier = Barrier(pen.barrier.number, pen.barrier.entered, now, pen.barrier.line)
        pen.slot.write_barrier(pen.barrier)
        pen.slot.write(phase=before, phase_since=now, heartbeat=now, barrier_left=now)
    elif completed and ended is Phase.COLLECTIVE:
        pen.slot.write(phase=before, phase_since=now, heartbeat=now, collective_left=now)
    else:
        pen.slot.write(phase=before, phase_since=now, heartbeat=now)
    _look_at_memory(pen, now)


def _look_at_memory(pen: _Pen, now: int) -> None:
    if pen.memory is None or now - pen.memory_at < _MEMORY_EVERY:
        return
    pen.memory_at = now
    used, total = pen.memory()
    pen.slot.write(memory_used=used, memory_total=total)


def step(sync: bool, source: str = "accumulate") -> None:
    """Count one training step (one batch, forward and backward) and whether its gradients are synchronised.

    Parameters
    ----------
    sync : bool
        Whether this step's gradients are synchronised and applied.
    source : {"accumulate", "ddp", "optimizer"}
        Who counts. ``Accelerator.accumulate`` knows best, then DDP's forward, then the optimizer's step; once a
        better source has spoken the others are not heard, so no step counts twice.
    """
    pen = _pen
    if pen is None:
        return
    if pen.counted_by != source:
        ranking = ("", "optimizer", "ddp", "accumulate")
        if ranking.index(source) < ranking.index(pen.counted_by):
            return
        pen.counted_by = source
    now = _now()
    pen.step += 1
    pen.history = ((pen.history << 1) | sync) & _HISTORY_MASK
    flags = pen.flags | Flag.KNOWN
    pen.flags = flags | Flag.SYNC_GRADIENTS if sync else flags & ~Flag.SYNC_GRADIENTS
    pen.slot.write(step=pen.step, sync_history=pen.history, sync_count=pen.step, flags=pen.flags, heartbeat=now)
    _look_at_memory(pen, now)


def epoch(index: int) -> None:
    """Say which epoch the rank is in, counted from 0."""
    if _pen is not None:
        _pen.slot.write(epoch=index)


def gradient(
    *,
    sync_gradients: bool,
    end_of_dataloader: bool,
    in_dataloader: bool,
    sync_with_dataloader: bool,
    adjust_scheduler: bool,
    num_steps: int,
    remainder: int,
) -> None:
    """Write the gradient state's attributes, all at once."""
    pen = _pen
    if pen is None:
        return
    flags = Flag.KNOWN | (
        (Flag.SYNC_GRADIENTS if sync_gradients else 0)
        | (Flag.END_OF_DATALOADER if end_of_dataloader else 0)
        | (Flag.SYNC_WITH_DATALOADER if sync_with_dataloader else 0)
        | (Flag.ADJUST_SCHEDULER if adjust_scheduler else 0)
        | (Flag.IN_DATALOADER if in_dataloader else 0)
    )
    pen.flags = flags
    pen.slot.write(flags=flags, num_steps=num_steps, remainder=remainder)


def optimizer_step(skipped: bool = False) -> None:
    """Count one call of an optimizer's step; ``skipped`` if the gradient scaler left it out."""
    pen = _pen
    if pen is None:
        return
    if skipped:
        pen.skipped_steps += 1
    else:
        pen.optimizer_steps += 1
    pen.slot.write(optimizer_steps=pen.optimizer_steps, skipped_steps=pen.skipped_steps, heartbeat=_now())

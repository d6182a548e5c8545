"""The rank's pen: writes phase, step, barrier, collective and gradient flags on the board.

Outside a launch there is no board, and every function here returns at once. The functions are module-level and take
plain numbers because they stand on the hot path of a training loop.

A rank is in one phase at a time. ``enter`` and ``leave`` bracket what has an end (a barrier, a collective, the wait
for a loader); they nest, and ``leave`` returns to the phase that was there before.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from nbstate.telemetry.board import Flag, Phase, Slot
from nbstate.telemetry.handles import Handles
from nbstate.telemetry.source import caller

__all__ = [
    "attach",
    "attached",
    "detach",
    "device",
    "enter",
    "enter_barrier",
    "enter_loader",
    "enter_wait",
    "epoch",
    "follow",
    "forget",
    "gradient",
    "leave",
    "memory_source",
    "optimizer_step",
    "phase",
    "slot",
    "step",
]

_MEMORY_EVERY: Final = 250_000_000  # nanoseconds between two looks at the device's memory
_NEVER: Final = 1 << 63
_WORD_MASK: Final = (1 << 64) - 1

# Enum members cost an attribute look-up with a metaclass in between, several times the price of a store on the board.
_STARTING: Final = int(Phase.STARTING)
_LOADER: Final = int(Phase.LOADER)
_COLLECTIVE: Final = int(Phase.COLLECTIVE)
_BARRIER: Final = int(Phase.BARRIER)
_TOGETHER: Final = (_COLLECTIVE, _BARRIER)
_KNOWN: Final = int(Flag.KNOWN)
_KNOWN_SYNC: Final = int(Flag.KNOWN | Flag.SYNC_GRADIENTS)
_SYNC: Final = int(Flag.SYNC_GRADIENTS)
_TRUST: Final = {"": 0, "optimizer": 1, "ddp": 2, "accumulate": 3}

_now = time.monotonic_ns
_thread = threading.get_ident


class _Pen:
    """What the rank last wrote, so that a write needs no read of shared memory."""

    __slots__ = (
        "barrier",
        "collective",
        "counted_by",
        "dropped",
        "flags",
        "handles",
        "history",
        "memory",
        "memory_due",
        "open",
        "optimizer_steps",
        "phase",
        "skipped_steps",
        "slot",
        "step",
        "thread",
    )

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.thread = _thread()
        self.phase = _STARTING
        self.open: list[int] = []  # the phases to return to
        self.step = 0
        self.counted_by = ""
        self.history = 0
        self.flags = 0
        self.barrier = 0
        self.collective = 0
        self.handles = Handles()
        self.dropped = self.handles.dropped
        self.optimizer_steps = 0
        self.skipped_steps = 0
        self.memory: Callable[[], tuple[int, int]] | None = None
        self.memory_due = _NEVER


_pen: _Pen | None = None


def attach(slot: Slot) -> None:
    """Start to write on a slot. Called once, by the rank's prologue."""
    global _pen
    _pen = _Pen(slot)


def detach() -> None:
    """Stop writing; every function is a no-op again."""
    global _pen
    _pen = None


if hasattr(os, "register_at_fork"):
    # A child of a rank (a loader's worker, a user's own subprocess) is not the rank and must not write in its place.
    os.register_at_fork(after_in_child=detach)


def attached() -> bool:
    """Whether this process writes on a board."""
    return _pen is not None


def slot() -> Slot | None:
    """Where this process writes; None outside a launch."""
    return None if _pen is None else _pen.slot


def phase(new: Phase) -> None:
    """Say what the rank is doing from now on; ends everything that was open."""
    pen = _pen
    if pen is None:
        return
    pen.phase = int(new)
    pen.open.clear()
    pen.slot.write_phase(new, _now())


def device(name: str) -> None:
    """Say which device the rank computes on, as ``"cuda:0"``."""
    if _pen is not None:
        _pen.slot.write_text(device=name)


def memory_source(read: Callable[[], tuple[int, int]]) -> None:
    """Say how to read the device's memory: a function that returns used and total bytes."""
    if _pen is not None:
        _pen.memory, _pen.memory_due = read, 0


def enter_loader() -> None:
    """The rank waits for its data loader."""
    pen = _pen
    if pen is None or pen.thread != _thread():
        return
    pen.open.append(pen.phase)
    pen.phase = _LOADER
    pen.slot.write_phase(_LOADER, _now())


def enter(
    name: str,
    nbytes: int = 0,
    partial: bool = False,
    shape: str = "",
    members: str = "",
    sequence: int = 0,
    peer: int = -1,
) -> bool:
    """The rank enters a collective.

    Parameters
    ----------
    name : str
        The operation, as ``"all_reduce"``.
    nbytes : int
        Size of this rank's own part, bytes.
    partial : bool
        Whether only a part of the world takes part (a smaller group, a send, a receive). Such an operation gets no
        number: numbers count what all ranks do in the same order, so that they can be compared.
    shape : str
        Shape and dtype of this rank's own part, as ``"4x8 float32"``. This and ``members`` are stored again only if
        they are other objects than before: give the same object for the same text.
    members : str
        Of a partial one, who takes part, as ``"0,2"``; empty for the whole world.
    sequence : int
        Of a partial one, its number within its group.
    peer : int
        The global rank of the other side of a send or receive.

    Returns
    -------
    bool
        Whether it was written down, which is whether ``leave`` must follow. False outside a launch, inside
        another collective (the outer one is what the user called) and on a thread that is not the rank's first.
    """
    pen = _pen
    if pen is None or pen.thread != _thread():
        return False
    before = pen.phase
    if before in _TOGETHER:
        return False
    filename, line = caller(2)
    if pen.dropped:
        _tell_pending(pen)
    number, place = pen.collective, 0
    if not partial:
        pen.collective = sequence = number = number + 1
        place = number + pen.barrier
    pen.slot.open_collective(
        number, _now(), filename, line, name, nbytes, partial, shape, members, place, sequence, peer
    )
    pen.open.append(before)
    pen.phase = _COLLECTIVE
    return True


def enter_wait(work: Any) -> bool:
    """The rank enters the wait for a handle: again the operation that gave it, at the line of the wait.

    Returns as ``enter`` does. A handle that is not followed (torch's own code issued it) is a wait for an operation
    that has no other name; if that is over already, there is nothing to wait for and nothing is written.
    """
    pen = _pen
    if pen is None or pen.thread != _thread():
        return False
    before = pen.phase
    if before in _TOGETHER:
        return False
    issued = pen.handles.get(work)
    if issued is None:
        return not work.is_completed() and enter("wait", partial=True)
    filename, line = caller(2)
    pen.slot.reopen_collective(pen.collective, _now(), filename, line, issued)
    pen.open.append(before)
    pen.phase = _COLLECTIVE
    return True


def follow(work: Any, barrier: bool = False, part: tuple[str, int, str, str, int, int] | None = None) -> None:
    """Remember that the collective just left gave a handle, until ``forget``.

    Parameters
    ----------
    work
        The handle; held weakly.
    barrier : bool
        Whether it was a barrier of the whole world that was left.
    part : tuple, optional
        Of a batch, which of its parts the handle is for: the arguments of ``Issued.part``.
    """
    pen = _pen
    if pen is not None and pen.thread == _thread():
        issued = pen.slot.issued_barrier() if barrier else pen.slot.issued()
        pen.handles.add(work, issued.part(*part) if part else issued)
        pen.slot.write_pending(len(pen.handles), pen.handles.oldest())


def forget(work: Any) -> None:
    """A handle was waited for, or is otherwise known to be done or someone else's to follow."""
    pen = _pen
    if pen is not None and pen.thread == _thread() and pen.handles.remove(work):
        _tell_pending(pen)


def _tell_pending(pen: _Pen) -> None:
    pen.handles.forget_dropped()
    pen.slot.write_pending(len(pen.handles), pen.handles.oldest())


def enter_barrier() -> bool:
    """The rank enters a barrier of the whole world. Returns as ``enter`` does."""
    pen = _pen
    if pen is None or pen.thread != _thread():
        return False
    before = pen.phase
    if before in _TOGETHER:
        return False
    filename, line = caller(2)
    if pen.dropped:
        _tell_pending(pen)
    pen.barrier += 1
    pen.slot.open_barrier(pen.barrier, _now(), filename, line)
    pen.open.append(before)
    pen.phase = _BARRIER
    return True


def leave(completed: bool = True) -> None:
    """Leave what was entered last and return to the phase before it.

    Like what enters, it is not heard on a thread that is not the rank's first.

    Parameters
    ----------
    completed : bool
        False if a barrier or collective raised. Then its ``left`` time is not written: the kernel can still see
        where the rank was stuck.
    """
    pen = _pen
    # What a thread that was not heard entering would close is not its own.
    if pen is None or not pen.open or pen.thread != _thread():
        return
    ended = pen.phase
    pen.phase = before = pen.open.pop()
    now = _now()
    if completed and ended == _COLLECTIVE:
        pen.slot.close_collective(before, now)
    elif completed and ended == _BARRIER:
        pen.slot.close_barrier(pen.barrier, before, now)
    else:
        pen.slot.write_phase(before, now)
    if now >= pen.memory_due:
        _look_at_memory(pen, now)


def _look_at_memory(pen: _Pen, now: int) -> None:
    if pen.memory is None:
        return
    pen.memory_due = now + _MEMORY_EVERY
    try:
        used, total = pen.memory()
    except Exception:
        # A device that cannot be asked is no reason to end the user's training step.
        pen.memory, pen.memory_due = None, _NEVER
        return
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
        if _TRUST[source] < _TRUST[pen.counted_by]:
            return
        pen.counted_by = source
    pen.step = count = pen.step + 1
    if sync:
        pen.history = history = (pen.history << 1 | 1) & _WORD_MASK
        pen.flags = flags = pen.flags | _KNOWN_SYNC
    else:
        pen.history = history = pen.history << 1 & _WORD_MASK
        pen.flags = flags = (pen.flags | _KNOWN) & ~_SYNC
    now = _now()
    pen.slot.write_step(count, history, flags, now)
    if now >= pen.memory_due:
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
    pen.flags = int(flags)
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

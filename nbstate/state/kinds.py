"""The vocabulary of the state floor: kinds of distribution and precision, and the settings users hand in.

Every settings class has ``to_kwargs()``, which gives only what differs from its defaults, so that
``PartialState(**InitProcessGroupKwargs(timeout=...).to_kwargs())`` passes on what was asked for and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import timedelta
from enum import Enum
from typing import Any

from nbstate.errors import ArgumentTypeError, ArgumentValueError

__all__ = [
    "DistributedType",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "PrecisionType",
    "Settings",
    "parse_precision",
    "parse_timeout",
]


class _Word(str, Enum):
    """An enum whose members are also the words that users write."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[str]:
        """Every accepted word, in order."""
        return [member.value for member in cls]


class DistributedType(_Word):
    """How the ranks of this run work together.

    ``NO`` is one process. ``MULTI_*`` is one replica per rank on that kind of device. ``FSDP`` is a model sharded over
    the ranks, whatever the device. ``DEEPSPEED`` and ``MEGATRON_LM`` exist so that code which compares with them runs;
    nbstate never sets them.
    """

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_MPS = "MULTI_MPS"
    MULTI_XPU = "MULTI_XPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_HPU = "MULTI_HPU"
    XLA = "XLA"
    FSDP = "FSDP"
    DEEPSPEED = "DEEPSPEED"
    MEGATRON_LM = "MEGATRON_LM"

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class PrecisionType(_Word):
    """Mixed precision: none, or the type that the forward pass computes in."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"


def parse_precision(value: Any, source: str = "mixed_precision") -> str:
    """One of ``'no'``, ``'fp16'``, ``'bf16'``, ``'fp8'``, whatever the case it was written in.

    Parameters
    ----------
    value : str or PrecisionType
        What was given.
    source : str
        The argument or variable it came from, for the error.

    Raises
    ------
    ArgumentValueError
        If it is anything else. The text lists what is accepted.
    """
    word = str(value).lower() if isinstance(value, str) else value
    if word in PrecisionType.list():
        return str(word)
    accepted = ", ".join(repr(known) for known in PrecisionType.list())
    raise ArgumentValueError(f"{source}={value!r} is not a precision; accepted are {accepted}")


def parse_timeout(value: Any) -> timedelta | None:
    """A time-out as a ``timedelta``; numbers are seconds, None stays None (torch's own default).

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If it is neither a time nor a number, or not above zero.
    """
    if value is None:
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = timedelta(seconds=value)
    if not isinstance(value, timedelta):
        raise ArgumentTypeError(f"timeout must be a datetime.timedelta or a number of seconds, not {value!r}")
    if value <= timedelta(0):
        raise ArgumentValueError(f"timeout must be above zero, not {value}")
    return value


@dataclass
class Settings:
    """Base of the settings classes: a dataclass that knows what differs from its defaults."""

    def to_dict(self) -> dict[str, Any]:
        """Every setting by its name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def to_kwargs(self) -> dict[str, Any]:
        """Only the settings that differ from the defaults."""
        defaults = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if value != defaults[name]}


@dataclass
class InitProcessGroupKwargs(Settings):
    """How the process group is made; what ``torch.distributed.init_process_group`` calls by the same names.

    Parameters
    ----------
    backend : str, optional
        ``"nccl"``, the default, stands for the backend of the device kind (gloo on a CPU), so that a script which names
        it also runs on a laptop. Any other name is passed on.
    init_method : str, optional
        Address of the rendezvous. Default: what the launch variables say.
    timeout : datetime.timedelta or float, optional
        How long a barrier or a collective may take; numbers are seconds. Default: torch's own for the backend.

    Examples
    --------
    >>> from datetime import timedelta
    >>> InitProcessGroupKwargs(timeout=timedelta(seconds=90)).to_kwargs()
    {'timeout': datetime.timedelta(seconds=90)}
    """

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        self.timeout = parse_timeout(self.timeout)


@dataclass
class GradientAccumulationPlugin(Settings):
    """How gradients are accumulated.

    Parameters
    ----------
    num_steps : int, optional
        Batches per optimizer step. None is 1.
    adjust_scheduler : bool
        Whether the scheduler is stepped also for the batches that were only accumulated.
    sync_with_dataloader : bool
        Whether the last batch of a loader always synchronises, and the count starts again with the next epoch.
    sync_each_batch : bool
        Whether gradients are exchanged at each batch, which saves the memory of unreduced ones under FSDP.
        ``sync_gradients`` keeps its meaning.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        if self.num_steps is None:
            return
        if not isinstance(self.num_steps, int) or isinstance(self.num_steps, bool):
            raise ArgumentTypeError(f"num_steps must be a whole number, not {self.num_steps!r}")
        if self.num_steps < 1:
            raise ArgumentValueError(f"num_steps must be 1 or more, not {self.num_steps}")

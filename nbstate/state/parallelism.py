"""ParallelismConfig: how the ranks are laid out as a grid of replicas, shards and slices."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch.distributed as dist

from nbstate.errors import ArgumentTypeError, ArgumentValueError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["AXES", "ParallelismConfig"]

# Outermost first: neighbours on the last axes talk most, so they stand next to each other on one machine.
AXES = ("dp_replicate", "dp_shard", "cp", "sp", "tp")


@dataclass(frozen=True)
class ParallelismConfig:
    """Sizes of the five axes of parallelism. Their product must be the number of ranks.

    Parameters
    ----------
    dp_replicate_size : int
        Replicas of the model.
    dp_shard_size : int
        Parts that each replica is cut into (FSDP).
    tp_size, cp_size, sp_size : int
        Ranks per tensor-parallel, context-parallel and sequence-parallel group.

    Examples
    --------
    >>> config = ParallelismConfig(dp_replicate_size=2, tp_size=4)
    >>> config.total_size
    8
    """

    dp_replicate_size: int = 1
    dp_shard_size: int = 1
    tp_size: int = 1
    cp_size: int = 1
    sp_size: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if not isinstance(size, int) or isinstance(size, bool):
                raise ArgumentTypeError(f"{field.name} must be a whole number, not {size!r}")
            if size < 1:
                raise ArgumentValueError(f"{field.name} must be 1 or more, not {size}")

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each axis, outermost first."""
        return {axis: getattr(self, f"{axis}_size") for axis in AXES}

    @property
    def total_size(self) -> int:
        """Number of ranks the layout needs."""
        return math.prod(self.sizes.values())

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks, or groups of them, that each see their own part of the data."""
        return self.dp_replicate_size * self.dp_shard_size

    @property
    def non_data_parallel_size(self) -> int:
        """Neighbouring ranks that work on the same samples together (tensor, context and sequence parallel)."""
        return self.tp_size * self.cp_size * self.sp_size

    @property
    def shards(self) -> bool:
        """Whether the model's parameters are cut over ranks."""
        return self.dp_shard_size > 1

    def check_world(self, world_size: int) -> None:
        """Refuse a world that the layout does not fill exactly.

        Raises
        ------
        ArgumentValueError
            With the sum.
        """
        if self.total_size != world_size:
            factors = " * ".join(f"{axis}_size={size}" for axis, size in self.sizes.items())
            raise ArgumentValueError(
                f"parallelism_config needs {factors} = {self.total_size} ranks, but there are {world_size}"
            )

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """A mesh of all ranks with the five axes by name, also those of size 1.

        Parameters
        ----------
        device_type : str
            As ``"cpu"`` or ``"cuda"``.

        Returns
        -------
        DeviceMesh or None
            None alone: a mesh needs a process group, and one process has none.

        Raises
        ------
        ArgumentValueError
            If the product of the sizes is not the number of ranks.
        """
        grouped = dist.is_available() and dist.is_initialized()
        self.check_world(dist.get_world_size() if grouped else 1)
        if not grouped:
            return None
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(device_type, tuple(self.sizes.values()), mesh_dim_names=AXES)

"""Where this rank stands in the layout: whose data it sees, and with whom it shares them.

Without a layout every rank has data of its own. Ranks of one tensor-parallel (or context-parallel) group compute one
model together on the same samples, so to loaders, schedulers and metrics they are one. They are neighbours: the mesh
has those axes last (see ``nbstate.state.parallelism.AXES``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from nbstate.errors import ArgumentValueError
from nbstate.state import AcceleratorState, ParallelismConfig, PartialState, pick_device_kind, read_environment

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["DataPlace", "check_layout", "data_mesh", "data_place"]

_CONTEXT_DEVICES: Final = ("cuda", "xpu")


@dataclass(frozen=True)
class DataPlace:
    """This rank as loaders see it.

    Attributes
    ----------
    parts : int
        How many parts the data is shared out in.
    index : int
        Which part is this rank's.
    group : int
        How many neighbouring ranks have the same part.
    """

    parts: int
    index: int
    group: int = 1


def data_place() -> DataPlace:
    """Which part of the data is this rank's. Builds the state if need be."""
    state = PartialState()
    layout: ParallelismConfig | None = AcceleratorState._shared_state.get("parallelism_config")
    group = 1 if layout is None else layout.non_data_parallel_size
    return DataPlace(state.num_processes // group, state.process_index // group, group)


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The part of the mesh over which parameters are sharded and replicated.

    Ranks of one context-parallel group hold the same parameters and different stretches of the same samples; they
    share in the sharding, as their gradients have to be averaged as well.
    """
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    replicate, shard, context = sizes["dp_replicate"], sizes["dp_shard"], sizes["cp"]
    if context == 1:
        return mesh["dp_replicate", "dp_shard"] if replicate > 1 else mesh["dp_shard"]
    if replicate == 1:
        return mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    from torch.distributed.device_mesh import init_device_mesh

    # Torch will not slice an axis that was flattened together with one that was not; without tensor parallelism
    # (``check_layout``) these are all the ranks, in the same order.
    return init_device_mesh(
        mesh.device_type, (replicate, shard * context), mesh_dim_names=("dp_replicate", "dp_shard_cp")
    )


def _planned_device_type(cpu: bool) -> str:
    """The kind of device that this process computes on, or would. Makes nothing."""
    if PartialState._shared_state:
        return str(PartialState._shared_state["device"].type)
    environment = read_environment()
    return "cpu" if cpu or environment.use_cpu else pick_device_kind(environment.device).name


def check_layout(layout: ParallelismConfig | None, cpu: bool = False) -> None:
    """Refuse what no model can be spread over on this process's kind of device, before any rank waits for another.

    Parameters
    ----------
    layout : ParallelismConfig, optional
        What is asked for.
    cpu : bool
        Whether the CPU is.

    Raises
    ------
    NotImplementedError
        Sequence parallelism; context and tensor parallelism with replicas.
    ArgumentValueError
        Context parallelism where torch's attention has no ring.
    """
    if layout is None:
        return
    if layout.sp_size > 1:
        raise NotImplementedError(
            "ParallelismConfig(sp_size > 1): sequence parallelism over attention heads is not served; "
            "a tensor-parallel plan may use 'sequence_parallel' for its norms."
        )
    if min(layout.cp_size, layout.tp_size, layout.dp_replicate_size) > 1:
        raise NotImplementedError(
            "ParallelismConfig: context and tensor parallelism together are served with sharding, but not with "
            "replicas; give dp_shard_size the ranks of dp_replicate_size."
        )
    if layout.cp_size > 1 and (device_type := _planned_device_type(cpu)) not in _CONTEXT_DEVICES:
        raise ArgumentValueError(
            f"ParallelismConfig(cp_size={layout.cp_size}): torch passes attention round a ring of ranks on "
            f"{' and '.join(_CONTEXT_DEVICES)} devices only, not on {device_type}."
        )

"""Norms of gradients that are spread over ranks.

Torch's own functions take tensors of one kind: all whole, or all cut over one mesh. A model under tensor parallelism
has both, and one that is sharded as well has two meshes. Here every rank works on what it holds, and one small sum a
mesh makes the norm whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["clip_grad_norm_", "clip_grad_value_", "local", "spread_over"]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor: the memory itself, not a copy."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def spread_over(tensor: Any) -> tuple[Any, ...]:
    """The process groups over which a tensor is cut; empty if this rank has the whole of it."""
    placements = getattr(tensor, "placements", ())
    return tuple(
        tensor.device_mesh.get_group(axis)
        for axis, placement in enumerate(placements)
        if not placement.is_replicate() and tensor.device_mesh.size(axis) > 1
    )


def _gradients(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    these = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    return [parameter.grad for parameter in these if parameter.grad is not None]


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Scale gradients down so that their common norm is at most ``max_norm``.

    Where some are spread over ranks, every rank of their mesh is to call it.

    Parameters
    ----------
    parameters : tensor or iterable of tensors
        Whose gradients.
    max_norm : float
        The most that is allowed.
    norm_type : float
        The p of the norm; ``inf`` takes the largest entry.

    Returns
    -------
    torch.Tensor
        The norm before, of all ranks' parts; no dimensions.
    """
    these = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    gradients = _gradients(these)
    if not any(hasattr(gradient, "placements") for gradient in gradients):
        return torch.nn.utils.clip_grad_norm_(these, max_norm, norm_type=norm_type)
    total = _norm(gradients, float(norm_type))
    # Clamped, not compared: reading the value would make the host wait for the device.
    torch._foreach_mul_([local(gradient) for gradient in gradients], torch.clamp(max_norm / (total + 1e-6), max=1.0))
    return total


def _norm(gradients: Sequence[torch.Tensor], p: float) -> torch.Tensor:
    by_groups: dict[tuple[Any, ...], list[torch.Tensor]] = {}
    for gradient in gradients:
        by_groups.setdefault(spread_over(gradient), []).append(local(gradient))
    sums, zero = [], torch.zeros(1, device=gradients[0].device)
    for groups, parts in by_groups.items():
        # More ranks than rows leave some with nothing, which has no largest entry.
        norms = [norm.float() for norm in torch._foreach_norm([part for part in parts if part.numel()] or [zero], p)]
        together = torch.stack(norms).amax() if math.isinf(p) else torch.stack(norms).pow(p).sum()
        for group in groups:
            dist.all_reduce(together, op=dist.ReduceOp.MAX if math.isinf(p) else dist.ReduceOp.SUM, group=group)
        sums.append(together)
    total = torch.stack(sums)
    return total.amax() if math.isinf(p) else total.sum().pow(1.0 / p)


@torch.no_grad()
def clip_grad_value_(parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
    """Cut every gradient to at most ``clip_value`` in size, spread over ranks or not."""
    for gradient in _gradients(parameters):
        local(gradient).clamp_(-clip_value, clip_value)

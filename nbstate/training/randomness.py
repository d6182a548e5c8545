"""Random numbers that agree on every rank, or differ on purpose."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nbstate.errors import ArgumentValueError
from nbstate.state import AcceleratorState, PartialState

__all__ = [
    "agree_on_generator",
    "agree_on_seed",
    "random_states",
    "set_random_states",
    "set_seed",
    "synchronize_rng_states",
]

RNG_TYPES = ("torch", "cuda", "xpu", "npu", "mlu", "musa", "hpu", "generator")


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python, NumPy, torch and the device.

    Parameters
    ----------
    seed : int
        The seed.
    device_specific : bool
        Add the rank, so that ranks draw different numbers.
    deterministic : bool
        Also make torch use deterministic algorithms.
    """
    if device_specific:
        seed += AcceleratorState().process_index
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # Seeds the CPU and every accelerator that torch knows, those that are not yet initialised included.
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def agree_on_seed(seed: int, state: PartialState) -> int:
    """The main process's number, on every rank."""
    if state.num_processes == 1:
        return seed
    agreed = torch.tensor([seed], dtype=torch.int64, device=state.device)
    dist.broadcast(agreed, src=0)
    return int(agreed.item())


def agree_on_generator(generator: torch.Generator, state: PartialState) -> None:
    """Set a generator to the state of the main process's."""
    if state.num_processes > 1:
        generator.set_state(_agreed_state(generator.get_state(), state))


def _agreed_state(rng_state: torch.Tensor, state: PartialState) -> torch.Tensor:
    sent = rng_state.to(state.device)
    dist.broadcast(sent, src=0)
    return sent.cpu()


def synchronize_rng_states(rng_types: Sequence[str | Any], generator: torch.Generator | None = None) -> None:
    """Set random states of every rank to the main process's.

    Parameters
    ----------
    rng_types : sequence of str
        "torch", "generator" (the one given), or the name of an accelerator ("cuda", ...), for its current device.
    generator : torch.Generator, optional
        What "generator" means.
    """
    state = PartialState()
    for kind in (str(getattr(entry, "value", entry)) for entry in rng_types):
        if kind not in RNG_TYPES:
            raise ArgumentValueError(f"rng_types are among {', '.join(map(repr, RNG_TYPES))}, not {kind!r}.")
        if state.num_processes == 1 or (kind == "generator" and generator is None):
            continue
        if kind == "torch":
            torch.set_rng_state(_agreed_state(torch.get_rng_state(), state))
        elif kind == "generator":
            assert generator is not None
            agree_on_generator(generator, state)
        else:
            module = getattr(torch, kind)
            module.set_rng_state(_agreed_state(module.get_rng_state(), state))


def random_states(device: torch.device) -> dict[str, Any]:
    """The states of Python's, NumPy's, torch's and the device's generators, made of tensors and plain values only."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
    }
    module: Any = getattr(torch, device.type, None)
    if device.type != "cpu" and hasattr(module, "get_rng_state"):
        states[device.type] = module.get_rng_state().cpu()
    return states


def set_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Go on drawing where ``random_states`` was called."""
    random.setstate(states["python"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if device.type in states and device.type != "cpu":
        getattr(torch, device.type).set_rng_state(states[device.type])

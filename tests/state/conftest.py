"""Every test starts, and leaves the process, with no state and no launch variables."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from nbstate.state import AcceleratorState, GradientState

PREFIXES = ("OMPI_", "MV2_", "PMI_", "MPI_", "PMIX_", "SLURM_", "ACCELERATE_", "NBSTATE_", "TORCHELASTIC_", "MASTER_")
NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "FORK_LAUNCHED", "PBS_JOBID")


def launch_variables() -> list[str]:
    return [name for name in os.environ if name in NAMES or name.startswith(PREFIXES)]


@pytest.fixture(autouse=True)
def clean_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in launch_variables():
        monkeypatch.delenv(name)
    AcceleratorState.reset()
    GradientState.reset()
    yield
    AcceleratorState.reset()
    GradientState.reset()

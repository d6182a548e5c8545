"""The very first lines of a rank, the same for every engine and start method.

Light on purpose: under spawn it takes a second to import torch, and a kernel that is killed meanwhile must not leave
the rank behind. So the rank's life is tied to its parent's before anything else.
"""

from __future__ import annotations

from typing import NoReturn

from nbstate.launch.lifeline import die_with_parent
from nbstate.launch.plan import RankPlan

__all__ = ["enter"]


def enter(plan: RankPlan) -> NoReturn:
    """Be a rank. Never returns."""
    die_with_parent(plan.parent or None)
    from nbstate.launch.rank import live

    live(plan)

"""What the fork server imports before it forks its first rank: torch, and the code of a rank. Nothing else.

Importing this module is meant for that process alone: it ties its life to the kernel's.
"""

import gc

import torch._dynamo  # noqa: F401 - the first optimizer of a rank imports it: 1.5 s

import nbstate.launch.rank
import nbstate.training  # noqa: F401
from nbstate.launch.lifeline import die_with_parent
from nbstate.telemetry import collectives

die_with_parent()
# Every rank has them; a no-op without a probe.
collectives.install()
# A rank's first collection would otherwise touch, and so copy, every page that holds an object.
gc.collect()
gc.freeze()

"""What the fork server imports before it forks its first rank: torch, and the code of a rank. Nothing else.

Importing this module is meant for that process alone: it ties its life to the kernel's, and leaves the kernel's process
group, since ipykernel waits at every restart until nobody is left in it. Ranks join the kernel's group again.
"""

import gc
import os
import sys

from nbstate.launch.lifeline import die_with_parent

die_with_parent()
os.setpgid(0, 0)

import torch._dynamo  # noqa: E402, F401 - the first optimizer of a rank imports it: 1.5 s

import nbstate.launch.rank  # noqa: E402
import nbstate.training  # noqa: E402, F401
from nbstate.telemetry import collectives  # noqa: E402

# Every rank has them; a no-op without a probe.
collectives.install()
# A rank's first collection would otherwise touch, and so copy, every page that holds an object.
gc.collect()
gc.freeze()

if len(sys.argv) > 1:
    _say = int(sys.argv.pop())  # see engines/forkserver.py
    os.write(_say, b".")
    os.close(_say)

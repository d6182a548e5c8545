"""What the fork server imports before it forks its first rank: torch, and the code of a rank. Nothing else.

Importing this module is meant for that process alone: it ties its life to the kernel's.
"""

import nbstate.launch.rank
import nbstate.training  # noqa: F401
from nbstate.launch.lifeline import die_with_parent

die_with_parent()

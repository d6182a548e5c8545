"""What makes ranks. Each engine is one file; all of them run the same bootstrap, ``nbstate.launch.rank``."""

from nbstate.launch.engines.base import Engine, RankHandle
from nbstate.launch.engines.local import LocalEngine

__all__ = ["Engine", "LocalEngine", "RankHandle"]

"""The process group: made once, made again after a reset, and left alone where it belongs to a parent.

A second group over the same store would read the first one's addresses and connect to sockets that are gone. So the
store is kept for the life of the process, and each group lives under a prefix of its own number.
"""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from nbstate.state.environment import LaunchEnvironment

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["destroy_group", "destroy_own_group", "forget_inherited_group", "grouped", "make_group"]

# What torch's own rendezvous waits when nobody says otherwise.
_PATIENCE: Final = timedelta(minutes=30)

_stores: dict[tuple[str, int, int], Store] = {}
_made = 0
# The group that was made here, weakly: torch and the user may destroy it at any time.
_ours: weakref.ref[Any] | None = None
# Groups and stores of a parent process. Their destructors would join threads that a fork left behind, so a child must
# never drop the last reference.
_abandoned: list[Any] = []


def grouped() -> bool:
    """Whether this process has a default process group."""
    return dist.is_available() and dist.is_initialized()


def make_group(
    environment: LaunchEnvironment,
    backend: str,
    timeout: timedelta | None,
    device: torch.device | None,
    options: dict[str, Any],
) -> None:
    """Make the default process group of the world that the launch variables describe.

    Parameters
    ----------
    environment : LaunchEnvironment
        Rank, size, and where the ranks meet.
    backend : str
        As torch calls it.
    timeout : datetime.timedelta, optional
        For barriers and collectives, and for the meeting itself.
    device : torch.device, optional
        Given to backends that bind to one device; None for the others.
    options : dict
        Anything else for ``init_process_group``. A ``store`` or ``init_method`` of the user's is used as it is.

    Raises
    ------
    RuntimeError
        Torch's own. No group remains.
    """
    global _made, _ours
    rank, size = environment.rank, environment.world_size
    arguments: dict[str, Any] = {"backend": backend, "rank": rank, "world_size": size, **options}
    if timeout is not None:
        arguments["timeout"] = timeout
    if device is not None:
        arguments.setdefault("device_id", device)
    if "store" not in options and "init_method" not in options and backend != "xla":
        arguments["store"] = _fresh_store(environment.init_method, rank, size, timeout or _PATIENCE)
    elif backend == "xla":
        arguments.setdefault("init_method", "xla://")
    _made += 1
    try:
        dist.init_process_group(**arguments)
    except BaseException:
        destroy_group()
        raise
    _ours = weakref.ref(dist.group.WORLD)


def _fresh_store(url: str, rank: int, size: int, timeout: timedelta) -> Store:
    """A store that no earlier group has written to."""
    # Not at the top: a torch without distributed has none of these names, and is fine for one process.
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    key = (url, rank, size)
    if key not in _stores:
        _stores[key] = next(iter(rendezvous(url, rank, size, timeout=timeout)))[0]
    _stores[key].set_timeout(timeout)
    return PrefixStore(f"nbstate/{_made}", _stores[key])


def destroy_group() -> None:
    """Destroy the default process group, if there is one."""
    if grouped():
        dist.destroy_process_group()


def destroy_own_group() -> None:
    """Destroy the default process group if ``make_group`` made it; one that the user made is the user's."""
    if grouped() and _ours is not None and _ours() is dist.group.WORLD:
        destroy_group()


def forget_inherited_group() -> None:
    """Make a forked child as if no group had been made, without touching the one that its parent holds.

    Destroying it would close connections that the parent uses and wait for threads that do not exist here. Torch has
    no call for this, so its tables of groups are emptied and their contents kept alive until the process ends.
    """
    global _made, _ours
    _ours = None
    _abandoned.append(dict(_stores))
    _stores.clear()
    _made = 0
    if not grouped():
        return
    c10d: Any = dist.distributed_c10d
    world = c10d._world
    _abandoned.append(world.default_pg)
    for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg"):
        table = getattr(world, name, None)
        if table is not None:
            _abandoned.append(dict(table))
            table.clear()
    world.pg_coalesce_state.clear()
    world.group_count = 0
    c10d._update_default_pg(None)
    c10d._unregister_all_process_groups()

"""Process groups as the board names them, and how many operations a rank has begun in each.

A count is of the calls of this rank. Members of a group that run the same program count alike, so equal numbers of two
members mean the same operation, as it is with the numbers of the whole world.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

import torch.distributed as dist

__all__ = ["ROOM", "WORLD", "Group", "group_of", "known_groups", "members_text"]

ROOM: Final = 96  # bytes that the board has for a group's members


class Group:
    """What is known of one process group.

    Attributes
    ----------
    ranks : tuple of int
        Its members' global ranks, in the order of their ranks in the group; empty where they are not known.
    members : str
        The same as the board shows it; empty for the whole world.
    begun : int
        Collectives that this rank has entered in it.
    sent, received : dict of int to int
        Sends to, and receives from, each global rank; -1 where the other side is not known.
    """

    __slots__ = ("_alive", "begun", "members", "ranks", "received", "sent")

    def __init__(self, members: str, ranks: tuple[int, ...], alive: Any = None) -> None:
        self.members = members
        self.ranks = ranks
        self.begun = 0
        self.sent: dict[int, int] = {}
        self.received: dict[int, int] = {}
        self._alive = alive  # takes this entry away when the process group goes

    def global_rank(self, rank: object) -> int:
        """The global rank of one of its members, -1 if there is no such."""
        if type(rank) is not int or rank < 0:
            return -1
        if not self.members:
            return rank
        return self.ranks[rank] if rank < len(self.ranks) else -1


WORLD: Final = Group("", ())  # what is known of the whole world, whichever process group stands for it
known_groups: Final[dict[int, Group]] = {}  # of the others, by id


def group_of(group: Any) -> Group:
    """What is known of a process group, or of what stands in a process group's place; None is the whole world."""
    if group is None:
        return WORLD
    return known_groups.get(id(group)) or _remember(group)


def _remember(group: Any) -> Group:
    if group is dist.group.WORLD:
        return WORLD
    key = id(group)
    try:
        # Weakly: a group that is destroyed must go at once, its connections with it.
        alive = weakref.ref(group, lambda _: known_groups.pop(key, None))
        ranks = tuple(dist.get_process_group_ranks(group))
    except (TypeError, KeyError, ValueError, RuntimeError):
        return Group("?", ())  # no process group: it is for the wrapped function to say so
    return known_groups.setdefault(key, Group(members_text(ranks), ranks, alive))  # the flight watch asks as well


def members_text(ranks: tuple[int, ...]) -> str:
    """Ranks as the board shows them, ``"0,2"``; what does not fit is left out and ``...`` put in its place.

    Examples
    --------
    >>> from nbstate.telemetry.groups import members_text
    >>> members_text((0, 2))
    '0,2'
    """
    text = ",".join(map(str, ranks))
    if len(text) <= ROOM:
        return text
    return text[: text.rindex(",", 0, ROOM - 2)] + ",..."

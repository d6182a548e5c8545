from __future__ import annotations

import gc

import torch
import torch.distributed as dist

from nbstate.telemetry import groups
from nbstate.telemetry.groups import ROOM, group_of, members_text
from nbstate.telemetry.layout import TEXTS


def test_members_that_do_not_fit_are_left_out():
    assert members_text((0, 2)) == "0,2"
    assert members_text(()) == ""
    for size in range(1, 600):
        ranks = tuple(range(size))
        text = members_text(ranks)
        assert len(text) <= ROOM == TEXTS["collective_group"]
        shown = text.removesuffix(",...").split(",")
        assert shown == [str(rank) for rank in ranks[: len(shown)]]
        assert text.endswith("...") == (len(shown) < size)


def test_what_stands_in_a_groups_place_is_not_remembered():
    for nonsense in ("text", dist.GroupMember.NON_GROUP_MEMBER, 3):
        assert group_of(nonsense).members == "?"
        assert id(nonsense) not in groups.known_groups
    assert group_of(None).members == ""


def test_groups_are_known_by_members_and_forgotten_with_them(world):
    def live(rank, board):
        odd = dist.new_group([2, 1])
        if rank == 0:
            return dist.barrier(), False
        known = group_of(odd)
        assert group_of(odd) is known
        assert group_of(dist.group.WORLD) is group_of(None)
        seen = known.members, [known.global_rank(i) for i in (0, 1, 2, -1, None, "x")]
        dist.barrier()
        key = id(odd)
        dist.destroy_process_group(odd)
        del odd
        gc.collect()
        return seen, key in groups.known_groups

    answers = world.run(live, size=3)
    assert [known for _, known in answers] == [False] * 3
    for seen, _ in answers[1:]:
        assert seen == ("1,2", [1, 2, -1, -1, -1, -1])


def test_each_group_numbers_its_own_operations(world):
    def live(rank, board):
        pair, everyone = dist.new_group([0, 2]), dist.new_group([0, 1, 2])
        seen = []

        def note(_=None):
            now = board.snapshot()[rank]
            seen.append((now.collective_name, now.collective_group, now.collective_sequence, now.collective_place))

        x = torch.ones(2)
        note(dist.all_reduce(x, group=everyone))
        if rank != 1:
            note(dist.all_reduce(x, group=pair))
            note(dist.barrier(pair))
            note(dist.broadcast(x, 0, pair))
        note(dist.broadcast(x, 0, group=everyone))
        dist.barrier()
        note(dist.all_reduce(x))
        return seen

    whole = [("all_reduce", "0,1,2", 1, 0), ("broadcast", "0,1,2", 2, 0), ("all_reduce", "", 4, 5)]
    part = [("all_reduce", "0,2", 1, 0), ("barrier", "0,2", 2, 0), ("broadcast", "0,2", 3, 0)]
    both = [whole[0], *part, *whole[1:]]
    assert world.run(live, size=3) == [both, whole, both]


def test_a_group_that_only_its_members_make_concerns_only_them(world):
    def live(rank, board):
        if rank != 1:
            dist.new_group([0, 2], use_local_synchronization=True)
        now = board.snapshot()[rank]
        return now.collective_name, now.collective_group, now.collective_partial, now.collective

    members = ("new_group", "0,2", 1, 1)
    assert world.run(live, size=3) == [members, ("init_process_group", "", 0, 1), members]

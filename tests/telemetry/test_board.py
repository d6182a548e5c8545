from __future__ import annotations

import os
import signal
import subprocess
import sys

import multiprocess
import pytest

from nbstate.telemetry.board import HISTORY, Barrier, Board, Flag, Phase, missing_from_barrier
from nbstate.telemetry.layout import FILES, SIGNED, TEXTS, WORDS

FORK = multiprocess.get_context("fork")


@pytest.fixture
def board():
    made = Board.create(2)
    yield made
    made.close()


def test_a_new_board_says_that_nobody_is_there(board):
    first, second = board.snapshot()
    assert (first.rank, second.rank) == (0, 1)
    assert first.phase is Phase.ABSENT
    assert first.barriers == ()
    assert not first.in_barrier
    assert not first.in_collective


@pytest.mark.parametrize("name", WORDS)
def test_every_word_is_read_as_it_was_written(board, name):
    value = Phase.LOADER if name == "phase" else -3 if name in SIGNED else (1 << 64) - 1
    board.slot(1).write(pending_count=1)  # without one, the others of its kind are not read
    board.slot(1).write(**{name: value})
    first, second = board.snapshot()
    assert getattr(second, name) == value
    assert getattr(first, name) == (-1 if name == "collective_peer" else 0)
    assert board.slot(1).read(name) == value


@pytest.mark.parametrize(("name", "room"), TEXTS.items())
def test_a_text_keeps_its_end(board, name, room):
    slot = board.slot(0)
    slot.write(pending_count=1)
    slot.write_text(**{name: "x" * room})
    assert getattr(slot.snapshot(), name) == "x" * room
    slot.write_text(**{name: "a/b/" + "y" * (room - 1) + "z"})
    assert getattr(slot.snapshot(), name) == "y" * (room - 1) + "z"
    slot.write_text(**{name: "short"})
    assert getattr(slot.snapshot(), name) == "short"


def test_a_cut_text_has_no_half_character(board):
    slot = board.slot(0)
    slot.write_text(device="ü" * 12 + "x")  # 25 bytes for 24
    assert slot.snapshot().device == "ü" * 11 + "x"
    slot.write_text(device="\udc80broken")
    assert slot.snapshot().device.endswith("broken")


def test_slots_do_not_touch_each_other(board):
    for name, room in TEXTS.items():
        board.slot(0).write_text(**{name: "x" * room})
    board.slot(0).write(**dict.fromkeys(WORDS, (1 << 64) - 1))
    for number in range(1, 2 * HISTORY):
        board.slot(0).write_barrier(Barrier(number, 1, 2, 3))
    assert board.snapshot()[1] == Board.snapshot(board)[1]
    fresh = Board.create(2)
    assert board.snapshot()[1] == fresh.snapshot()[1]
    fresh.close()


def test_an_unknown_phase_reads_as_absent(board):
    board.slot(0).write(phase=77)
    assert board.snapshot()[0].phase is Phase.ABSENT


def test_flags_are_bits(board):
    board.slot(0).write(flags=Flag.KNOWN | Flag.END_OF_DATALOADER)
    snapshot = board.snapshot()[0]
    assert snapshot.flag(Flag.END_OF_DATALOADER)
    assert not snapshot.flag(Flag.SYNC_GRADIENTS)


def test_the_last_barriers_are_kept_in_order(board):
    slot = board.slot(0)
    for number in range(1, HISTORY + 6):
        slot.open_barrier(number, 100 * number, "train.py", number)
        slot.close_barrier(number, Phase.RUNNING, 100 * number + 7)
    slot.open_barrier(HISTORY + 6, 9_000, "train.py", 5)
    kept = slot.snapshot().barriers
    assert [barrier.number for barrier in kept] == list(range(7, HISTORY + 7))
    assert kept[0] == Barrier(7, 700, 707, 7, "train.py")
    assert kept[-1] == Barrier(HISTORY + 6, 9_000, 0, 5, "train.py")


def test_barriers_remember_their_files_and_never_anothers(board):
    slot = board.slot(0)
    names = [f"/tmp/{'x' * 250}/part{number % (FILES + 3)}.py" for number in range(HISTORY)]
    for number, name in enumerate(names, start=1):
        slot.open_barrier(number, number, name, number)
    told = {barrier.number: barrier.file for barrier in slot.snapshot().barriers}
    assert [told[number] for number in range(HISTORY - FILES + 1, HISTORY + 1)] == [n[-200:] for n in names[-FILES:]]
    assert all(told[number] in ("", name[-200:]) for number, name in enumerate(names, start=1))
    # The next attempt's rank has a slot of its own over the same memory.
    again = Board.attach(os.dup(board.fd), 2)
    again.slot(0).open_barrier(HISTORY + 1, 50, "again.py", 3)
    kept = slot.snapshot().barriers
    again.close()
    assert kept[-1] == Barrier(HISTORY + 1, 50, 0, 3, "again.py")
    assert all(barrier.file in ("", told[barrier.number]) for barrier in kept[:-1])


def test_what_the_flight_recorder_tells_is_written_beside_the_rank(board):
    slot = board.slot(0)
    slot.write(step=4)
    before = slot.snapshot()
    slot.write_native(7, 123, "all_reduce", "4 float32", "0,2")
    seen = slot.snapshot()
    assert (seen.native_sequence, seen.native_since, seen.native_name) == (7, 123, "all_reduce")
    assert (seen.native_shape, seen.native_group) == ("4 float32", "0,2")
    assert seen.step == 4
    assert slot.version == 2 * 2
    slot.write_native(0, 0)
    assert slot.snapshot() == before


def test_texts_of_collectives_follow_each_change(board):
    slot = board.slot(0)
    for filename, name in (("a.py", "reduce"), ("a.py", "gather"), ("b.py", "gather"), ("b.py", "gather")):
        slot.open_collective(1, 5, filename, 3, name, 8, False)
        assert (slot.snapshot().collective_file, slot.snapshot().collective_name) == (filename, name)
    slot.write_text(collective_name="other")
    slot.open_collective(2, 6, "b.py", 3, "gather", 8, False)
    assert slot.snapshot().collective_name == "gather"


def test_an_unchanged_slot_gives_the_same_snapshot(board):
    board.slot(0).write(step=1)
    before = board.snapshot()
    assert board.snapshot()[0] is before[0]
    board.slot(0).write(step=2)
    after = board.snapshot()
    assert after[0].step == 2
    assert after[1] is before[1]


def _write_for_ever(board: Board) -> None:
    slot, number = board.slot(0), 0
    while True:
        number += 1
        slot.open_collective(number, number, f"file{number}.py", number, f"op{number}", number, False)


def test_no_read_is_torn_while_a_rank_writes(board):
    writer = FORK.Process(target=_write_for_ever, args=(board,))
    writer.start()
    try:
        numbers = set()
        while len(numbers) < 2_000:
            seen = board.slot(0).snapshot(tries=100_000)
            number = seen.collective
            numbers.add(number)
            if not number:
                continue
            assert seen.collective_entered == seen.collective_line == seen.collective_bytes == number
            assert (seen.collective_file, seen.collective_name) == (f"file{number}.py", f"op{number}")
    finally:
        writer.kill()
        writer.join()


def _write_and_die(board: Board, in_the_middle: bool) -> None:
    slot = board.slot(1)
    slot.write(pid=os.getpid(), step=41)
    slot.open_barrier(7, 123, "train.py", 14)
    if in_the_middle:
        slot._words[0] += 1
        slot._words[WORDS.index("step") + 1] = 42
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("in_the_middle", [False, True])
def test_the_last_words_outlive_a_killed_rank(board, in_the_middle):
    rank = FORK.Process(target=_write_and_die, args=(board, in_the_middle))
    rank.start()
    rank.join(60)
    assert rank.exitcode == -signal.SIGKILL
    last = board.snapshot()[1]
    assert last.pid == rank.pid
    assert last.step == 41 + in_the_middle
    assert last.in_barrier
    assert (last.barrier, last.barrier_file, last.barrier_line) == (7, "train.py", 14)
    # Whoever writes next, the next attempt or the kernel, finds a slot that works.
    board.slot(1).write(step=1)
    mended = board.snapshot()[1]
    assert mended.step == 1
    assert board.snapshot()[1] is mended


def test_another_interpreter_attaches_by_descriptor(board):
    code = (
        "import sys; from nbstate.telemetry.board import Board;"
        "board = Board.attach(int(sys.argv[1]), 2); board.slot(1).write(step=9); board.close()"
    )
    subprocess.run([sys.executable, "-c", code, str(board.fd)], pass_fds=[board.fd], check=True, timeout=60)
    assert board.snapshot()[1].step == 9


def test_close_twice_gives_every_descriptor_back():
    before = set(os.listdir("/proc/self/fd"))
    board = Board.create(3)
    fd = board.fd
    assert not board.closed
    assert not os.get_inheritable(fd)
    board.close()
    board.close()
    assert board.closed
    assert set(os.listdir("/proc/self/fd")) == before
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_who_is_missing_from_the_newest_barrier(board):
    assert missing_from_barrier(board.snapshot()) == (0, (), ())
    board.slot(0).open_barrier(3, 10, "train.py", 1)
    assert missing_from_barrier(board.snapshot()) == (3, (0,), (1,))
    board.slot(1).open_barrier(3, 20, "train.py", 1)
    assert missing_from_barrier(board.snapshot()) == (3, (0, 1), ())
    board.slot(0).close_barrier(3, Phase.RUNNING, 30)
    board.slot(1).close_barrier(3, Phase.RUNNING, 30)
    assert missing_from_barrier(board.snapshot()) == (0, (), ())

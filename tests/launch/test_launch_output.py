"""Lines of N ranks: every one whole, none lost, none doubled, each with its rank."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from nbstate import notebook_launcher
from nbstate.launch.output import LineAssembler, Output

LINES = 2000


def prints_a_lot() -> None:
    rank = os.environ["RANK"]
    for number in range(LINES):
        if number % 3 == 0:
            print(f"line {number} of {rank}")
        elif number % 3 == 1:
            print("line", number, end="")
            print(f" of {rank}")
        else:
            sys.stdout.write(f"line {number} of ")
            sys.stdout.write(f"{rank}\n")
    print("no newline at the end", end="")


def test_every_line_arrives_whole_and_once(start_method: str, capsys: pytest.CaptureFixture[str]) -> None:
    notebook_launcher(prints_a_lot, num_processes=4, start_method=start_method)
    seen: dict[str, list[str]] = defaultdict(list)
    for line in capsys.readouterr().out.splitlines():
        found = re.fullmatch(r"\[(\d)\] (.*)", line)
        assert found, line
        seen[found[1]].append(found[2])
    for rank in "0123":
        assert seen[rank] == [f"line {n} of {rank}" for n in range(LINES)] + ["no newline at the end"]


handler = logging.StreamHandler()  # made before any launch, on the stderr of that moment
logger = logging.getLogger("made.before.the.launch")


def prints_every_way() -> None:
    os.write(1, b"os.write\n")
    subprocess.run(["echo", "a program"], check=True)
    os.system("echo a shell")
    print("to stderr", file=sys.stderr)
    sys.__stdout__.write("the original stdout\n")
    logger.addHandler(handler)
    logger.warning("a log handler from before")


def test_whatever_way_a_rank_prints_it_arrives_with_its_rank(capsys: pytest.CaptureFixture[str]) -> None:  # C17
    handler.setStream(sys.stderr)
    notebook_launcher(prints_every_way, num_processes=2, start_method="fork")
    captured = capsys.readouterr()
    for rank in (0, 1):
        for text in ("os.write", "a program", "a shell", "the original stdout"):
            assert f"[{rank}] {text}\n" in captured.out
        for text in ("to stderr", "a log handler from before"):
            assert f"[{rank}] {text}\n" in captured.err


def test_a_file_that_the_kernel_opened_can_be_written_by_a_forked_rank(tmp_path: Path) -> None:
    to_file = logging.FileHandler(tmp_path / "log")

    def logs() -> None:
        logger.addHandler(to_file)
        logger.warning("rank %s", os.environ["RANK"])

    notebook_launcher(logs, num_processes=2, start_method="fork")
    to_file.close()
    assert sorted((tmp_path / "log").read_text().splitlines()) == ["rank 0", "rank 1"]


def sockets() -> list[str]:
    targets = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own descriptor
            targets.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [target.split(":")[0] for target in targets if target.startswith("socket")]


def test_a_forked_rank_holds_no_socket_but_its_own(tmp_path: Path) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        # one: its control channel; rank 0 has the store's listener and connection to itself besides
        assert notebook_launcher(sockets, num_processes=2, start_method="fork")[1] == ["socket"]


def test_the_prefix_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    notebook_launcher(print, ("hello",), num_processes=1, log_line_prefix_template="rank ${rank}/${local_rank}: ")
    assert capsys.readouterr().out == "rank 0/0: hello\n"


def test_logs_of_one_rank() -> None:
    launch = notebook_launcher(print, ("hello",), num_processes=2, block=False)
    launch.results()
    assert launch.logs(1) == "hello\n"
    with pytest.raises(IndexError, match="ranks 0 to 1"):
        launch.logs(2)


def test_bytes_that_are_not_text_are_replaced() -> None:
    assembler = LineAssembler()
    assert assembler.feed(b"caf\xc3") == []
    assert assembler.feed(b"\xa9 \xff\n") == ["café \ufffd"]


def test_a_bar_that_redraws_itself_is_one_line() -> None:
    assembler = LineAssembler()
    assert assembler.feed(b"10%\r20%") == []
    assert assembler.feed(b"\r30%\r") == []
    assert assembler.feed(b"40%\nnext\r\n") == ["40%", "next\r"]
    output = Output(1, "")
    output.feed(0, "stdout", b"windows line\r\n")
    assert output.take() == [("stdout", "windows line\n")]


def test_what_is_left_without_a_newline_comes_at_the_end() -> None:
    assembler = LineAssembler()
    assert assembler.feed(b"half") == []
    assert assembler.feed(b"", final=True) == ["half"]
    assert assembler.feed(b"", final=True) == []


def test_streams_keep_their_order() -> None:
    output = Output(2, "${rank}:")
    output.feed(0, "stdout", b"a\n")
    output.feed(1, "stdout", b"b\n")
    output.feed(0, "stderr", b"c\n")
    output.feed(0, "stdout", b"d\n")
    assert output.take() == [("stdout", "0:a\n1:b\n"), ("stderr", "0:c\n"), ("stdout", "0:d\n")]
    assert output.take() == []

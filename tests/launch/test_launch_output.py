"""Lines of N ranks: every one whole, none lost, none doubled, each with its rank."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

import psutil
import pytest
from real_kernel import RealKernel, Reply

from nbstate import notebook_launcher
from nbstate.launch.flow import CELL, Flow
from nbstate.launch.output import LONGEST_LINE, LineAssembler, Output, Rich
from nbstate.launch.spill import IN_MEMORY, RankLog

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
    ctypes.CDLL(None).printf(b"C printf\n")
    print("to stderr", file=sys.stderr)
    sys.__stdout__.write("the original stdout\n")


def test_whatever_way_a_rank_prints_it_arrives_with_its_rank(
    start_method: str, capsys: pytest.CaptureFixture[str]
) -> None:  # C17
    notebook_launcher(prints_every_way, num_processes=2, start_method=start_method)
    captured = capsys.readouterr()
    for rank in (0, 1):
        for text in ("os.write", "a program", "a shell", "C printf", "the original stdout"):
            assert captured.out.count(f"[{rank}] {text}\n") == 1
        assert captured.err.count(f"[{rank}] to stderr\n") == 1


def logs() -> None:
    logger.addHandler(handler)
    logger.warning("a log handler from before")


def test_a_log_handler_that_was_made_before_the_launch(capsys: pytest.CaptureFixture[str]) -> None:  # C17
    handler.setStream(sys.stderr)
    notebook_launcher(logs, num_processes=2, start_method="fork")
    error = capsys.readouterr().err
    assert sorted(error.splitlines()) == [f"[{rank}] a log handler from before" for rank in (0, 1)]


def test_what_c_code_of_the_kernel_holds_back_is_not_printed_by_the_ranks(tmp_path: Path) -> None:
    script = (
        "import ctypes, nbstate\n"
        "ctypes.CDLL(None).printf(b'of the kernel\\n')\n"
        "nbstate.notebook_launcher(print, ('of a rank',), num_processes=2, start_method='fork', dashboard=False)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert sorted(ran.stdout.splitlines()) == ["[0] of a rank", "[1] of a rank", "of the kernel"]


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
    assert assembler.feed(b"caf\xc3") == ""
    assert assembler.feed(b"\xa9 \xff\n") == "café \ufffd\n"


def test_a_bar_that_redraws_itself_is_one_line() -> None:
    assembler = LineAssembler()
    assert assembler.feed(b"10%\r20%") == ""
    assert assembler.bar == "20%"
    assert assembler.feed(b"\r30%\r") == ""
    assert assembler.bar == "30%"
    assert assembler.feed(b"4") == assembler.feed(b"0%") == ""
    assert assembler.bar == "40%"
    assert assembler.feed(b"\n\r50%\rnext\r\n") == "40%\nnext\n"
    assert assembler.bar == ""
    assert assembler.feed(b"windows line\r") == ""
    assert assembler.feed(b"\n") == "windows line\n"


def test_a_bar_is_live_before_the_cell_gets_it() -> None:
    output = Output(2, "[${rank}] ")
    output.feed(1, "stdout", b"a line\n")
    assert not output.feed(1, "stderr", b"\r 10%")
    assert not output.feed(1, "stderr", b"\r 20%")
    assert output.recent() == ((1, "a line"), (1, " 20%"))
    assert output.take() == ("stdout", "[1] a line\n")
    assert output.take() is None
    assert output.feed(1, "stderr", b"\r100%\n")
    assert output.recent() == ((1, "a line"), (1, "100%"))
    assert output.take() == ("stderr", "[1] 100%\n")


def draws_a_bar() -> None:
    from tqdm import tqdm

    for _ in tqdm(range(200), mininterval=0, ascii=True, desc="\033[32mgreen\033[0m"):
        pass


def test_a_bar_of_tqdm_is_one_line_and_keeps_its_colour(capsys: pytest.CaptureFixture[str]) -> None:
    notebook_launcher(draws_a_bar, num_processes=2, start_method="forkserver")
    lines = sorted(capsys.readouterr().err.splitlines())
    assert [line.split("|")[0] for line in lines] == [f"[{rank}] \033[32mgreen\033[0m: 100%" for rank in (0, 1)]


def test_what_is_left_without_a_newline_comes_at_the_end() -> None:
    assembler = LineAssembler()
    assert assembler.feed(b"half") == ""
    assert assembler.feed(b"", final=True) == "half\n"
    assert assembler.feed(b"", final=True) == ""


def test_a_line_without_end_is_cut_and_nothing_of_it_is_lost() -> None:
    assembler, cut = LineAssembler(), []
    piece = ("0123456789" * 6554)[: 1 << 16].encode()
    for _ in range(1600):  # 100 MiB
        cut += assembler.feed(piece).splitlines()
    cut += assembler.feed(b"end\n").splitlines()
    assert max(map(len, cut)) < LONGEST_LINE + len(piece)
    assert "".join(cut) == piece.decode() * 1600 + "end"


def taken(output: Output) -> list[object]:
    return list(iter(output.take, None))


def test_streams_keep_their_order() -> None:
    output = Output(2, "${rank}:")
    output.feed(0, "stdout", b"a\n")
    output.feed(1, "stdout", b"b\n\nb\n")
    output.feed(0, "stderr", b"c\n")
    output.feed(0, "stdout", b"d\n")
    assert taken(output) == [("stdout", "0:a\n1:b\n1:\n1:b\n"), ("stderr", "0:c\n"), ("stdout", "0:d\n")]
    assert output.take() is None


def test_what_waits_for_the_cell_in_a_file_comes_in_order() -> None:
    output = Output(2, "${rank}:")
    for number in range(2000):  # 12 MB: more than may wait in memory
        output.feed(number % 2, "stdout", b"%06d%s\n" % (number, b"x" * 6000))
    shown = "".join(text for _, text in taken(output))  # type: ignore[misc, attr-defined]
    assert [line[:8] for line in shown.splitlines()] == [f"{number % 2}:{number:06d}" for number in range(2000)]
    assert output.logs(1).count("\n") == 1000


def test_a_log_is_read_from_file_and_memory_as_one() -> None:
    log = RankLog()
    places = [log.append(f"{number} é\n") for number in range(60_000)]
    whole = "".join(f"{number} é\n" for number in range(60_000))
    assert len(whole.encode()) > 2 * IN_MEMORY
    assert log.text() == whole
    assert [log.read(*places[at]) for at in (0, 30_000, 59_999)] == ["0 é\n", "30000 é\n", "59999 é\n"]
    assert log.read(places[10][0], places[-10][1]) == "".join(f"{number} é\n" for number in range(10, 59_991))
    assert log.tail(2) == ("59998 é", "59999 é")
    assert log.tail(0) == ()


def test_the_tail_of_a_giant_line_is_its_end() -> None:
    log = RankLog()
    log.append("a" * 1_000_000 + "end\n")
    (tail,) = log.tail(10)
    assert tail.startswith("…a")
    assert tail.endswith("aend")


def test_a_full_disk_costs_the_log_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    output = Output(1, "")
    line = b"x" * 999 + b"\n"
    for _ in range(6000):
        output.feed(0, "stdout", line)
    output.feed(0, "stdout", b"the last\n")
    assert sum(len(text) for _, text in taken(output)) == 6_000_009  # type: ignore[misc, attr-defined]
    log = output.logs(0)
    assert log.startswith("nbstate: what came before could not be kept: OSError: [Errno 28]")
    assert log.endswith("x\nthe last\n")
    assert len(log) < IN_MEMORY + 200
    assert output.tail(0, 1) == ("the last",)


def test_the_file_of_a_log_has_no_name_and_is_private() -> None:
    log = RankLog()
    log.append("x" * (IN_MEMORY + 1))
    status = os.fstat(log._fd)
    assert status.st_nlink == 0
    assert status.st_mode & 0o777 == 0o600
    fd = log._fd
    del log
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


MEGABYTES = 200


def prints_very_much() -> None:
    line = b"y" * 99 + b"\n"
    for _ in range(MEGABYTES * 10):
        sys.stdout.buffer.write(line * 1000)


class Peak(threading.Thread):
    """The most memory that a process, by default this one, has used while the block ran, in bytes."""

    def __init__(self, pid: int | None = None) -> None:
        super().__init__()
        self._process, self._over = psutil.Process(pid), threading.Event()

    def __enter__(self) -> Peak:
        self.before = self.most = self._process.memory_info().rss
        self.start()
        return self

    def run(self) -> None:
        while not self._over.wait(0.01):
            self.most = max(self.most, self._process.memory_info().rss)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()


class Counter(io.TextIOBase):
    """A cell that is slower than the rank."""

    lines = 0

    def write(self, text: str) -> int:
        self.lines += text.count("\n")
        time.sleep(0.0005)
        return len(text)


def test_a_rank_that_prints_without_measure_costs_the_kernel_little() -> None:
    cell = Counter()
    with contextlib.redirect_stdout(cell), Peak() as peak:
        launch = notebook_launcher(
            prints_very_much, num_processes=1, start_method="forkserver", block=False, dashboard=False
        )
        launch.results()
    assert cell.lines == MEGABYTES * 10_000
    assert peak.most - peak.before < 50e6
    assert len(launch.logs(0)) == MEGABYTES * 1_000_000


CHATTER = """
def chatter():
    rank = os.environ["RANK"]
    for number in range(20_000):
        if number % 3:
            print(f"line {number} of {rank}")
        else:
            sys.stdout.write(f"line {number}")
            sys.stdout.write(f" of {rank}\\n")
    print("no newline at the end", end="")
"""


def test_four_ranks_of_20000_lines_in_a_cell(kernel: RealKernel) -> None:  # C16
    kernel.good(CHATTER)
    reply = kernel.good("notebook_launcher(chatter, num_processes=4, start_method='forkserver', dashboard=False);")
    seen: dict[str, list[str]] = defaultdict(list)
    for line in reply.stdout.splitlines():
        seen[line[:4]].append(line[4:])
    assert sorted(seen) == [f"[{rank}] " for rank in range(4)]
    for rank in range(4):
        wanted = [f"line {n} of {rank}" for n in range(20_000)]
        assert seen[f"[{rank}] "] == [*wanted, "no newline at the end"]


def test_a_cell_gets_text_no_faster_than_a_front_end_passes_it_on() -> None:
    time_is = 0.0
    flow = Flow(clock=lambda: time_is)
    sent = []
    while not flow.is_full:
        while flow.is_open and not flow.is_full:
            flow.add("x" * 99_999 + "\n")
            sent.append((time_is, 100_001))
        time_is += 0.02
    for moment, _ in sent:
        assert sum(size for when, size in sent if moment - 3 < when <= moment) < 3_000_000
    assert time_is < 3 * CELL / 2_500_000


VERY_MUCH = """
def prints_very_much(megabytes):
    line = b"y" * 99 + b"\\n"
    for _ in range(megabytes * 10):
        sys.stdout.buffer.write(line * 1000)
    print("the last line")
"""


def _runs_in_a_cell(kernel: RealKernel, megabytes: int) -> tuple[Reply, int]:
    """What the cell got of two ranks that print so much each, and by how much the kernel's memory grew, bytes."""
    kernel.good(VERY_MUCH)
    kernel.good("notebook_launcher(print, num_processes=2, start_method='forkserver', dashboard=False);")
    with Peak(kernel.pid) as peak:
        call = f"prints_very_much, ({megabytes},), num_processes=2, start_method='forkserver', dashboard=False"
        reply = kernel.good(f"notebook_launcher({call});")
    return reply, peak.most - peak.before


def _is_bounded(kernel: RealKernel, megabytes: int) -> int:
    reply, grown = _runs_in_a_cell(kernel, megabytes)
    assert 0.9 * CELL < len(reply.stdout) < 1.2 * CELL
    assert all(re.fullmatch(r"\[[01]\] (y{99}|the last line)", line) for line in reply.stdout.splitlines())
    for rank in (0, 1):
        assert reply.stdout.count(f"[{rank}] the last line\n") == 1
    assert "this cell has got 8 MB of text" in reply.stderr
    said = re.search(r"([\d,.]+) MB of text are left out above; Launch.logs\(rank\) has them", reply.stderr)
    assert said
    assert float(said[1].replace(",", "")) == pytest.approx(2 * megabytes - CELL / 1e6, abs=0.6)
    ends = "[len(nbstate.last_launch().logs(rank)) for rank in (0, 1)]"
    assert kernel.good(ends).result == str([megabytes * 1_000_000 + len("the last line\n")] * 2)
    return grown


def test_a_cell_gets_as_much_as_a_page_can_show_and_the_logs_have_the_rest(kernel: RealKernel) -> None:
    assert _is_bounded(kernel, megabytes=30) < 60e6


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_gigabyte_costs_the_kernel_no_more(kernel: RealKernel) -> None:
    assert _is_bounded(kernel, megabytes=512) < 60e6


def test_a_display_is_shown_even_if_the_cell_is_full() -> None:
    output = Output(1, "")
    for number in range(100):
        output.feed(0, "stdout", f"{number:05}\n".encode() * 1000)
        if number == 50:
            output.show(0, {"data": {"text/plain": "a figure"}}, update=False)
    assert output.leave_out(keep=7000) == (51 + 47) * 6000
    assert isinstance(output.take(), Rich)
    assert output.take() == ("stdout", "00098\n" * 1000 + "00099\n" * 1000)
    assert output.take() is None

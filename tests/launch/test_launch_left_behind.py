"""Nothing left behind, nothing in sight of others: whatever ends the kernel, the fork server, or a launch."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from real_kernel import IT_HUNG, RealKernel, wait_until

from nbstate import LaunchError, PartialState, RankError, notebook_launcher
from nbstate.launch import rundir
from nbstate.launch.engines import forkserver

SOON = 5.0  # what the design says takes a second or less, on a busy machine


def gone(processes: list[psutil.Process]) -> bool:
    return not [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def is_free(port: int) -> bool:
    with socket.socket() as taker:
        taker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # old connections may linger, a listener may not
        try:
            taker.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


TRAIN = """
import os, sys, time, torch, nbstate
from pathlib import Path
from nbstate import notebook_launcher, PartialState

def train(folder):
    state = PartialState()
    loader = torch.utils.data.DataLoader(range(1_000_000), batch_size=None, num_workers=1)  # numbers need no sharing
    for batch in loader:
        (Path(folder) / f"{state.process_index}-{os.environ['MASTER_PORT']}").touch()
        time.sleep(0.05)
"""


@pytest.mark.parametrize(
    ("way", "start_method"),
    [("kill", "fork"), ("kill", "forkserver"), ("kill", "spawn"), ("crash", "forkserver"), ("restart", "forkserver")],
)
def test_nothing_is_left_when_the_kernel_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, start_method: str
) -> None:  # C15
    temporary, marks = tmp_path / "tmp", tmp_path / "marks"
    temporary.mkdir()
    marks.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with RealKernel() as kernel:
        kernel.good(TRAIN)
        options = f"num_processes=2, start_method={start_method!r}, dashboard=False"
        kernel.start(f"notebook_launcher(train, ({str(marks)!r},), {options})")
        wait_until(lambda: len(list(marks.iterdir())) == 2, "both ranks train")
        everyone = kernel.descendants()
        assert len(everyone) >= 4  # two ranks, two workers
        assert list(temporary.glob("nbstate*")) == list(temporary.glob("pymp*")) == []
        port = int(next(marks.iterdir()).name.split("-")[1])
        if way == "kill":
            kernel.kill()
        elif way == "crash":
            psutil.Process(kernel.pid).send_signal(signal.SIGSEGV)
        else:
            kernel.manager.restart_kernel(now=False)
            kernel.client.wait_for_ready(timeout=IT_HUNG)
        wait_until(lambda: gone(everyone), "nobody is left", SOON)
        wait_until(lambda: is_free(port), "the port is free", SOON)
    ours = [path.name for path in temporary.iterdir() if not path.name.startswith(("ipykernel", "torchinductor"))]
    assert ours == []


def waits(folder: str) -> None:
    (Path(folder) / os.environ["RANK"]).touch()
    time.sleep(IT_HUNG)


def test_a_fork_server_that_ends_takes_its_ranks_along_and_is_replaced(tmp_path: Path) -> None:
    launch = notebook_launcher(waits, (str(tmp_path),), 2, start_method="forkserver", block=False, max_restarts=3)
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2, "both ranks run")
    ranks = [psutil.Process(rank.pid) for rank in launch.ranks]
    server = forkserver.server_pid()
    os.kill(server, signal.SIGKILL)
    with pytest.raises(LaunchError, match=rf"the fork server ended \(process {server}, ended by SIGKILL\)") as caught:
        launch.results()
    assert not isinstance(caught.value, RankError)
    assert launch.attempt == 0
    wait_until(lambda: gone(ranks), "the ranks are gone", SOON)
    parents = [set(notebook_launcher(os.getppid, num_processes=2, start_method="forkserver")) for _ in range(2)]
    assert parents[0] == parents[1] == {forkserver.server_pid()}  # one new server, and it outlives the launch


def test_a_fork_server_that_ended_between_two_launches_is_replaced() -> None:
    notebook_launcher(os.getppid, num_processes=1, start_method="forkserver")
    server = forkserver.server_pid()
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)  # as somebody else's waiting for any child would
    assert notebook_launcher(os.getppid, num_processes=2, start_method="forkserver") == [forkserver.server_pid()] * 2
    assert forkserver.server_pid() != server


def test_an_exit_code_of_255_is_a_ranks_own() -> None:
    with pytest.raises(RankError, match="exit code 255"):
        notebook_launcher(os._exit, (255,), 2, start_method="forkserver")


OWNER = """
import os, sys, time
from nbstate.launch.rundir import RunDirectory
directory = RunDirectory()
open(os.path.join(directory.path, "socket"), "w").close()
print(directory.path, flush=True)
time.sleep(600)
"""


@pytest.fixture
def owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that owns a run directory, an hour old."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        os.utime(path, (time.time() - 3600,) * 2)
        yield process, path
        process.kill()
    tempfile.tempdir = None


def test_a_run_directory_is_swept_once_its_owner_is_gone(owner: tuple[subprocess.Popen[str], Path]) -> None:
    process, path = owner
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    rundir.sweep()
    assert path.is_dir()
    process.kill()
    process.wait()
    young = path.parent / "nbstate-run-young"
    young.mkdir()
    rundir.RunDirectory().remove()
    assert not path.exists()
    assert young.is_dir()  # its owner may be about to lock it
    assert [p.name for p in path.parent.iterdir()] == ["nbstate-run-young"]


def listening(pids: list[int]) -> set[str]:
    """Every socket at which one of these processes can be reached: inet ones by address, unix ones by path."""
    found: set[str] = set()
    for pid in pids:
        process = psutil.Process(pid)
        for connection in process.net_connections(kind="inet"):
            datagram = connection.type == socket.SOCK_DGRAM
            if connection.laddr and (connection.status == psutil.CONN_LISTEN or datagram):
                found.add(f"{connection.laddr.ip}#{connection.laddr.port}")
        found |= {f"unix:{c.laddr}" for c in process.net_connections(kind="unix") if c.laddr}
    return found


def talks(folder: str) -> None:
    PartialState().wait_for_everyone()
    dist.barrier()
    waits(folder)


def test_a_launch_can_be_reached_from_this_machine_only(tmp_path: Path, start_method: str) -> None:
    mine = os.getpid()
    before = listening([mine])
    launch = notebook_launcher(talks, (str(tmp_path),), 2, start_method=start_method, block=False)
    try:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2, "both ranks run")
        everyone = [p.pid for p in psutil.Process().children(recursive=True)]
        assert {rank.pid for rank in launch.ranks} <= set(everyone)
        found = listening([mine, *everyone]) - before
    finally:
        launch.stop(0.0)
        launch.wait()
    inet = {name for name in found if not name.startswith("unix:")}
    assert f"127.0.0.1#{launch.port}" in inet
    assert {name.partition("#")[0] for name in inet} <= {"127.0.0.1", "::1"}
    for name in found - inet:
        path = Path(name.removeprefix("unix:"))
        assert path.is_absolute(), f"{name} is in the abstract namespace, where every user can reach it"
        assert not path.exists()


INTERRUPTED = """
import os, sys, time, torch, nbstate
from pathlib import Path
from nbstate import notebook_launcher, PartialState

def touch(path):
    Path(path).touch()
    while True: time.sleep(0.01)

class SlowToArrive:
    def __init__(self, path): self.path = path
    def __reduce__(self): return touch, (self.path,)

def start_up(path): time.sleep(60)
def user_code(path): touch(path)
def collective(path):
    state = PartialState()
    if state.is_main_process: state.wait_for_everyone()
    time.sleep(0.1)
    touch(path)
def tear_down(path):
    import atexit
    atexit.register(touch, path)
def unpacking(path): return SlowToArrive(path)
"""


HELD = """
import threading
def held():
    fds = os.listdir("/proc/self/fd")
    targets = [os.readlink(f"/proc/self/fd/{fd}") for fd in fds if os.path.lexists(f"/proc/self/fd/{fd}")]
    ours = [target for target in targets if "history.sqlite" not in target]  # IPython's come and go
    return len(ours), threading.active_count()
"""


@pytest.fixture(scope="module")
def prepared(kernel: RealKernel) -> RealKernel:
    kernel.good(INTERRUPTED)
    return kernel


PHASES = ("start_up", "user_code", "collective", "tear_down", "unpacking")
CASES = [
    *[(phase, method, 1) for phase in PHASES for method in ("fork", "forkserver")],
    *[(phase, "forkserver", 2) for phase in PHASES if phase != "unpacking"],
    ("start_up", "spawn", 1),
]


@pytest.mark.parametrize(("phase", "start_method", "times"), CASES)
def test_an_interrupt_in_every_phase(
    prepared: RealKernel, tmp_path: Path, phase: str, start_method: str, times: int
) -> None:  # C13, C14
    kernel = prepared
    helpers = {p.pid for p in kernel.descendants()}
    mark = tmp_path / "mark"
    options = f"num_processes=2, start_method={start_method!r}, dashboard=False"
    begin = f"open({str(mark)!r}, 'w').close(); " if phase == "start_up" else ""
    sent = kernel.start(f"{begin}notebook_launcher({phase}, ({str(mark)!r},), {options})")
    wait_until(mark.exists, "the phase is reached")
    for _ in range(times):
        kernel.interrupt()
    reply = kernel.finish(sent)
    assert reply.error == "KeyboardInterrupt: "
    assert "Traceback" not in reply.stderr
    for file in ("supervisor.py", "launch.py", "attempts.py", "threading.py"):
        assert file not in reply.traceback
    assert {p.pid for p in kernel.descendants()} <= helpers
    assert kernel.good(f"notebook_launcher(lambda: 1, {options})").result == "[1, 1]"


def test_interrupts_at_any_moment_of_a_launch(prepared: RealKernel, tmp_path: Path) -> None:
    """Many launches, each interrupted a little later than the one before, from its first line to its last."""
    options = "num_processes=2, dashboard=False"
    prepared.good(HELD)
    for method in ("forkserver", "fork"):
        prepared.good(f"notebook_launcher(int, start_method={method!r}, {options})")
    before = prepared.good("held()").result
    for method in ("forkserver", "fork"):
        for step in range(25):
            mark = tmp_path / f"{method}-{step}"
            sent = prepared.start(
                f"open({str(mark)!r}, 'w').close(); notebook_launcher(int, start_method={method!r}, {options})"
            )
            wait_until(mark.exists, "the cell runs")
            time.sleep(step * 0.002)
            prepared.interrupt()
            reply: Any = prepared.finish(sent)
            assert reply.error in ("KeyboardInterrupt: ", ""), reply.traceback
            assert "Traceback" not in reply.stderr
    assert prepared.good(f"notebook_launcher(lambda: 1, {options})").result == "[1, 1]"
    wait_until(lambda: prepared.good("held()").result == before, f"the kernel holds {before} again")


def test_an_interrupt_while_the_fork_server_comes_up(own_kernel: RealKernel, tmp_path: Path) -> None:  # C13
    own_kernel.good(INTERRUPTED)
    mark = tmp_path / "mark"
    sent = own_kernel.start(
        f"open({str(mark)!r}, 'w').close(); notebook_launcher(user_code, ('/nowhere',), 2, dashboard=False)"
    )
    wait_until(mark.exists, "the cell runs")
    wait_until(lambda: len(own_kernel.descendants()) == 1, "the fork server starts")
    own_kernel.interrupt()
    reply = own_kernel.finish(sent)
    assert reply.error == "KeyboardInterrupt: "
    assert len(own_kernel.descendants()) == 1  # no rank, and the server goes on coming up
    assert own_kernel.good("notebook_launcher(lambda: 1, num_processes=2, dashboard=False)").result == "[1, 1]"

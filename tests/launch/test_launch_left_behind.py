"""Nothing left behind, nothing in sight of others: whatever ends the kernel, the fork server, or a launch."""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from real_kernel import IT_HUNG, RealKernel, wait_until

from nbstate import LaunchError, PartialState, RankError, notebook_launcher
from nbstate.launch import scratch
from nbstate.launch.engines import forkserver

IN_TIME = 1.0  # seconds within which nothing of a kernel that has ended may be left


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

def train(folder, method):
    state = PartialState()
    loader = torch.utils.data.DataLoader(torch.arange(1e6), num_workers=2)
    for step, batch in enumerate(loader):
        if step == 10:
            (Path(folder) / f"{method}-{state.process_index}-{os.environ['MASTER_PORT']}").touch()
        time.sleep(0.01)

def launch(folder, method, block):
    options = dict(num_processes=2, start_method=method, dashboard=False)
    return notebook_launcher(train, (folder, method), block=block, **options)
"""


class Aftermath(threading.Thread):
    """Watches what a kernel leaves, and for how long after its own end."""

    def __init__(self, kernel: RealKernel, ports: set[int], temporary: Path) -> None:
        super().__init__()
        self.seconds: dict[str, float] = {}
        self.left: dict[str, object] = {}
        self._kernel, self._processes = psutil.Process(kernel.pid), kernel.descendants()
        self._pids = {str(process.pid) for process in (self._kernel, *self._processes)}
        self._ports, self._temporary = ports, temporary
        self.ended_at = 0.0

    def run(self) -> None:
        wait_until(lambda: gone([self._kernel]), "the kernel ends")
        self.ended_at = time.monotonic()
        while True:
            now, self.left = time.monotonic(), self._look()
            for kind in ("processes", "ports", "shared memory", "temporary files"):
                if kind not in self.left:
                    self.seconds.setdefault(kind, now - self.ended_at)
            if not self.left or now > self.ended_at + IT_HUNG:
                return
            time.sleep(0.002)

    def _look(self) -> dict[str, object]:
        of_theirs = [p for p in Path("/dev/shm").iterdir() if self._pids & set(p.name.split("_"))]
        beside_the_kernel = ("ipykernel", "torchinductor")  # which the kernel's own libraries keep there
        files = [path.name for path in self._temporary.iterdir() if not path.name.startswith(beside_the_kernel)]
        found = {
            "processes": [p.pid for p in self._processes if not gone([p])],
            "ports": [port for port in self._ports if not is_free(port)],
            "shared memory": of_theirs,
            "temporary files": files,
        }
        return {kind: some for kind, some in found.items() if some}


ENDINGS = ("kill -9", "crash", "SIGTERM", "shutdown", "restart", "exit()")


def end(kernel: RealKernel, way: str) -> None:
    if way in ("kill -9", "crash", "SIGTERM"):
        number = {"kill -9": signal.SIGKILL, "crash": signal.SIGSEGV, "SIGTERM": signal.SIGTERM}[way]
        psutil.Process(kernel.pid).send_signal(number)
    elif way == "shutdown":
        kernel.manager.shutdown_kernel(now=False)
    elif way == "restart":
        kernel.manager.restart_kernel(now=False)
        kernel.client.wait_for_ready(timeout=IT_HUNG)
    else:
        kernel.start("exit()")


@pytest.mark.parametrize("way", ENDINGS)
def test_nothing_is_left_however_the_kernel_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, shown_at_the_end: dict[str, list[str]]
) -> None:
    """Cases C15 and C24: six ranks train, two of each start method, each with two workers that hand over tensors."""
    temporary, marks = tmp_path / "tmp", tmp_path / "marks"
    temporary.mkdir()
    marks.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with RealKernel() as kernel:
        kernel.good(TRAIN)
        kernel.good(f"launches = [launch({str(marks)!r}, method, False) for method in ('spawn', 'fork')]")
        # the last one keeps the cell busy, but for the kernel that is to end by a cell
        last = kernel.start(f"launches += [launch({str(marks)!r}, 'forkserver', {way != 'exit()'})]")
        if way == "exit()":
            kernel.finish(last)
        wait_until(lambda: len(list(marks.iterdir())) == 6, "all ranks train")
        ports = {int(path.name.split("-")[2]) for path in marks.iterdir()}
        aftermath = Aftermath(kernel, ports, temporary)
        assert len(kernel.descendants()) == 6 + 12 + 1  # ranks, workers, fork server
        in_use = [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor")]
        assert len([name for name in in_use if name.startswith("nbstate-run-")]) == len(in_use) == 6
        aftermath.start()
        end(kernel, way)
        aftermath.join()
    shown_at_the_end.setdefault("after a kernel's end, all is gone within", []).append(
        f"{way:8}  " + ", ".join(f"{kind} {took * 1e3:.0f} ms" for kind, took in aftermath.seconds.items())
    )
    assert aftermath.left == {}
    assert max(aftermath.seconds.values()) < IN_TIME


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
    wait_until(lambda: gone(ranks), "the ranks are gone", IN_TIME)
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


def test_the_next_launch_sweeps_a_run_directory_whose_owner_is_gone(owner: tuple[subprocess.Popen[str], Path]) -> None:
    process, path = owner
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    notebook_launcher(int, num_processes=1, start_method="fork")
    assert path.is_dir()
    process.kill()
    process.wait()
    new, old = (path.parent / f"nbstate-new-{age}" for age in ("young", "old"))
    for unlocked in (new, old):
        unlocked.mkdir()
    os.utime(old, (time.time() - 3600,) * 2)
    notebook_launcher(int, num_processes=1, start_method="fork")
    assert [p.name for p in path.parent.iterdir()] == [new.name]  # its owner may be about to lock it


def has_children_of_its_own(marks: str) -> None:
    """Each kind of child that keeps something in a temporary directory; the rank is killed before it can clear up."""
    context = multiprocessing.get_context("fork")
    manager, value = context.Manager(), context.Value("i", 1)
    spawned = multiprocessing.get_context("spawn").Process(target=int)
    spawned.start()
    directory = Path(multiprocessing.util.get_temp_dir())
    assert manager.list([value.value])[0] == 1
    assert sum(stat.S_ISSOCK(path.stat().st_mode) for path in directory.iterdir()) == 1
    if scratch._SHELL == "/bin/sh":
        Path(f"/dev/shm/torch_{spawned.pid}_1_0").touch()  # what torch has there for a moment
    assert spawned._config["tempdir"] == str(directory)  # type: ignore[attr-defined]
    (Path(marks) / directory.name).touch()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for temporary files, so that whatever is in it came from here."""
    notebook_launcher(int, num_processes=1, start_method="forkserver")  # the fork server's socket is in the old one
    path = tmp_path / "tmp"
    path.mkdir()
    monkeypatch.setenv("TMPDIR", str(path))
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


def test_children_of_a_killed_rank_leave_no_file(tmp_path: Path, temporary: Path, start_method: str) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    with pytest.raises(RankError, match="SIGKILL"):
        notebook_launcher(has_children_of_its_own, (str(marks),), 1, start_method=start_method)
    assert len(list(marks.iterdir())) == 1
    wait_until(lambda: not list(temporary.iterdir()), "the directory is removed", IN_TIME)
    # and the fixture nothing_left looks into /dev/shm


def test_without_a_shell_the_next_launch_clears_up(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "_SHELL", "/nowhere/sh")
    with pytest.raises(RankError, match="SIGKILL"):
        notebook_launcher(has_children_of_its_own, (str(tmp_path),), 1, start_method="fork")
    assert len(list(temporary.iterdir())) == 1
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def next_launch_clears_up() -> bool:
        notebook_launcher(int, num_processes=1, start_method="fork")
        return not list(temporary.iterdir())

    wait_until(next_launch_clears_up, "what the rank's children held is swept, once they are gone", 5.0)


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

def user_code(path):
    try:
        touch(path)
    finally:
        touch(path + "-served")

class HardToUnpack:
    def __init__(self, path): self.path = path
    def __reduce__(self): return user_code, (self.path,)

def start_up(unpacked): pass
def collective(path):
    state = PartialState()
    if state.is_main_process: state.wait_for_everyone()
    time.sleep(0.1)
    user_code(path)
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


def interrupted(kernel: RealKernel, phase: str, start_method: str, mark: Path, times: int) -> float:
    """Interrupt a launch in a phase; the second time while the first is served. Returns seconds since the last one."""
    helpers = {p.pid for p in kernel.descendants()}
    argument = f"HardToUnpack({str(mark)!r})" if phase == "start_up" else repr(str(mark))
    options = f"num_processes=2, start_method={start_method!r}, dashboard=False"
    sent = kernel.start(f"notebook_launcher({phase}, ({argument},), {options})")
    wait_until(mark.exists, "the phase is reached")
    kernel.interrupt()
    if times == 2:
        if phase != "tear_down":
            wait_until(Path(f"{mark}-served").exists, "a rank is in its finally block")
        time.sleep(0.1)  # two at the same moment are one
        kernel.interrupt()
    began = time.monotonic()
    reply = kernel.finish(sent)
    seconds = time.monotonic() - began
    assert reply.error == "KeyboardInterrupt: "
    assert "Traceback" not in reply.stderr
    for file in ("supervisor.py", "launch.py", "attempts.py", "threading.py"):
        assert file not in reply.traceback
    assert {p.pid for p in kernel.descendants()} <= helpers
    assert kernel.good("notebook_launcher(lambda: 1, num_processes=2, dashboard=False)").result == "[1, 1]"
    return seconds


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_an_interrupt_while_results_are_unpacked(prepared: RealKernel, tmp_path: Path, start_method: str) -> None:
    """Case C13, in the kernel's own part; the fault matrix has what the ranks do."""
    interrupted(prepared, "unpacking", start_method, tmp_path / "mark", times=1)


IN_RANKS = ("start_up", "user_code", "collective", "tear_down")
TWICE = [(phase, method) for phase in IN_RANKS for method in ("fork", "forkserver", "spawn")]
TWICE.remove(("start_up", "fork"))  # a fork unpacks nothing: its first lines are the user's


@pytest.mark.parametrize(("phase", "start_method"), TWICE)
def test_a_second_interrupt_ends_faster(prepared: RealKernel, tmp_path: Path, phase: str, start_method: str) -> None:
    """Case C14. The first alone gives ranks 2 s for what they have to do."""
    assert interrupted(prepared, phase, start_method, tmp_path / "mark", times=2) < 1.5


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


def test_an_interrupt_while_the_fork_server_comes_up(own_kernel: RealKernel, tmp_path: Path) -> None:
    """Case C13."""
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

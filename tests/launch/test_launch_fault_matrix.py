"""Every fault, at every moment of a rank's life, in every start method: who is named, how fast, and what is left.

Faults that a rank brings on itself, and hangs, are launched from this process. An interrupt and the death of the kernel
need a real one: an interrupt shares one kernel over all cells, and a kernel that is killed has four unblocked launches
running by then, one in each phase.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil
import pytest
from fault_victim import GUILTY, PHASES, arguments, struck_at, victim
from real_kernel import IT_HUNG, RealKernel, wait_until
from remains import Remains, describe

from nbstate import LaunchTimeoutError, RankError, notebook_launcher
from nbstate.launch.launch import Launch

START_METHODS = ("fork", "forkserver", "spawn")

CAUSES = {
    "raise": "ValueError",
    "sys.exit(3)": "SystemExit",
    "os._exit(3)": "exit code 3",
    "SIGKILL": "SIGKILL",
    "SIGSEGV": "SIGSEGV",
}
DEATHS = ("os._exit(3)", "SIGKILL", "SIGSEGV")
ALL_GONE = 1.0  # seconds after a kernel's own end

launch = partial(notebook_launcher, num_processes=2, device="cpu", dashboard=False)


@dataclass
class Table:
    """The matrix as it fills."""

    rows: list[tuple[str, ...]] = field(default_factory=list)

    def add(self, start_method: str, phase: str, fault: str, named: str, seconds: float, left: str) -> None:
        """``seconds``: from the fault until the error (or the results) were in hand."""
        self.rows.append((start_method, phase, fault, named, f"{seconds:.2f} s", left))

    def lines(self) -> list[str]:
        """Columns side by side, sorted by start method and phase."""
        head = ("start method", "phase", "fault", "named", "took", "left")
        rows = sorted(self.rows, key=lambda row: (row[0], PHASES.index(row[1])))
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (head, *rows)]


@pytest.fixture(scope="module")
def table(shown_at_the_end: dict[str, list[str]]) -> Iterator[Table]:
    collected = Table()
    yield collected
    if collected.rows:
        shown_at_the_end["fault matrix"] = collected.lines()


@pytest.fixture(scope="module", autouse=True)
def own_directory() -> Iterator[Path]:
    """A directory for temporary files, so that whatever is in it came from here."""
    launch(int, start_method="forkserver")  # the fork server keeps a socket in the old one
    with tempfile.TemporaryDirectory(prefix="nb") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def since_the_strike(folder: Path) -> float:
    struck = struck_at(str(folder))
    assert struck is not None, "the launch ended before the fault"
    return time.monotonic() - struck


def wait_for_strikes(*folders: Path) -> None:
    wait_until(lambda: all(struck_at(str(folder)) for folder in folders), "every guilty rank strikes")


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase != "tear-down"])
@pytest.mark.parametrize("fault", CAUSES)
def test_the_rank_that_failed_is_named(
    start_method: str, phase: str, fault: str, tmp_path: Path, nothing_left: Remains, table: Table
) -> None:
    with pytest.raises(RankError) as caught:
        launch(victim, arguments(start_method, fault, phase, str(tmp_path)), start_method=start_method)
    seconds, left = since_the_strike(tmp_path), nothing_left.left(within=1.0)
    error = caught.value
    table.add(start_method, phase, fault, f"rank {error.rank}: {error.cause_type}", seconds, describe(left))
    assert (error.rank, error.cause_type) == (GUILTY, CAUSES[fault])
    assert set(error.others) == {0}
    assert phase != "barrier" or "waited in barrier #1" in error.others[0]
    assert not left


@pytest.mark.parametrize("fault", CAUSES)
def test_results_stand_when_a_rank_fails_after_them(
    start_method: str,
    fault: str,
    tmp_path: Path,
    nothing_left: Remains,
    table: Table,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Case C39."""
    results = launch(victim, (fault, "tear-down", str(tmp_path)), start_method=start_method)
    seconds, left = since_the_strike(tmp_path), nothing_left.left(within=1.0)
    told = capfd.readouterr().err
    warnings = [line for line in told.splitlines() if line.startswith("nbstate: ")]
    # Python itself tells of an exception in an atexit callback; the prefix says in which rank
    named = warnings if fault in DEATHS else [line for line in told.splitlines() if CAUSES[fault] in line][-1:]
    table.add(start_method, "tear-down", fault, "; ".join(["results", *map(shortened, named)]), seconds, describe(left))
    assert results == [0, 1]
    assert len(named) == 1
    if fault in DEATHS:
        assert re.search(rf"\brank {GUILTY}\b.*\b{re.escape(CAUSES[fault])}\b", named[0])
    else:
        assert named[0].startswith(f"[{GUILTY}] ")
        assert not warnings
    assert not left


def hang(start_method: str, phase: str, folder: Path) -> Launch:
    """A launch whose time is up once rank 1 hangs. A real time-out would be too short, or worth waiting for."""
    args = arguments(start_method, "hang", phase, str(folder))
    launched: Launch = launch(victim, args, start_method=start_method, timeout=IT_HUNG, block=False)
    wait_for_strikes(folder)
    if phase == "tear-down":
        ranks = launched._supervisor.ranks
        wait_until(lambda: all(state.message is not None for state in ranks), "every result has arrived")
    launched._supervisor._deadline = time.monotonic()
    return launched


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase != "tear-down"])
def test_a_hang_is_ended_by_the_timeout_and_described(
    start_method: str, phase: str, tmp_path: Path, nothing_left: Remains, table: Table
) -> None:
    launched = hang(start_method, phase, tmp_path)
    with pytest.raises(LaunchTimeoutError) as caught:
        launched.results()
    seconds, left = since_the_strike(tmp_path), nothing_left.left(within=1.0)
    described = re.search(rf"rank {GUILTY} [^;\n]*", str(caught.value))
    named = described.group() if described else "nobody"
    table.add(start_method, phase, "hang", f"timeout: {shortened(named)}", seconds, describe(left))
    assert described
    assert phase != "barrier" or re.search(r"rank 0 waited in barrier #1", str(caught.value))
    assert not left


def test_results_stand_when_a_rank_hangs_after_them(
    start_method: str, tmp_path: Path, nothing_left: Remains, table: Table, capfd: pytest.CaptureFixture[str]
) -> None:
    """Case C39."""
    results = hang(start_method, "tear-down", tmp_path).results()
    seconds, left = since_the_strike(tmp_path), nothing_left.left(within=1.0)
    warnings = [line for line in capfd.readouterr().err.splitlines() if line.startswith("nbstate: ")]
    table.add(
        start_method, "tear-down", "hang", "; ".join(["results", *map(shortened, warnings)]), seconds, describe(left)
    )
    assert results == [0, 1]
    assert len(warnings) == 1
    assert re.search(rf"\brank {GUILTY}\b", warnings[0])
    assert not left


def shortened(text: str) -> str:
    return text.removeprefix("nbstate: ").strip()[:60]


IN_A_KERNEL = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
from fault_victim import arguments, victim
from nbstate import notebook_launcher
def suffer(start_method, phase, folder, **options):
    args = arguments(start_method, "hang", phase, folder)
    options |= dict(num_processes=2, device="cpu", start_method=start_method, dashboard=False)
    return notebook_launcher(victim, args, **options)
"""


@pytest.mark.parametrize("phase", PHASES)
def test_an_interrupted_cell(kernel: RealKernel, start_method: str, phase: str, tmp_path: Path, table: Table) -> None:
    """Case C13."""
    kernel.good(IN_A_KERNEL)
    remains = Remains(kernel.pid)
    sent = kernel.start(f"suffer({start_method!r}, {phase!r}, {str(tmp_path)!r})")
    wait_for_strikes(tmp_path)
    interrupted = time.monotonic()
    kernel.interrupt()
    reply = kernel.finish(sent)
    seconds, left = time.monotonic() - interrupted, remains.left(within=1.0)
    table.add(start_method, phase, "interrupt", reply.error.rstrip(": "), seconds, describe(left))
    assert reply.error == "KeyboardInterrupt: "
    assert "Traceback" not in reply.stderr
    assert "supervisor.py" not in reply.traceback
    assert not left
    assert kernel.good("notebook_launcher(lambda: 1, num_processes=2, dashboard=False)").result == "[1, 1]"


def listening(processes: list[psutil.Process]) -> set[int]:
    """Ports that these hold."""
    ports: set[int] = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # rank 0 leaves while rank 1 hangs in its tear-down
            found = process.net_connections(kind="inet")
            ports |= {c.laddr.port for c in found if c.status == psutil.CONN_LISTEN}
    return ports


def still_listening(ports: set[int]) -> set[int]:
    """Those of ``ports`` that anybody on this machine holds."""
    connections = psutil.net_connections(kind="inet")
    return ports & {c.laddr.port for c in connections if c.laddr and c.status == psutil.CONN_LISTEN}


def files_in(directory: Path) -> set[object]:
    """All but the cache that torch keeps for every process of this user."""
    return {str(path) for path in directory.iterdir() if not path.name.startswith("torchinductor_")}


def is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_killed_kernel(
    own_kernel: RealKernel, own_directory: Path, start_method: str, tmp_path: Path, table: Table
) -> None:
    """Case C15."""
    files_before = files_in(own_directory)
    own_kernel.good(IN_A_KERNEL)
    folders = {phase: tmp_path / phase for phase in PHASES}
    # the tear-down comes last: a rank that does not leave is ended after a while
    for phases in (PHASES[:-1], PHASES[-1:]):
        for phase in phases:
            folders[phase].mkdir()
            own_kernel.good(f"suffer({start_method!r}, {phase!r}, {str(folders[phase])!r}, block=False)")
        wait_for_strikes(*(folders[phase] for phase in phases))
    everyone = own_kernel.descendants()
    ports = listening([psutil.Process(own_kernel.pid), *everyone])
    died = psutil.Process(own_kernel.pid)
    own_kernel.kill()
    wait_until(lambda: is_gone(died), "the kernel ends")
    ended = time.monotonic()

    def left() -> dict[str, set[object]]:
        found: dict[str, set[object]] = {
            "process": {process.pid for process in everyone if not is_gone(process)},
            "port": set(still_listening(ports)),
            "temporary file": files_in(own_directory) - files_before,
        }
        return {kind: some for kind, some in found.items() if some}

    while left() and time.monotonic() - ended < ALL_GONE:
        time.sleep(0.01)
    seconds, remaining = time.monotonic() - ended, left()
    for phase in PHASES:
        table.add(start_method, phase, "kernel kill -9", "-", seconds, describe(remaining))
    assert len(everyone) >= 2 * len(PHASES) - 1
    assert not remaining

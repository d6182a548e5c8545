"""The examples of the page that nbstate began with, each run in real ranks: what it prints is what the page says.

An example is a function that imports what it needs, as a reader types it, with nbstate as the package. It runs through
``notebook_launcher`` on 2 and on 4 ranks. Those that assume "2 servers with 4 processes each" run as a script too, in 8
processes whose launch variables say that there are two machines.

Where ranks must wait for one that goes first, that one is made to come late: without the wait it could not be first.
"""

from __future__ import annotations

import inspect
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from nbstate import notebook_launcher

IT_HUNG = 100.0  # seconds
SERVERS, PER_SERVER = 2, 4
LATE = 0.5  # seconds


@dataclass(frozen=True)
class Run:
    """What an example did: its lines in the order in which the cell showed them, and what each rank returned."""

    lines: list[tuple[int, str]]
    returned: list[Any]

    def by(self, rank: int) -> list[str]:
        return [text for printer, text in self.lines if printer == rank]


@pytest.fixture(params=[2, 4], ids="{} ranks".format)
def ranks(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Run]:
    """Runs an example on N ranks and reads what the cell shows."""

    def run_example(example: Callable[..., Any], ranks: int, *args: Any) -> Run:
        returned = notebook_launcher(example, args, num_processes=ranks, device="cpu", timeout=IT_HUNG)
        shown, complaints = capsys.readouterr()
        assert complaints == ""
        return Run([_prefixed(line) for line in shown.splitlines()], returned)

    return run_example


def _prefixed(line: str) -> tuple[int, str]:
    prefix, text = line.split(" ", 1)
    assert prefix.startswith("[")
    assert prefix.endswith("]")
    return int(prefix[1:-1]), text


def process_group_kwargs(seconds: float) -> tuple[dict[str, Any], int, timedelta]:
    import torch.distributed as dist

    from nbstate import PartialState
    from nbstate.utils import InitProcessGroupKwargs

    kwargs = InitProcessGroupKwargs(timeout=timedelta(seconds=seconds)).to_kwargs()
    state = PartialState(**kwargs)
    return kwargs, state.num_processes, dist.group.WORLD._get_backend(state.device).options._timeout


def test_init_process_group_kwargs(run: Callable[..., Run], ranks: int) -> None:
    patience = timedelta(seconds=77)
    assert run(process_group_kwargs, ranks, 77).returned == [({"timeout": patience}, ranks, patience)] * ranks


def local_main_process_first(lateness: float) -> int:
    import time

    from nbstate.state import PartialState

    state = PartialState()
    time.sleep(lateness if state.is_local_main_process else 0)
    with state.local_main_process_first():
        entered = time.monotonic_ns()
        print(f"This will be printed by process {state.local_process_index}")
    return entered


def test_local_main_process_first(run: Callable[..., Run], ranks: int) -> None:
    ended = run(local_main_process_first, ranks, LATE)
    assert ended.lines[0] == (0, "This will be printed by process 0")
    assert sorted(ended.lines) == [(rank, f"This will be printed by process {rank}") for rank in range(ranks)]
    assert min(ended.returned) == ended.returned[0]


def main_process_first(lateness: float) -> int:
    import time

    from nbstate import Accelerator

    accelerator = Accelerator()
    time.sleep(lateness if accelerator.is_main_process else 0)
    with accelerator.main_process_first():
        entered = time.monotonic_ns()
        print(f"This will be printed by process {accelerator.process_index}")
    return entered


def test_main_process_first(run: Callable[..., Run], ranks: int) -> None:
    ended = run(main_process_first, ranks, LATE)
    assert ended.lines[0] == (0, "This will be printed by process 0")
    assert sorted(ended.lines) == [(rank, f"This will be printed by process {rank}") for rank in range(ranks)]
    assert min(ended.returned) == ended.returned[0]


def on_last_process() -> None:
    from nbstate.state import PartialState

    state = PartialState()

    @state.on_last_process
    def print_something() -> None:
        print(f"Printed on process {state.process_index}")

    print_something()


@pytest.mark.parametrize(
    ("ranks", "lines"), [(4, [(3, "Printed on process 3")]), (2, [(1, "Printed on process 1")])], ids=["4", "2"]
)
def test_on_last_process(run: Callable[..., Run], ranks: int, lines: list[tuple[int, str]]) -> None:
    assert run(on_last_process, ranks).lines == lines


def on_main_process() -> None:
    from nbstate.state import PartialState

    state = PartialState()

    @state.on_main_process
    def print_something() -> None:
        print("This will be printed by process 0 only.")

    print_something()


def test_on_main_process(run: Callable[..., Run], ranks: int) -> None:
    assert run(on_main_process, ranks).lines == [(0, "This will be printed by process 0 only.")]


def on_process() -> None:
    from nbstate.state import PartialState

    state = PartialState()

    @state.on_process(process_index=2)
    def print_something() -> None:
        print(f"Printed on process {state.process_index}")

    print_something()


@pytest.mark.parametrize(("ranks", "lines"), [(4, [(2, "Printed on process 2")]), (2, [])], ids=["4", "2"])
def test_on_process(run: Callable[..., Run], ranks: int, lines: list[tuple[int, str]]) -> None:
    assert run(on_process, ranks).lines == lines


def split_with_partial_state() -> None:
    from nbstate import PartialState

    state = PartialState()
    with state.split_between_processes(["A", "B", "C"]) as inputs:
        print(inputs)

    with state.split_between_processes(["A", "B", "C"], apply_padding=True) as inputs:
        print(inputs)


def split_with_accelerator_state() -> None:
    from nbstate.state import AcceleratorState

    state = AcceleratorState()
    with state.split_between_processes(["A", "B", "C"]) as inputs:
        print(inputs)

    with state.split_between_processes(["A", "B", "C"], apply_padding=True) as inputs:
        print(inputs)


@pytest.mark.parametrize("example", [split_with_partial_state, split_with_accelerator_state])
@pytest.mark.parametrize(
    ("ranks", "plain", "padded"),
    [
        (2, ["['A', 'B']", "['C']"], ["['A', 'B']", "['C', 'C']"]),
        (4, ["['A']", "['B']", "['C']", "[]"], ["['A']", "['B']", "['C']", "['C']"]),
    ],
    ids=["2", "4"],
)
def test_split_between_processes(
    run: Callable[..., Run], example: Callable[[], None], ranks: int, plain: list[str], padded: list[str]
) -> None:
    ended = run(example, ranks)
    assert [ended.by(rank) for rank in range(ranks)] == [list(pair) for pair in zip(plain, padded, strict=True)]


def wait_for_everyone() -> tuple[int, int]:
    import time

    from nbstate.state import PartialState

    woke = 0
    state = PartialState()
    if state.is_main_process:
        time.sleep(2)
        woke = time.monotonic_ns()
    else:
        print("I'm waiting for the main process to finish its sleep...")
    state.wait_for_everyone()
    here = time.monotonic_ns()
    print("Everyone is here")
    return woke, here


def test_wait_for_everyone(run: Callable[..., Run], ranks: int) -> None:
    ended = run(wait_for_everyone, ranks)
    assert ended.by(0) == ["Everyone is here"]
    for rank in range(1, ranks):
        assert ended.by(rank) == ["I'm waiting for the main process to finish its sleep...", "Everyone is here"]
    assert [text for _, text in ended.lines[-ranks:]] == ["Everyone is here"] * ranks
    woke = ended.returned[0][0]
    assert all(here >= woke > 0 for _, here in ended.returned)


def on_local_main_process() -> None:
    from nbstate.state import PartialState

    state = PartialState()

    @state.on_local_main_process
    def print_something() -> None:
        print("This will be printed by process 0 only on each server.")

    print_something()


def on_local_process() -> None:
    from nbstate import Accelerator

    accelerator = Accelerator()

    @accelerator.on_local_process(local_process_index=2)
    def print_something() -> None:
        print(f"Printed on process {accelerator.local_process_index}")

    print_something()


def test_on_local_main_process_with_one_server(run: Callable[..., Run], ranks: int) -> None:
    assert run(on_local_main_process, ranks).lines == [(0, "This will be printed by process 0 only on each server.")]


@pytest.mark.parametrize(("ranks", "lines"), [(4, [(2, "Printed on process 2")]), (2, [])], ids=["4", "2"])
def test_on_local_process_with_one_server(run: Callable[..., Run], ranks: int, lines: list[tuple[int, str]]) -> None:
    assert run(on_local_process, ranks).lines == lines


MARK = "--- next example ---"
EXAMPLES_FOR_SERVERS = (on_local_main_process, on_local_process, local_main_process_first)
# The second server's main process comes last of all: it is the one that its own server must wait for. And rank 0 hosts
# the store of this world, as plain torch has it, so no rank leaves before all are done.
LAST_LINES = f"""
import json, os
from nbstate import PartialState

on_local_main_process()
print({MARK!r})
on_local_process()
print({MARK!r})
entered = local_main_process_first({LATE} * (1 + int(os.environ["RANK"]) // {PER_SERVER}))
print({MARK!r})
print(json.dumps([PartialState().process_index, PartialState().num_processes, entered]))
PartialState().wait_for_everyone()
"""


@dataclass(frozen=True)
class Servers:
    """What the 8 processes printed, in the order of their ranks: one list of lines for each example."""

    on_local_main_process: list[list[str]]
    on_local_process: list[list[str]]
    local_main_process_first: list[list[str]]
    world: list[tuple[int, int]]
    entered: list[int]


@pytest.fixture(scope="module")
def two_servers(tmp_path_factory: pytest.TempPathFactory) -> Servers:
    """The examples as one script, run once by each of 8 processes."""
    script = tmp_path_factory.mktemp("servers") / "examples.py"
    script.write_text("\n\n".join(map(inspect.getsource, EXAMPLES_FOR_SERVERS)) + LAST_LINES)
    sections = [output.split(f"{MARK}\n") for output in _run_on_servers(script)]
    told = [json.loads(last) for *_, last in sections]
    return Servers(
        *([part[number].splitlines() for part in sections] for number in range(len(EXAMPLES_FOR_SERVERS))),
        world=[(index, size) for index, size, _ in told],
        entered=[entered for _, _, entered in told],
    )


def _run_on_servers(script: Path) -> list[str]:
    """Start one process for each rank of both servers; returns what each printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    deadline = time.monotonic() + IT_HUNG
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=_server_environment(rank, port),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(SERVERS * PER_SERVER)
    ]
    try:
        outputs = []
        for rank, process in enumerate(processes):
            output, complaints = process.communicate(timeout=deadline - time.monotonic())
            assert process.returncode == 0, f"rank {rank}: {complaints}"
            outputs.append(output)
        return outputs
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _server_environment(rank: int, port: int) -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    return os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % PER_SERVER),
        "WORLD_SIZE": str(SERVERS * PER_SERVER),
        "LOCAL_WORLD_SIZE": str(PER_SERVER),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")])),
    }


def test_two_servers_are_one_world(two_servers: Servers) -> None:
    assert two_servers.world == [(rank, 8) for rank in range(8)]


def test_on_local_main_process_with_two_servers(two_servers: Servers) -> None:
    only = ["This will be printed by process 0 only on each server."]
    assert two_servers.on_local_main_process == [only, [], [], [], only, [], [], []]


def test_on_local_process_with_two_servers(two_servers: Servers) -> None:
    only = ["Printed on process 2"]
    assert two_servers.on_local_process == [[], [], only, [], [], [], only, []]


def test_local_main_process_first_with_two_servers(two_servers: Servers) -> None:
    lines = [[f"This will be printed by process {rank % PER_SERVER}"] for rank in range(8)]
    assert two_servers.local_main_process_first == lines
    for first in (0, PER_SERVER):
        server = two_servers.entered[first : first + PER_SERVER]
        assert min(server) == server[0]


def documented_attributes() -> list[str]:
    """Builds the three singletons; returns every listed attribute that is not of the type that the page gives it."""
    import torch

    from nbstate import AcceleratorState, GradientState, PartialState
    from nbstate.utils import DistributedType, ParallelismConfig

    process = {
        "device": torch.device,
        "distributed_type": DistributedType,
        "local_process_index": int,
        "mixed_precision": str,
        "num_processes": int,
        "process_index": int,
        "is_last_process": bool,
        "is_main_process": bool,
        "is_local_main_process": bool,
        "debug": bool,
    }
    gradient = {
        "end_of_dataloader": bool,
        "remainder": int,
        "sync_gradients": bool,
        "active_dataloader": (torch.utils.data.DataLoader, type(None)),
        "dataloader_references": list,
        "num_steps": int,
        "adjust_scheduler": bool,
        "sync_with_dataloader": bool,
        "is_xla_gradients_synced": bool,
    }
    more = {"parallelism_config": (ParallelismConfig, type(None)), "initialized": bool}
    listed = ((PartialState(), process), (AcceleratorState(), process | more), (GradientState(), gradient))
    return [
        f"{type(state).__name__}.{name}: {getattr(state, name, 'missing')!r}"
        for state, types in listed
        for name, kind in types.items()
        if not isinstance(getattr(state, name, AttributeError), kind)
    ]


def test_documented_attributes(run: Callable[..., Run], ranks: int) -> None:
    assert run(documented_attributes, ranks).returned == [[]] * ranks

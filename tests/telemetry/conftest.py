"""Worlds of real ranks over gloo, forked from the test, each with a probe on a board that the test can read."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import multiprocess
import pytest
import torch
import torch._dynamo  # DDP and the optimizers import it when they are first used: once here, not in every forked rank
import torch.distributed as dist

from nbstate.telemetry import collectives, probe
from nbstate.telemetry.board import Board, Phase, RankSnapshot

HUNG = 60.0  # seconds after which a world that should have ended is called hung


class RealWorld:
    """Ranks that run one function in a gloo world. ``function(rank, board)`` gets its rank and the board."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.board = Board.create(1)
        self.ranks: list[Any] = []
        self.ears: list[Any] = []

    def start(self, function: Callable[[int, Board], Any], size: int = 2) -> None:
        self.board.close()
        self.board = Board.create(size)
        context = multiprocess.get_context("fork")
        for rank in range(size):
            ear, mouth = context.Pipe(duplex=False)
            process = context.Process(target=self._be_rank, args=(function, rank, size, mouth))
            process.start()
            mouth.close()
            self.ranks.append(process)
            self.ears.append(ear)

    def _be_rank(self, function: Callable[[int, Board], Any], rank: int, size: int, mouth: Any) -> None:
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        probe.attach(self.board.slot(rank))
        probe.phase(Phase.RUNNING)
        collectives.install()
        try:
            store = dist.FileStore(str(self.folder / "store"), size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
            result = function(rank, self.board)
            probe.phase(Phase.FINISHED)
            mouth.send((True, result))
        except BaseException:
            probe.phase(Phase.FAILED)
            mouth.send((False, traceback.format_exc()))
        # A rank that ends while another still connects would fail it: ranks stay until the test ends them.
        signal.pause()

    def results(self) -> list[Any]:
        """Wait for the ranks and return what they returned, in rank order."""
        answers = []
        for rank, ear in enumerate(self.ears):
            assert ear.poll(HUNG), f"rank {rank} hung: {self.board.snapshot()}; before it: {answers}"
            answers.append(ear.recv())
        failed = [f"rank {rank}:\n{value}" for rank, (good, value) in enumerate(answers) if not good]
        assert not failed, "\n".join(failed)
        return [value for _, value in answers]

    def run(self, function: Callable[[int, Board], Any], size: int = 2) -> list[Any]:
        self.start(function, size)
        return self.results()

    def wait_until(self, condition: Callable[[list[RankSnapshot]], bool]) -> list[RankSnapshot]:
        """Read the board until it is as expected."""
        deadline = time.monotonic() + HUNG
        while time.monotonic() < deadline:
            snapshots = self.board.snapshot()
            if condition(snapshots):
                return snapshots
            time.sleep(0.005)
        raise AssertionError(f"never came to be: {self.board.snapshot()}")

    def close(self) -> None:
        for process in self.ranks:
            process.kill()
            process.join()
        for ear in self.ears:
            ear.close()
        self.board.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[RealWorld]:
    """A world to be started by the test; its ranks are gone when the test ends."""
    made = RealWorld(tmp_path)
    yield made
    made.close()

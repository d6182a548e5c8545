"""Real ranks come to a stand in every way of the corpus: the first alarm is right, and comes soon."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import cloudpickle
import faults
import pytest
from faults import CORPUS, Fault

from nbstate import RankError, notebook_launcher
from nbstate.launch.launch import Launch

cloudpickle.register_pickle_by_value(faults)

AFTER = 1.0
SOON = 2.0  # seconds from the threshold to the verdict
IT_HUNG = 60.0
AT_ONCE = 6


@contextmanager
def running(fault: Fault, start_method: str) -> Iterator[Launch]:
    launch = notebook_launcher(
        fault.function,
        num_processes=fault.ranks,
        start_method=start_method,
        timeout=2 * IT_HUNG,
        device="cpu",
        dashboard=False,
        block=False,
    )
    try:
        yield launch
    finally:
        launch.stop(grace=0.0)
        launch.wait()


@dataclass
class Case:
    """A fault that runs, and the first alarm."""

    fault: Fault
    launch: Launch
    alarm: Any = None
    said: str = ""
    seconds: float = 0.0

    def look(self) -> None:
        """Take the first alarm, and how long after the threshold it came."""
        if self.alarm is None and (alarm := self.launch.alarm) is not None:
            last_word = max(rank.board.heartbeat for rank in self.launch.ranks)
            self.alarm, self.seconds = alarm, time.monotonic() - last_word / 1e9 - AFTER

    @property
    def wrong(self) -> list[str]:
        """What is wrong with the alarm, or with the error where the fault has ended the launch before any alarm."""
        if self.alarm is None and self.launch.done:
            with pytest.raises(RankError) as caught:
                self.launch.results()
            self.said = str(caught.value).split("\n", 1)[0]
            return self.fault.unsaid(self.said)
        if self.alarm is None:
            return [f"no alarm; {self.launch.diagnose()}, done: {self.launch.done}"]
        self.said = f"{self.seconds:.2f} s: {self.alarm.sentence}"
        late = [f"came {self.seconds:.1f} s after the threshold"] if self.seconds > SOON else []
        return self.fault.wrong(self.alarm) + late


def run(batch: Sequence[Fault], start_method: str) -> list[Case]:
    """Run faults side by side until each has its alarm."""
    with ExitStack() as all_at_once:
        cases = [Case(fault, all_at_once.enter_context(running(fault, start_method))) for fault in batch]
        deadline = time.monotonic() + IT_HUNG
        while not all(case.alarm or case.launch.done for case in cases) and time.monotonic() < deadline:
            for case in cases:
                case.look()
            time.sleep(0.02)
        wrong = {case.fault.name: case.wrong for case in cases if case.wrong}
    assert not wrong, "\n".join(f"{name}:\n  " + "\n  ".join(said) for name, said in wrong.items())
    return cases


def batches() -> list[Any]:
    return [pytest.param(CORPUS[i : i + AT_ONCE], id=f"{CORPUS[i].name}...") for i in range(0, len(CORPUS), AT_ONCE)]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBSTATE_STALL_AFTER", str(AFTER))


@pytest.mark.parametrize("batch", batches())
def test_every_fault_is_named(batch: list[Fault], shown_at_the_end: dict[str, list[str]]) -> None:
    cases = run(batch, "forkserver")
    rows = shown_at_the_end.setdefault("faults: verdicts, and seconds from the threshold to each", [])
    rows += [f"{case.fault.name}: {case.said}" for case in cases]


@pytest.mark.long
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
@pytest.mark.parametrize("batch", batches())
def test_every_fault_is_named_with_every_start_method(batch: list[Fault], start_method: str) -> None:
    run(batch[: len(batch) // 2], start_method)
    run(batch[len(batch) // 2 :], start_method)


def test_the_corpus_is_large_enough() -> None:
    assert len(CORPUS) >= 20
    assert len({fault.kind for fault in CORPUS}) >= 8

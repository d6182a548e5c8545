"""Real ranks that are slow and healthy: no alarm, and results."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import cloudpickle
import healthy
import pytest
from healthy import CORPUS

from nbstate import notebook_launcher

cloudpickle.register_pickle_by_value(healthy)

AFTER = 1.0
IT_HUNG = 60.0
AT_ONCE = 4
BATCHES = [pytest.param(CORPUS[i : i + AT_ONCE], id=CORPUS[i].__name__) for i in range(0, len(CORPUS), AT_ONCE)]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBSTATE_STALL_AFTER", str(AFTER))


def run(batch: list[Callable[[], Any]], start_method: str) -> None:
    """Run functions side by side to their ends; fail at the first alarm."""
    with ExitStack() as all_at_once:
        launches = []
        for function in batch:
            launch = notebook_launcher(
                function,
                num_processes=3,
                start_method=start_method,
                timeout=IT_HUNG,
                device="cpu",
                dashboard=False,
                block=False,
            )
            all_at_once.callback(launch.wait)
            all_at_once.callback(launch.stop)
            launches.append(launch)
        while not all(launch.done for launch in launches):
            alarms = {repr(launch): launch.alarm for launch in launches if launch.alarm and launch.alarm.alarming}
            assert not alarms
            time.sleep(0.02)
        for launch in launches:
            launch.results()


@pytest.mark.parametrize("batch", BATCHES)
def test_no_alarm_is_raised(batch: list[Callable[[], Any]], capsys: pytest.CaptureFixture[str]) -> None:
    run(batch, "forkserver")
    assert "nbstate: " not in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
@pytest.mark.parametrize("batch", BATCHES)
def test_no_alarm_is_raised_with_every_start_method(batch: list[Callable[[], Any]], start_method: str) -> None:
    run(batch, start_method)


def test_the_corpus_is_large_enough() -> None:
    assert len(CORPUS) >= 20

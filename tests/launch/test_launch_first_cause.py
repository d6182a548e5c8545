"""The first cause, not the first noise: who is blamed when several ranks fail at once, and what the error then says."""

from __future__ import annotations

import builtins
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nbstate import PartialState, RankError, notebook_launcher
from nbstate.launch.outcome import Ending, first_cause, patience
from nbstate.launch.report import Blame, describe, rebuild
from nbstate.telemetry.diagnosis import diagnose

IT_HUNG = 30.0
ExceptionGroup: Any = getattr(builtins, "ExceptionGroup", None)  # Python 3.10 has none
CLOSED = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"
TIMED_OUT = "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete"


def fails(function: Callable[..., Any], ranks: int, start_method: str = "fork", *args: Any) -> RankError:
    with pytest.raises(RankError) as caught:
        notebook_launcher(function, args, num_processes=ranks, start_method=start_method, timeout=IT_HUNG)
    return caught.value


# What one exception is worth


def caught(function: Callable[[], Any]) -> BaseException:
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("did not raise")


def raise_from(top: BaseException, below: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise top from below

    return act


def raise_while_handling(top: BaseException, below: BaseException, *, hide: bool = False) -> Callable[[], None]:
    def act() -> None:
        try:
            raise below
        except BaseException:
            if hide:
                raise top from None
            raise top  # noqa: B904 - the context alone is the point

    return act


@pytest.mark.parametrize(
    ("act", "blame"),
    [
        (raise_from(ValueError("mine"), KeyError("mine too")), Blame.USER),
        (raise_from(KeyError("training failed"), RuntimeError(CLOSED)), Blame.CONNECTION),
        (raise_from(KeyError("training failed"), RuntimeError(TIMED_OUT)), Blame.TIMEOUT),
        (raise_while_handling(SystemExit(1), RuntimeError(CLOSED)), Blame.CONNECTION),
        (raise_while_handling(KeyError("quietly"), RuntimeError(CLOSED), hide=True), Blame.CONNECTION),
        (raise_while_handling(RuntimeError(CLOSED), ValueError("mine")), Blame.SHADOWED),
        (raise_from(RuntimeError("the request timed out"), ConnectionRefusedError("connection refused")), Blame.USER),
        (raise_from(dist.DistNetworkError("failed to recv, got 0 bytes"), OSError()), Blame.SHADOWED),
    ],
)
def test_an_exception_is_judged_by_what_it_came_from(act: Callable[[], None], blame: Blame) -> None:
    assert describe(caught(act)).blame is blame


def test_a_chain_that_runs_in_a_circle_ends() -> None:
    one, two = ValueError("one"), KeyError("two")
    one.__context__, two.__context__ = two, one
    assert describe(one).blame is Blame.USER


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups came with Python 3.11")
def test_a_group_is_worth_what_its_worst_member_is() -> None:
    noise = [RuntimeError(CLOSED), RuntimeError(TIMED_OUT)]
    assert describe(ExceptionGroup("all noise", noise)).blame is Blame.CONNECTION
    assert describe(ExceptionGroup("one of mine", [*noise, ValueError("mine")])).blame is Blame.USER


def test_among_equals_the_one_that_happened_first_is_the_cause() -> None:
    report = describe(ValueError("slow to tell"))
    heard_late = Ending(1, Blame.USER, report.at + 2, report)
    heard_first = Ending(0, Blame.USER, report.at + 1, None)
    assert first_cause([heard_first, heard_late]) is heard_late
    killed, left = Ending(2, Blame.DIED, 5.0, exitcode=-9), Ending(3, Blame.DIED, 4.9, exitcode=1)
    assert first_cause([left, killed]) is killed  # a rank that leaves by itself may do so over the other's death
    assert first_cause([killed, heard_first]) is heard_first


def test_a_rank_that_has_raised_and_is_not_heard_is_waited_for() -> None:
    died = Ending(0, Blame.DIED, 10.0, exitcode=-9)
    assert 0 < patience([died], {}) < patience([died], {1: 9.0})
    raised = Ending(0, Blame.USER, 10.0)
    assert patience([raised], {}) == patience([raised], {0: 9.0, 1: 11.0}) == 0.0
    assert patience([raised], {1: 9.0}) > 0.0


# Several ranks that fail at nearly the same time


class SlowToTellError(Exception):
    def __reduce__(self) -> Any:
        time.sleep(0.1)
        return SlowToTellError, self.args


def raises_first_and_tells_last() -> None:
    state = PartialState()
    state.wait_for_everyone()
    if state.process_index == 2:
        raise SlowToTellError("first")
    time.sleep(0.05)
    if state.process_index == 0:
        raise KeyError("second")
    dist.barrier()


def test_the_earliest_exception_wins_even_if_it_takes_longest_to_tell(start_method: str) -> None:
    error = fails(raises_first_and_tells_last, 3, start_method)
    assert (error.rank, error.cause_type) == (2, "SlowToTellError")
    assert error.others[0].startswith("raised KeyError later (test_launch_first_cause.py:")
    assert "waited in barrier #2" in error.others[1]


def everybody_reacts_to_a_death(act: str) -> None:
    state = PartialState()
    state.wait_for_everyone()
    if state.process_index == 1:
        time.sleep(0.05)
        os._exit(3) if act == "exit" else os.kill(os.getpid(), getattr(signal, act))
    try:
        dist.barrier()
    except RuntimeError as error:
        if state.process_index == 0:
            raise ValueError("training failed") from error
        if state.process_index == 2:
            sys.exit(1)
        raise KeyError("while handling")  # noqa: B904 - that the context alone tells is the point


@pytest.mark.parametrize(
    ("method", "act", "name"),
    [("fork", "SIGSEGV", "SIGSEGV"), ("forkserver", "SIGKILL", "SIGKILL"), ("spawn", "exit", "exit code 3")],
)
def test_what_is_raised_because_of_a_peers_death_is_not_the_cause(method: str, act: str, name: str) -> None:
    error = fails(everybody_reacts_to_a_death, 4, method, act)
    assert (error.rank, error.cause_type) == (1, name)
    assert "ran its own code" in str(error).split("\n", 1)[0]
    assert len(error.others) == 3


def one_times_out_by_itself() -> None:
    state = PartialState()
    if state.process_index == 0:
        time.sleep(0.05)
        try:
            raise RuntimeError("the request timed out")
        finally:
            dist.destroy_process_group()  # its peer hears of that first
    state.wait_for_everyone()


def test_a_users_own_time_out_is_an_exception_of_the_users() -> None:
    error = fails(one_times_out_by_itself, 2)
    assert (error.rank, str(error.__cause__)) == (0, "the request timed out")


def waits_in_its_own_clean_up() -> None:
    state = PartialState()
    if state.process_index == 1:
        try:
            raise ValueError("the cause")
        finally:
            dist.barrier()


def test_an_exception_beneath_a_broken_barrier_is_told() -> None:
    error = fails(waits_in_its_own_clean_up, 2)
    assert error.rank == 1
    assert "ValueError: the cause" in error.traceback
    assert isinstance(error.__cause__, RuntimeError)
    assert isinstance(error.__cause__.__context__, ValueError)


# What of an exception arrives


class TwoArgumentsError(Exception):
    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class UnspeakableError(Exception):
    def __str__(self) -> str:
        sys.exit(9)


class ExitsWhenPickledError(Exception):
    def __reduce__(self) -> Any:
        sys.exit(9)


class DiesWhenPickledError(Exception):
    def __reduce__(self) -> Any:
        os._exit(9)


def raises_from_a_cause() -> None:
    try:
        {}["missing"]
    except KeyError as error:
        mine = ValueError("mine")
        mine.__notes__ = ["a note of mine"]  # what add_note does, which Python 3.10 lacks
        raise mine from error


def raises_a_group() -> None:
    raise ExceptionGroup("several", [ValueError("one"), KeyError("two")])


def raises(kind: type[BaseException], *args: Any) -> None:
    raise kind(*args)


def test_causes_and_notes_arrive(start_method: str) -> None:
    error = fails(raises_from_a_cause, 1, start_method)
    cause = error.__cause__
    assert isinstance(cause, ValueError)
    assert isinstance(cause.__cause__, KeyError)
    assert cause.__notes__ == ["a note of mine"]
    assert "KeyError: 'missing'" in error.traceback
    assert "direct cause" in error.traceback
    if sys.version_info >= (3, 11):
        assert "a note of mine" in error.traceback


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups came with Python 3.11")
def test_groups_arrive() -> None:
    error = fails(raises_a_group, 1)
    assert isinstance(error.__cause__, ExceptionGroup)
    assert [type(each) for each in error.__cause__.exceptions] == [ValueError, KeyError]
    assert "ValueError: one" in error.traceback
    assert "KeyError: 'two'" in error.traceback


@pytest.mark.parametrize(
    ("kind", "args"),
    [(TwoArgumentsError, ("text", 3)), (UnspeakableError, ("text",)), (ExitsWhenPickledError, ("text",))],
)
def test_awkward_exceptions_arrive_as_text(kind: type[BaseException], args: tuple[Any, ...]) -> None:
    """Case C12."""
    error = fails(raises, 1, "fork", kind, *args)
    assert error.cause_type == kind.__name__
    assert kind.__name__ in error.traceback
    assert "raise kind(*args)" in error.traceback


def test_an_exception_whose_pickling_ends_the_rank_is_named_as_such() -> None:
    error = fails(raises, 1, "fork", DiesWhenPickledError, "text")
    assert error.cause_type == "exit code 9"
    assert "had raised an exception and did not get to tell it" in str(error)


def test_a_report_that_cannot_be_rebuilt_is_none() -> None:
    assert rebuild(b"") is None
    report = describe(caught(raise_from(ValueError("a"), TwoArgumentsError("b", 1))))
    rebuilt = rebuild(report.pickled)
    assert repr(rebuilt) == "ValueError('a')"
    assert rebuilt.__cause__ is None  # what cannot be rebuilt ends the chain; the text has it all
    assert "TwoArgumentsError: b" in report.text


def test_the_error_can_be_pickled() -> None:
    error = RankError("text", rank=1, cause_type="ValueError", others={0: "waited"}, log_tail=["x"], results={2: 3})
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.rank, again.cause_type) == ("text", 1, "ValueError")
    assert (again.others, again.log_tail, again.results) == ({0: "waited"}, ("x",), {2: 3})


# What the board knows better


def only_the_main_process_waits() -> None:
    state = PartialState()
    if state.is_main_process:
        state.wait_for_everyone()


def test_a_barrier_under_is_main_process(start_method: str) -> None:
    """Case C05."""
    error = fails(only_the_main_process_waits, 3, start_method)
    line = only_the_main_process_waits.__code__.co_firstlineno + 3
    first = str(error).split("\n", 1)[0]
    assert first.startswith(f"rank 0 waits in barrier #1 (test_launch_first_cause.py:{line}), ")
    assert "ranks 1 and 2 have finished without it" in first
    assert "closed by peer" not in first
    assert {error.others[1], error.others[2]} == {"had finished"}


def different_operations() -> None:
    state = PartialState()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))  # from here on: coming up may take ranks longer
    x = torch.ones(4)
    if state.process_index == 0:
        dist.all_reduce(x)
    else:
        dist.broadcast(x, src=0)


def test_different_collectives(start_method: str) -> None:
    """Case C06."""
    error = fails(different_operations, 2, start_method)
    line = different_operations.__code__.co_firstlineno
    first = str(error).split("\n", 1)[0]
    assert "different collectives meet" in first
    assert f"rank 0 in all_reduce #2 (test_launch_first_cause.py:{line + 5})" in first
    assert f"rank 1 in broadcast #2 (test_launch_first_cause.py:{line + 7})" in first


def different_shapes() -> None:
    state = PartialState()
    state.wait_for_everyone()
    if state.process_index == 0:
        dist.all_reduce(torch.ones(1, 8))
    else:
        dist.all_reduce(torch.ones(5, 8))


def test_different_shapes(start_method: str) -> None:
    """Case C07."""
    error = fails(different_shapes, 2, start_method)
    line = different_shapes.__code__.co_firstlineno
    first = str(error).split("\n", 1)[0]
    assert "different shapes meet" in first
    assert f"in all_reduce #2 (test_launch_first_cause.py:{line + 4}) with 1x8 float32" in first
    assert f"in all_reduce #2 (test_launch_first_cause.py:{line + 6}) with 5x8 float32" in first
    assert not [text for text in error.log_tail if "Extension modules" in text or "bootstrap" in text]


def rank_2_is_late(seconds: float) -> int:
    state = PartialState(timeout=timedelta(seconds=60))
    if state.process_index == 2:
        time.sleep(seconds)
    state.wait_for_everyone()
    return state.process_index


def test_a_late_rank_is_called_late_and_left_alone(start_method: str) -> None:
    """Case C08."""
    launch = notebook_launcher(
        rank_2_is_late, (1.5,), num_processes=3, start_method=start_method, block=False, dashboard=False
    )
    said = []
    while not launch.wait(0.05):
        said.append(diagnose([rank.board for rank in launch.ranks], time.monotonic_ns()))
    assert launch.results() == [0, 1, 2]
    late = [verdict for verdict in said if verdict.kind == "late"]
    assert late, said
    assert {verdict.ranks for verdict in late} == {(2,)}
    assert {verdict.kind for verdict in said} <= {"starting", "well", "late", "finished", "unknown"}


# How fast


def note_and_raise(where: str) -> None:
    state = PartialState()
    state.wait_for_everyone()
    if state.process_index == 1:
        with open(where, "w") as file:
            file.write(str(time.monotonic()))
        raise ValueError("now")
    threading.Event().wait()


def raise_to_error_seconds(where: str, ranks: int = 2, start_method: str = "forkserver") -> float:
    """Seconds from a raise in one rank, while the others wait, to the error in the cell, with all ranks gone."""
    fails(note_and_raise, ranks, start_method, where)
    with open(where) as file:
        return time.monotonic() - float(file.read())


def test_the_error_is_there_soon(start_method: str, tmp_path: Any) -> None:
    assert raise_to_error_seconds(str(tmp_path / "at"), 2, start_method) < 5.0

"""The attempts of a launch, one after another, on one thread: each has a board, a port and a supervisor of its own.

A launch without ``max_restarts`` has one. After a failure all ranks are gone before the next attempt begins, so nothing
of the one can reach into the other: not a store's key, not a late connection, not a word on the board.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from nbstate.launch import rendezvous
from nbstate.launch.engines.base import Engine
from nbstate.launch.outcome import Ending, failing
from nbstate.launch.output import Output
from nbstate.launch.plan import Fd, RankPlan
from nbstate.launch.planning import plan_again
from nbstate.launch.report import Blame
from nbstate.launch.rundir import sweep
from nbstate.launch.spec import LaunchSpec
from nbstate.launch.supervisor import Supervisor
from nbstate.telemetry.board import Board, RankSnapshot

__all__ = ["Attempt", "Attempts", "Hooks"]

_NAME: Final = "nbstate-supervisor"


@dataclass(frozen=True)
class Hooks:
    """What a launch wants to hear of; all are called on the thread of its attempts.

    ``tick``, ``output`` and ``failure`` are as for ``Supervisor``. ``restart`` is called with the number of attempts
    there have been, when all ranks are gone and before there are new ones.
    """

    tick: Callable[[], None]
    output: Callable[[], None]
    failure: Callable[[Ending | None], None]
    restart: Callable[[int], None]


class Attempt:
    """One try.

    Attributes
    ----------
    number : int
        How many there were before.
    port : int
        Where rank 0 hosts the store.
    supervisor : Supervisor
        Watches over its ranks.
    """

    def __init__(
        self,
        number: int,
        spec: LaunchSpec,
        engine: Engine,
        plan: Callable[[int, Fd, Fd], Sequence[RankPlan]],
        output: Output,
        deadline: float,
        hooks: Hooks,
    ) -> None:
        self.number = number
        self._final: tuple[list[RankSnapshot], int] | None = None
        with contextlib.ExitStack() as undo:
            self._listener = undo.enter_context(rendezvous.bind(spec.master_addr, spec.port, spec.num_processes))
            self.port: int = self._listener.getsockname()[1]
            self._board = Board.create(spec.num_processes)
            undo.callback(self._board.close)
            for rank in range(spec.num_processes):
                self._board.slot(rank).write(attempt=number)  # before there is a rank that writes
            self.plans = plan(self.port, Fd(self._listener.fileno()), Fd(self._board.fd))
            self.supervisor = Supervisor(engine, self.plans, output, deadline, hooks.tick, hooks.output, hooks.failure)
            self.supervisor.failing = lambda: failing(self.look()[0])
            undo.pop_all()

    def look(self) -> tuple[list[RankSnapshot], int]:
        """The board and the time of the look, ``time.monotonic_ns()``; once kept, as they were then."""
        if self._final is None:
            try:
                return self._board.snapshot(), time.monotonic_ns()
            except ValueError:  # closed in this very moment, by another thread
                if self._final is None:
                    raise
        return self._final

    def keep(self) -> tuple[list[RankSnapshot], int]:
        """Keep the board as it is now, for good."""
        self._final = self.look()
        return self._final

    def close(self) -> None:
        """Let go of the port and of the memory; what was last on the board can still be looked at."""
        self.keep()
        self._board.close()
        self._listener.close()


class Attempts:
    """All of them.

    Parameters
    ----------
    first : callable
        Makes the first one's plans from its port, listener and board.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        engine: Engine,
        first: Callable[[int, Fd, Fd], Sequence[RankPlan]],
        output: Output,
        hooks: Hooks,
    ) -> None:
        self.finished = threading.Event()
        self.error: BaseException | None = None
        self._spec, self._engine, self._output, self._hooks = spec, engine, output, hooks
        self._deadline = math.inf if spec.timeout is None else time.monotonic() + spec.timeout
        self._orders: list[Callable[[Supervisor], None]] = []
        self._thread = threading.Thread(target=self._live, name=_NAME, daemon=True)
        self.current = Attempt(0, spec, engine, first, output, self._deadline, hooks)

    @property
    def begun(self) -> bool:
        """Whether the thread runs or has run."""
        return self._thread.ident is not None

    @property
    def failed(self) -> bool:
        """Whether the newest attempt has failed by itself, and not because somebody ended it."""
        cause = self.current.supervisor.cause
        return cause is not None and cause.blame is not Blame.INTERRUPTED

    def begin(self) -> None:
        """Start the thread, and on it the ranks."""
        self._thread.start()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def interrupt(self) -> None:
        """See ``Supervisor.interrupt``; and there is no further attempt."""
        self._order(Supervisor.interrupt)

    def stop(self, grace: float) -> None:
        """See ``Supervisor.stop``; and there is no further attempt."""
        self._order(lambda supervisor: supervisor.stop(grace))

    def _order(self, order: Callable[[Supervisor], None]) -> None:
        # First noted, then given: whoever makes the next attempt does it the other way round, so one of both sees it.
        self._orders.append(order)
        order(self.current.supervisor)

    def _live(self) -> None:
        try:
            sweep()
            self.current.supervisor.run()
            while self._may_restart():
                self._next()
                self.current.supervisor.run()
        except BaseException as error:  # ours, such as a port that somebody else has taken meanwhile
            self.error = error
        finally:
            self.finished.set()
            self._hooks.output()  # whoever waits for output waits for the end, too

    def _may_restart(self) -> bool:
        left = self.current.number < self._spec.max_restarts and time.monotonic() < self._deadline
        return left and self.failed and not self._orders

    def _next(self) -> None:
        before = self.current
        self._hooks.restart(before.number + 1)
        before.close()

        def again(port: int, listener: Fd, board: Fd) -> Sequence[RankPlan]:
            return plan_again(before.plans, port, listener, board, before.number + 1)

        self.current = Attempt(
            before.number + 1, self._spec, self._engine, again, self._output, self._deadline, self._hooks
        )
        if self._orders:
            self._orders[0](self.current.supervisor)  # which then starts no rank

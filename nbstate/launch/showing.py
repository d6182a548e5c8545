"""What a launch shows while it runs and when it has ended: the text of its ranks in its cell, and its dashboard."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from nbstate.dashboard import (
    Controls,
    LaunchFacts,
    LaunchView,
    LiveDashboard,
    TerminalDashboard,
    dashboard_available,
    terminal_available,
)
from nbstate.dashboard.report import TAIL as LINES
from nbstate.dashboard.report import Report, build_report
from nbstate.launch import notebook
from nbstate.launch.flow import CELL, TAIL, Flow
from nbstate.launch.output import Output, Rich
from nbstate.launch.spec import LaunchSpec
from nbstate.launch.timeline import Event, Timeline
from nbstate.launch.utilisation import NvmlDevices, Sampler
from nbstate.telemetry.board import RankSnapshot
from nbstate.telemetry.diagnosis import Verdict

__all__ = ["BETWEEN_POURS", "Showing"]

BETWEEN_POURS: Final = 0.02
"""Seconds in which lines gather, so that a rank that prints much costs few messages."""
_BETWEEN_FRAMES: Final = 0.1  # seconds
_MB: Final = 1_000_000

Look = Callable[[], tuple[list[RankSnapshot], int]]


class Showing:
    """One launch, as its cell shows it. Made on the thread of that cell, which it writes to from any thread.

    Parameters
    ----------
    spec : LaunchSpec
        What runs.
    start_method : str
        How its ranks are made.
    output : Output
        What they have printed.
    look : callable
        The board, and the time of the look in ``time.monotonic_ns()``.
    alarm : callable
        What was found when the launch had come to a stand; None while it goes on.

    Attributes
    ----------
    dashboard : LiveDashboard, TerminalDashboard or None
        What is drawn, if anything.
    cells : dict of str to str
        File name of each cell's code, and what the notebook calls the cell.
    started : int
        ``time.monotonic_ns()`` of the launch.
    """

    def __init__(
        self, spec: LaunchSpec, start_method: str, output: Output, look: Look, alarm: Callable[[], Verdict | None]
    ) -> None:
        self.dashboard: LiveDashboard | TerminalDashboard | None = None
        self.cells = notebook.cell_names()
        self.started = time.monotonic_ns()
        self._spec, self._output, self._look, self._alarm = spec, output, look, alarm
        self._write_to_cell = notebook.cell_writer()
        self._flow = Flow()
        self._sampler = Sampler(NvmlDevices(spec.env.get("CUDA_VISIBLE_DEVICES")))
        self._left_out = 0
        self._pouring = threading.Lock()
        self._next_frame = 0.0
        self._next_pour = 0.0
        self._facts = LaunchFacts(
            title=spec.title,
            cell=notebook.current_cell(),
            start_method=start_method,
            engine=spec.engine,
            world_size=spec.num_processes,
            started=self.started,
        )
        self._timeline = Timeline(spec.num_processes, self.started)
        self._end: LaunchView | None = None

    def begin(self, controls: Controls) -> None:
        """Draw the dashboard: the widget in a notebook, one line on a terminal, else nothing."""
        spec = self._spec
        if spec.dashboard is False:
            return
        if dashboard_available():
            self.dashboard = LiveDashboard(self._facts, controls)
        elif terminal_available():
            self.dashboard = TerminalDashboard(self._facts)
        else:
            return
        self.dashboard.show()
        self.dashboard.refresh(self._view("starting"))

    def tick(self) -> None:
        """Show what has changed; called often, on the launch's own thread."""
        now = time.monotonic()
        if not self._spec.block and now >= self._next_pour:
            self._next_pour = now + BETWEEN_POURS
            self.pour()
        if self._timeline.is_due(time.monotonic_ns()):
            self._timeline.record(*self._look())
        if self.dashboard is None or now < self._next_frame:
            return
        self._next_frame = now + _BETWEEN_FRAMES
        try:
            self.dashboard.refresh(self._view("running"))
        except Exception as error:  # a picture that cannot be drawn must not end the launch
            self._next_frame = math.inf
            self.say(f"nbstate: the dashboard has stopped: {type(error).__name__}: {error}")

    def say(self, line: str, write: notebook.Writer | None = None) -> None:
        """Write a line of nbstate's own to the cell's stderr."""
        (write or self._write_to_cell)("stderr", f"{line}\n")

    def pour(self, write: notebook.Writer | None = None) -> bool:
        """Show what has been printed since the last time, as far as the cell may take it now.

        Returns
        -------
        bool
            Whether there is more, for which the cell is not ready.
        """
        to_cell = write or self._write_to_cell
        limited = notebook.goes_to_front_end(to_cell)
        with self._pouring:
            while True:
                if limited and self._flow.is_full:
                    self._leave_out(to_cell)
                if limited and not self._flow.is_open:
                    return self._output.waits
                if limited and self._flow.is_full and not self._output.displays:
                    return False
                piece = self._output.take()
                if piece is None:
                    return False
                self._put(piece, to_cell)

    def pour_the_rest(self, write: notebook.Writer | None, hurried: Callable[[], bool]) -> None:
        """The last output, once no more can come. Waits for the cell, unless ``hurried`` says that nobody does."""
        to_cell = write or self._write_to_cell
        while self.pour(write):
            if hurried():
                with self._pouring:
                    self._left_out += self._output.leave_out(TAIL)
                break
            time.sleep(BETWEEN_POURS)
        if self._left_out:
            kept = f"{self._left_out / _MB:,.1f} MB of text are left out above; Launch.logs(rank) has them"
            self.say(f"nbstate: {kept}", write)
        with self._pouring:
            while (piece := self._output.take()) is not None:
                self._put(piece, to_cell)

    def finish(self, state: Any, message: str, guilty: tuple[int, ...]) -> None:
        """Draw the last picture."""
        try:
            end = self._end = self._view(state, message, guilty)
            self._timeline.record(end.snapshots, end.now, last=True)
            if self.dashboard is not None:
                self.dashboard.finish(end)
        except Exception as failure:  # results are not lost for a picture
            self.say(f"nbstate: no last picture: {type(failure).__name__}: {failure}")

    def events(self) -> list[Event]:
        """What has happened so far."""
        return self._timeline.events(self.cells)

    def report(self, error: BaseException | None) -> Report:
        """A page about the launch as it stands; of an ended one, as it ended."""
        return build_report(
            self._facts,
            self._end or self._view("running"),
            self.events(),
            tails={rank: self._output.tail(rank, LINES) for rank in range(self._spec.num_processes)},
            error="" if error is None else str(error),
        )

    def _put(self, piece: tuple[str, str] | Rich, to_cell: notebook.Writer) -> None:
        if isinstance(self.dashboard, TerminalDashboard):
            self.dashboard.clear()
        if isinstance(piece, Rich):
            to_cell.display(piece)
            self._flow.add(piece.text)
        else:
            to_cell(*piece)
            self._flow.add(piece[1])

    def _leave_out(self, to_cell: notebook.Writer) -> None:
        """From here on the cell gets no more lines, until the end."""
        gone = self._output.leave_out(TAIL)
        if gone and not self._left_out:
            text = f"nbstate: this cell has got {CELL / _MB:g} MB of text, which is all that a page can well show"
            self.say(f"{text}; the last lines come at the end, and Launch.logs(rank) has everything", to_cell)
        self._left_out += gone

    def _view(self, state: Any, message: str = "", guilty: tuple[int, ...] = ()) -> LaunchView:
        snapshots, now = self._look()
        return LaunchView(
            snapshots=snapshots,
            now=now,
            state=state,
            message=message,
            lines=self._output.recent(),
            cells=self.cells,
            guilty=guilty,
            verdict=self._alarm(),
            utilisation=self._sampler.sample(snapshots),
        )

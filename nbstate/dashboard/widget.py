"""The dashboard in the page: one anywidget, one comm, one message a refresh.

The kernel sends ``frame``: utf-8 JSON of a ``Frame`` with ``now`` beside its fields, the moment it was sent in seconds
after the start of the launch. It is a synced trait and not a custom message, so that a view opened late, and a notebook
saved with its widgets, have the last one. ``now`` alone is never a reason to send.

The page sends custom messages, ``{"kind": ...}``: ``"interrupt"``, ``"stop"``, ``"stacks"`` and ``"diagnose"`` when a
button is pressed, ``"hello"`` when a view opens. The kernel answers a hello with ``{"kind": "clock", "now": seconds}``:
a view that opens late would otherwise set its clock by a frame that is long out of date, and a page without a kernel
would tick for ever. Stacks and a diagnosis may take a second or two: they are asked for on a thread of their own and
answered by ``{"kind": "text", "of": ..., "title": ..., "text": ...}``.

While the ranks run a cell displays the live view, with its picture as html for pages that know no widgets. When they
have ended the picture alone stays (see ``LiveDashboard.finish``). JupyterLab does not save the state of widgets unless
asked to, and puts "model not found" where a view without one was saved, whatever else that display offers.

A cell that waits for ranks keeps the kernel's main thread busy. Refreshes come from the launch's own thread and pass at
once. Clicks are another matter: ipykernel 7.4 answers a comm on the shell that last published on it, which is the busy
one. ``_reply_subshell_for`` is its hook for that choice; we let each message go where the front end sent it, which is a
subshell, so callbacks run while the cell is busy. Before 7.4 there is no such hook and that is the default.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

import anywidget
import traitlets
from IPython.core.getipython import get_ipython
from IPython.display import DisplayHandle, display

from nbstate.dashboard.model import LIVE, Frame, LaunchFacts, LaunchView, build_frame, seconds_after
from nbstate.dashboard.picture import frame_to_html
from nbstate.dashboard.snapshot import PLAIN_TEXT
from nbstate.errors import LaunchError
from nbstate.telemetry.board import Board

__all__ = ["Controls", "DashboardWidget", "LiveDashboard", "dashboard_available"]

_STATIC: Final = Path(__file__).parent / "static"
_SCRIPTS: Final = ("page", "status", "ranks", "output", "dashboard")
SCRIPT: Final = "\n".join((_STATIC / f"{name}.js").read_text("utf-8") for name in _SCRIPTS)
"""The page's half as one ES module: anywidget takes one, and there is no build step to make it."""
_EVERY: Final = 0.1  # seconds between two looks at the board
_QUESTIONS: Final = {"stacks": "Stacks of all ranks", "diagnose": "Diagnosis"}
_VIEW_MIME: Final = "application/vnd.jupyter.widget-view+json"


class Controls(Protocol):
    """What the buttons do. Called on threads of the kernel's that are not the cell's.

    ``interrupt`` and ``stop`` return quickly; ``stacks`` and ``diagnose`` may take their time.
    """

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in every rank."""

    def stop(self) -> None:
        """End every rank."""

    def stacks(self) -> str:
        """Where each rank is, as text for a person."""

    def diagnose(self) -> str:
        """What is wrong, if anything is, as text for a person."""


def dashboard_available() -> bool:
    """Whether this process is an IPython kernel, so that a widget has somewhere to go."""
    shell = get_ipython()
    return shell is not None and getattr(shell, "kernel", None) is not None


class DashboardWidget(anywidget.AnyWidget):  # type: ignore[misc]  # mypy is told not to follow anywidget
    """Draws frames. Composes with other widgets (HBox, Tab, Output) as any ipywidget does.

    In Colab anywidget itself asks for the custom widget manager that third-party widgets need there.
    """

    _esm = SCRIPT
    _css = _STATIC / "dashboard.css"
    frame = traitlets.Bytes(b"").tag(sync=True)

    def __init__(self, **kwargs: Any) -> None:
        # Before the comm opens: everything that sends asks for it.
        self._owner = os.getpid()
        self._static_html: Callable[[], str] = str
        super().__init__(**kwargs)

    def open(self) -> None:
        """Open the comm, and let clicks through while the cell is busy (see the head of this module)."""
        super().open()
        if hasattr(self.comm, "_reply_subshell_for"):
            self.comm._reply_subshell_for = _where_the_front_end_sent_it

    def close(self) -> None:
        """Close the comms, of the widget and its layout. In a forked child they belong to the kernel, and stay."""
        if self._owner != os.getpid() or self.comm is None:
            return
        super().close()
        self.layout.close()
        del self._repr_mimebundle_  # ipywidgets blanks it; what is closed can still be shown, as its picture

    def _send(self, msg: dict[str, Any], buffers: list[Any] | None = None) -> None:
        # A forked child that sent here would write into the kernel's own connection, out of step with the kernel.
        refuse_in_child(self._owner)
        super()._send(msg, buffers=buffers)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """The picture as html, a constant line of text, and as long as the comm is open the live view."""
        bundle: dict[str, Any] = {"text/plain": PLAIN_TEXT, "text/html": self._static_html()}
        if self.comm is not None:
            bundle[_VIEW_MIME] = {"version_major": 2, "version_minor": 0, "model_id": self.model_id}
        return bundle


class LiveDashboard:
    """A launch's dashboard, from its first frame to its last.

    Parameters
    ----------
    facts : LaunchFacts
        What is known before the launch.
    controls : Controls
        What the buttons do.
    clock : callable
        Seconds, for the limit of ten refreshes a second.

    Attributes
    ----------
    widget : DashboardWidget
        The widget itself, to be placed anywhere.

    Notes
    -----
    Life: ``show`` in the cell's thread, ``refresh`` from any thread as often as one likes, ``finish`` once, before the
    cell returns: a notebook is saved with what had arrived by then.
    """

    def __init__(self, facts: LaunchFacts, controls: Controls, clock: Callable[[], float] = time.monotonic) -> None:
        self.facts = facts
        self._controls = controls
        self._clock = clock
        self._lock = threading.Lock()
        self._looked_at = float("-inf")
        self._finished = False
        self._asked: set[str] = set()
        self._handle: DisplayHandle | None = None
        blank = Board.create(facts.world_size)
        self._frame = build_frame(facts, LaunchView(blank.snapshot(), now=facts.started, state="starting"))
        blank.close()
        self.widget = DashboardWidget(frame=_encode(self._frame, 0.0))
        self.widget._static_html = self._html
        self.widget.on_msg(self._on_message)

    def show(self) -> None:
        """Display the dashboard in the cell that runs now."""
        refuse_in_child(self.widget._owner)
        self._handle = display(self.widget, display_id=True)

    def refresh(self, view: LaunchView) -> bool:
        """Send what has changed, at most ten times a second.

        Returns
        -------
        bool
            Whether a message was sent. A view that comes too early is not kept: the next one tells more.
        """
        refuse_in_child(self.widget._owner)
        with self._lock:
            moment = self._clock()
            if self._finished or moment - self._looked_at < _EVERY:
                return False
            self._looked_at = moment
            return self._publish(view)

    def finish(self, view: LaunchView) -> None:
        """Put a picture of the last frame in the place of the live view, and close the widget. Later calls do nothing.

        The order matters: a page that saw the comm close first would have a view without a model for a moment. A widget
        that was never shown from here stands where its owner has put it; it stays, with its last frame.
        """
        refuse_in_child(self.widget._owner)
        with self._lock:
            if self._finished:
                return
            self._finished = True
            self._publish(view)
        if self._handle is not None:
            self._handle.update({"text/plain": PLAIN_TEXT, "text/html": self._html()}, raw=True)
            self.widget.close()

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        return self.widget._repr_mimebundle_(**kwargs)

    def _publish(self, view: LaunchView) -> bool:
        frame = build_frame(self.facts, view)
        if frame == self._frame:
            return False
        self._frame = frame
        self.widget.frame = _encode(frame, seconds_after(self.facts.started, view.now))
        return True

    def _html(self) -> str:
        return frame_to_html(self._frame, self._now())

    def _now(self) -> float:
        return seconds_after(self.facts.started, time.monotonic_ns())

    def _on_message(self, _: object, content: object, __: object) -> None:
        kind = content.get("kind") if isinstance(content, dict) else None
        if kind == "hello":
            # Only a live launch has a clock; a late hello to an ended one would start it again.
            if self._frame["state"] in LIVE:
                self.widget.send({"kind": "clock", "now": self._now()})
        elif self._finished:
            return
        elif kind == "interrupt":
            self._controls.interrupt()
        elif kind == "stop":
            self._controls.stop()
        elif isinstance(kind, str) and kind in _QUESTIONS:
            self._ask(kind)

    def _ask(self, kind: str) -> None:
        """Let a thread find the answer to a question of the page's; one at a time of each kind."""
        with self._lock:
            if kind in self._asked:
                return
            self._asked.add(kind)
        threading.Thread(target=self._answer, args=(kind,), name=f"nbstate-{kind}", daemon=True).start()

    def _answer(self, kind: str) -> None:
        try:
            text = self._controls.stacks() if kind == "stacks" else self._controls.diagnose()
        except Exception as error:  # somebody waits for an answer, and this thread has nobody else to tell
            text = f"{type(error).__name__}: {error}"
        with self._lock:
            self._asked.discard(kind)
            if not self._finished:
                self.widget.send({"kind": "text", "of": kind, "title": _QUESTIONS[kind], "text": text})


def refuse_in_child(owner: int) -> None:
    """Raise if this process is a fork of the one that made the widget.

    Raises
    ------
    LaunchError
        In any other process than ``owner``.
    """
    if os.getpid() != owner:
        raise LaunchError(
            f"This dashboard belongs to the kernel (process {owner}) and was touched in a forked child (process "
            f"{os.getpid()}). A rank cannot draw: return the value, or print it, and the kernel will show it."
        )


def _encode(frame: Frame, now: float) -> bytes:
    return json.dumps({**frame, "now": now}, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def _where_the_front_end_sent_it(_: object, default: str | None) -> str | None:
    return default

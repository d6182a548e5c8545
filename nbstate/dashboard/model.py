"""What a person sees, as plain values: board snapshots in, one frame out. No UI import, no clock, no state.

A frame is what the page draws, and all of it: JSON-able, the same for the widget, the html and the text.

Times in a frame
----------------
A frame must not change when the board does not, or every tick of a clock would cost a message. So nothing that grows
with time is in it: an open barrier, a phase or a collective carries ``since``, in seconds after the start of the
launch, and whoever draws works out the age. The page does it with its own clock, which it sets by the ``now`` that
travels beside each frame (see ``widget.py``), and ticks between frames. ``elapsed`` is None while the launch runs, and
once it has ended the moment at which every clock stops.

The verdict's sentence may name a waiting time too. There a frame has ``AGE``, and whoever draws puts the age in its
place: the sentence and the barrier beside it then say the same, and a lasting trouble makes no message at all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypedDict

from nbstate.dashboard.barriers import Meeting, OpenBarrier, Straggler, history, newest_barrier, straggler
from nbstate.dashboard.gradients import gradient_facts
from nbstate.dashboard.kinds import Tone, look_of
from nbstate.dashboard.lines import pick_lines, pick_tails
from nbstate.dashboard.ranks import Columns, Utilisation, build_columns
from nbstate.telemetry.board import Phase, RankSnapshot
from nbstate.telemetry.diagnosis import Verdict, diagnose

__all__ = [
    "AGE",
    "Frame",
    "LaunchFacts",
    "LaunchView",
    "State",
    "Utilisation",
    "VerdictLine",
    "build_frame",
    "seconds_after",
    "show_elapsed",
]

State = Literal["starting", "running", "finished", "failed", "interrupted", "stopped"]

LIVE: Final = frozenset({"starting", "running"})
TABLE_ROWS: Final = 32  # worlds larger than this are drawn as a heat map, without strips
AGE: Final = "{age}"  # what stands in a sentence for a waiting time
_ACTIONS: Final = ("diagnose", "stacks", "interrupt", "stop")
_SECONDS: Final = re.compile(r"\b\d+\.\d s\b")
_ENDINGS: Final = {"finished": "finished", "failed": "failed", "interrupted": "interrupted", "stopped": "stopped"}


@dataclass(frozen=True)
class LaunchFacts:
    """What is known of a launch before it starts, and never changes.

    Parameters
    ----------
    title : str
        Name of the function that runs.
    cell : str
        The cell that launched it, as ``"In[5]"``, or ``""``.
    start_method, engine : str
        How the ranks are made, as ``"forkserver"`` and ``"local"``.
    world_size : int
        Number of ranks.
    started : int
        ``time.monotonic_ns()`` when the launch began: the zero of every time in a frame.
    """

    title: str
    cell: str
    start_method: str
    engine: str
    world_size: int
    started: int


@dataclass(frozen=True)
class LaunchView:
    """What is known of a launch at one moment.

    Parameters
    ----------
    snapshots : sequence of RankSnapshot
        The board, in rank order.
    now : int
        ``time.monotonic_ns()`` of this moment.
    state : str
        ``"starting"``, ``"running"``, ``"finished"``, ``"failed"``, ``"interrupted"`` or ``"stopped"``.
    message : str
        The final sentence, as ``"rank 1 raised ValueError: boom (In[5], line 3)"``; ``""`` while it runs.
    lines : sequence of (int, str)
        The last lines of output, oldest first: rank and text.
    cells : mapping of str to str
        File name of a cell to what the notebook calls it (``"In[5]"``).
    guilty : tuple of int
        At the end: the ranks that ``message`` is about. Left empty, they are the ranks whose last phase is "failed".
    verdict : Verdict, optional
        What whoever has looked closer than the board says; while it stands, shown in the place of what the board says.
    utilisation : mapping of int to Utilisation
        How busy each rank is, where that is known.
    """

    snapshots: Sequence[RankSnapshot]
    now: int
    state: State
    message: str = ""
    lines: Sequence[tuple[int, str]] = ()
    cells: Mapping[str, str] = field(default_factory=dict)
    guilty: tuple[int, ...] = ()
    verdict: Verdict | None = None
    utilisation: Mapping[int, Utilisation] = field(default_factory=dict)


class VerdictLine(TypedDict):
    """The sentence under the header, its kind and how that looks, and the ranks it blames.

    ``lines``: the places it is about that the sentence does not name. ``evidence``: further facts that speak for it.
    ``since``: seconds after the start of the launch; from then counts the age that takes the place of ``AGE`` in the
    sentence. None if there is no such place.
    """

    kind: str
    symbol: str
    word: str
    tone: Tone
    sentence: str
    ranks: list[int]
    since: float | None
    lines: list[str]
    evidence: list[str]


class Frame(TypedDict):
    """One picture of a launch. Times are seconds after its start.

    ``gradients``: how the ranks accumulate, in words. ``lines``: the last of all ranks together; ``tails``: those of
    each rank before them, empty beyond a table's size.
    """

    title: str
    cell: str
    world_size: int
    start_method: str
    engine: str
    state: State
    elapsed: float | None
    actions: list[str]
    verdict: VerdictLine
    barrier: OpenBarrier | None
    ranks: Columns
    gradients: list[str]
    history: list[Meeting]
    straggler: Straggler | None
    lines: list[tuple[int, str]]
    tails: list[list[str]]


def seconds_after(started: int, moment: int) -> float:
    """Seconds from the start of a launch to a ``monotonic_ns`` moment, to the millisecond, never negative."""
    return max(0.0, round((moment - started) / 1e9, 3))


def build_frame(facts: LaunchFacts, view: LaunchView) -> Frame:
    """Draw one moment of a launch as plain values.

    Equal boards give equal frames, whatever the time (see the head of this module).

    Examples
    --------
    >>> from nbstate.telemetry.board import Board, Phase
    >>> board = Board.create(2)
    >>> board.slot(0).write(phase=Phase.RUNNING, step=3)
    >>> facts = LaunchFacts("train", "In[5]", "forkserver", "local", world_size=2, started=0)
    >>> frame = build_frame(facts, LaunchView(board.snapshot(), now=10**9, state="running"))
    >>> frame["ranks"]["phase_text"], frame["ranks"]["step"]
    (['running', 'not started'], [3, 0])
    >>> board.close()
    """
    snapshots = view.snapshots
    live = view.state in LIVE
    verdict = _verdict_while_live(facts, view) if live else _verdict_at_end(facts, view)
    meetings = history(snapshots, view.cells)
    return Frame(
        title=facts.title,
        cell=facts.cell,
        world_size=facts.world_size,
        start_method=facts.start_method,
        engine=facts.engine,
        state=view.state,
        elapsed=None if live else seconds_after(facts.started, view.now),
        actions=list(_ACTIONS) if live else [],
        verdict=verdict,
        barrier=newest_barrier(snapshots, facts.started, view.cells),
        ranks=build_columns(
            snapshots,
            facts.started,
            kind=verdict["kind"],
            guilty=verdict["ranks"],
            cells=view.cells,
            utilisation=view.utilisation,
            strips=facts.world_size <= TABLE_ROWS,
            ended=not live,
        ),
        gradients=gradient_facts(snapshots),
        history=meetings,
        straggler=straggler(meetings, facts.world_size),
        lines=pick_lines(view.lines),
        tails=pick_tails(view.lines, facts.world_size) if facts.world_size <= TABLE_ROWS else [],
    )


def show_elapsed(seconds: float) -> str:
    """A length of time as a header shows it: ``"00:41"``, ``"1:02:03"``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


def _verdict_while_live(facts: LaunchFacts, view: LaunchView) -> VerdictLine:
    last_word = max((max(s.heartbeat, s.phase_since) for s in view.snapshots), default=0)
    now = max(last_word, view.now)  # a rank may write after the kernel took the time
    verdict = view.verdict or diagnose(view.snapshots, now, view.cells)
    sentence, since = verdict.sentence, None
    if verdict.since:
        sentence = _with_age(sentence, (now - verdict.since) / 1e9)
        since = seconds_after(facts.started, verdict.since)
    places = [line for line in verdict.lines if line not in sentence]
    return _line(verdict.kind, sentence, list(verdict.ranks), since, places, list(verdict.evidence))


def _with_age(sentence: str, seconds: float) -> str:
    """The sentence with ``AGE`` in the place of its waiting time; of the first there is, if it was said a while ago."""
    exact = f"{seconds:.1f} s"
    return sentence.replace(exact, AGE, 1) if exact in sentence else _SECONDS.sub(AGE, sentence, count=1)


def _verdict_at_end(facts: LaunchFacts, view: LaunchView) -> VerdictLine:
    seconds = seconds_after(facts.started, view.now)
    sentence = view.message or f"{_ENDINGS[view.state]} {'in' if view.state == 'finished' else 'after'} {seconds:.1f} s"
    ranks: list[int] = []
    if view.state == "failed":
        ranks = list(view.guilty) or [s.rank for s in view.snapshots if s.phase is Phase.FAILED]
    return _line(view.state, sentence, ranks)


def _line(
    kind: str,
    sentence: str,
    ranks: list[int],
    since: float | None = None,
    lines: Sequence[str] = (),
    evidence: Sequence[str] = (),
) -> VerdictLine:
    symbol, word, tone = look_of(kind)
    return VerdictLine(
        kind=kind,
        symbol=symbol,
        word=word,
        tone=tone,
        sentence=sentence,
        ranks=ranks,
        since=since,
        lines=list(lines),
        evidence=list(evidence),
    )

"""Stacks of every thread of every rank: what they are, how they are read from a dump, and how a person sees them.

Ranks that are healthy do the same thing, so equal stacks are shown once, with the ranks that have them. Frames that
belong to the machinery, nbstate's and that of ``threading``, are left out: nobody can do anything about them.
"""

from __future__ import annotations

import html
import linecache
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from nbstate.launch.dumps import Dumps
from nbstate.launch.tracebacks import is_machinery, short_path
from nbstate.telemetry.diagnosis import name_ranks
from nbstate.telemetry.observed import StackFrame
from nbstate.telemetry.source import is_user_file, show_line

__all__ = ["MAIN", "OTHER", "Stacks", "ThreadStack", "own_frames", "parse_dump", "take_stacks"]

MAIN: Final = "MainThread"
OTHER: Final = "another thread"
_HEAD: Final = re.compile(
    r"(?P<current>Current thread|Thread) 0x(?P<ident>[0-9a-f]+)(?: \[(?P<name>.*)\])? \(most recent call first\):"
)
_FRAME: Final = re.compile(r'  File (?:"(?P<file>.*)"|\?\?\?), line (?P<line>\d+|\?\?\?) in (?P<function>.*)')
_ESCAPE: Final = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")
_THREADING: Final = os.path.join("", "threading.py")
_BOOTSTRAP: Final = frozenset({"_bootstrap", "_bootstrap_inner", "run"})
_RANK: Final = os.path.join("nbstate", "launch", "rank.py")


@dataclass(frozen=True)
class ThreadStack:
    """One thread of one rank.

    Attributes
    ----------
    name : str
        ``"MainThread"``, the thread's name where that is known, or ``"another thread"``.
    frames : tuple of StackFrame
        Innermost first, without the machinery.
    ident : int
        ``threading.get_ident()`` of it, in its rank.
    """

    name: str
    frames: tuple[StackFrame, ...]
    ident: int = field(default=0, compare=False)


@dataclass(frozen=True, repr=False)
class Stacks:
    """Stacks of a launch's ranks at one moment. Shown in a notebook, equal ones are shown once.

    Attributes
    ----------
    ranks : dict of int to tuple of ThreadStack
        The threads of each rank that answered, its main thread first.
    silent : dict of int to str
        Why a rank has none: ``"ended"``.
    cells : dict of str to str
        File names of cells to what the notebook calls them.
    """

    ranks: Mapping[int, tuple[ThreadStack, ...]]
    silent: Mapping[int, str] = field(default_factory=dict)
    cells: Mapping[str, str] = field(default_factory=dict)

    def main(self, rank: int) -> tuple[StackFrame, ...]:
        """What a rank's main thread does, innermost first; empty if that is not known."""
        return next((thread.frames for thread in self.ranks.get(rank, ()) if thread.name == MAIN), ())

    def __repr__(self) -> str:
        blocks = [self._block(ranks, thread) for thread, ranks in self._folded()]
        blocks += [f"no stack of {name_ranks(ranks)}: {why}" for why, ranks in _turned(self.silent)]
        return "\n\n".join(blocks) or "there are no ranks"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"

    def _folded(self) -> list[tuple[ThreadStack, list[int]]]:
        """Each different stack and the ranks that have it: main threads first, then by rank."""
        found: dict[ThreadStack, list[int]] = defaultdict(list)
        for rank, threads in sorted(self.ranks.items()):
            for thread in threads:
                if thread.frames or thread.name == MAIN:
                    found[thread].append(rank)
        return sorted(found.items(), key=lambda item: (item[0].name != MAIN, item[1]))

    def _block(self, ranks: Sequence[int], thread: ThreadStack) -> str:
        times = len(ranks) // len(set(ranks))
        head = f"{name_ranks(ranks)} ({thread.name}{f', {times} times' if times > 1 else ''})"
        if not thread.frames:
            return f"{head}: in nbstate's own code"
        lines = [f"{head}, innermost call first:"]
        for frame in thread.frames:
            lines.append(f"  {_place(frame, self.cells)}, in {frame.function}")
            if frame.line and is_user_file(frame.file):
                source = linecache.getline(frame.file, frame.line).strip()
                lines += [f"      {source}"] if source else []
        return "\n".join(lines)


def _turned(silent: Mapping[int, str]) -> list[tuple[str, list[int]]]:
    by_reason: dict[str, list[int]] = defaultdict(list)
    for rank, why in sorted(silent.items()):
        by_reason[why].append(rank)
    return list(by_reason.items())


def _place(frame: StackFrame, cells: Mapping[str, str]) -> str:
    if not frame.line:  # a library's machine code
        return os.path.basename(frame.file) or "?"
    if is_user_file(frame.file):
        return show_line(frame.file, frame.line, cells)
    return f"{short_path(frame.file)}:{frame.line}"


def take_stacks(
    dumps: Dumps, pids: Mapping[int, int], cells: Mapping[str, str] | None = None, timeout: float = 2.0
) -> Stacks:
    """Ask ranks for their Python stacks, also while they are stuck in C++.

    Parameters
    ----------
    dumps : Dumps
        The launch's.
    pids : mapping of int to int
        Ranks and their processes; 0 for a rank that has not started, negative for one that has ended.
    cells : mapping of str to str, optional
        File names of cells to what the notebook calls them.
    timeout : float
        Seconds to wait for a rank that does not answer; an answer takes about a hundredth of one.
    """
    answers = dumps.ask(pids, timeout)
    return Stacks(
        ranks={rank: parse_dump(answer.text) for rank, answer in answers.items() if not answer.silence},
        silent={rank: answer.silence for rank, answer in answers.items() if answer.silence},
        cells=cells or {},
    )


def parse_dump(text: str) -> tuple[ThreadStack, ...]:
    """Read what ``faulthandler`` has written, main thread first.

    Parameters
    ----------
    text : str
        A dump of all threads, made by the main thread. If there are two, one after the other, the newer one counts.

    Examples
    --------
    >>> text = '''Current thread 0x00007f91 (most recent call first):
    ...   File "train.py", line 14 in train
    ... '''
    >>> parse_dump(text)
    (ThreadStack(name='MainThread', frames=(StackFrame(file='train.py', line=14, function='train'),), ident=32657),)
    """
    names: dict[int, str] = {}
    frames: dict[int, list[StackFrame]] = {}
    here: list[StackFrame] | None = None
    for line in text.splitlines():
        head, frame = _HEAD.fullmatch(line), _FRAME.fullmatch(line)
        if head:
            ident = int(head["ident"], 16)
            names[ident] = MAIN if head["current"] == "Current thread" else (head["name"] or OTHER)
            here = frames[ident] = []
        elif frame and here is not None:
            number = int(frame["line"]) if frame["line"].isdecimal() else 0
            here.append(StackFrame(_unescaped(frame["file"] or "?"), number, _unescaped(frame["function"])))
    stacks = [
        ThreadStack(names[ident], shown, ident)
        for ident, found in frames.items()
        # A thread with no frames but ours is not the user's: the one that watches the flight recorder.
        if (shown := own_frames(found)) or not found or names[ident] == MAIN
    ]
    return tuple(sorted(stacks, key=lambda stack: stack.name != MAIN))


def _unescaped(text: str) -> str:
    """``faulthandler`` writes ASCII only."""
    return _ESCAPE.sub(lambda match: chr(int(match[1] or match[2] or match[3], 16)), text)


def own_frames(frames: Iterable[StackFrame]) -> tuple[StackFrame, ...]:
    """Frames, innermost first, without what called the launch's function, and without wrappers within it."""
    return tuple(_without_machinery(frames))


def _without_machinery(frames: Iterable[StackFrame]) -> Iterator[StackFrame]:
    for frame in frames:
        if frame.file.endswith(_RANK):
            return
        function = frame.function.rpartition(".")[2]
        if is_machinery(frame.file) or (frame.file.endswith(_THREADING) and function in _BOOTSTRAP):
            continue
        yield frame

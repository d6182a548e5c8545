"""The verdict: what diagnosis says of a launch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

__all__ = ["ALARMS", "Kind", "Verdict"]

Kind = Literal[
    "starting",
    "well",
    "late",
    "missing",
    "mismatch",
    "uneven",
    "order",
    "deadlock",
    "halted",
    "starved",
    "blocked",
    "lost",
    "finished",
    "failed",
    "stopped",
    "unknown",
]
"""``missing``: a rank that others wait for has gone. ``uneven``: the same, or a mismatch, after different numbers of
steps. ``order``: ranks enter the collectives of several groups in different orders. ``deadlock``: ranks wait for each
other. ``halted``: stopped by a signal. ``starved``: could run and gets no processor. ``blocked``: late, and asleep in
its own code. ``lost``: a rank does not find the store. ``stopped``: ended on request."""

ALARMS: Final = frozenset(
    {"missing", "mismatch", "uneven", "order", "deadlock", "halted", "starved", "blocked", "lost"}
)


@dataclass(frozen=True)
class Verdict:
    """What diagnosis says.

    Attributes
    ----------
    kind : str
        One of ``Kind``.
    sentence : str
        For a person, without a full stop.
    ranks : tuple of int
        The ranks it is about: the guilty ones. Empty when nobody is.
    since : int
        ``time.monotonic_ns()`` of the moment from which the seconds in the sentence count; 0 if it names none.
    lines : tuple of str
        The places it is about, as ``"In[5], line 14"``: first where ranks wait, then where guilty ones are.
    evidence : tuple of str
        Further facts that speak for it, each a short sentence without a full stop.

    Two verdicts are equal if kind, sentence and ranks are.
    """

    kind: Kind
    sentence: str
    ranks: tuple[int, ...] = ()
    since: int = field(default=0, compare=False)
    lines: tuple[str, ...] = field(default=(), compare=False)
    evidence: tuple[str, ...] = field(default=(), compare=False)

    @property
    def alarming(self) -> bool:
        """Whether it may be told unasked, once the launch has come to a stand.

        All that is wrong for certain is alarming, and so is a rank that others wait for and that was seen asleep. One
        that is only late may be computing.
        """
        return self.kind in ALARMS

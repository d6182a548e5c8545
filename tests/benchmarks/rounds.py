"""Rounds in which sides take turns, and what they measured."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from side import LaunchFailedError, Side

Sample = Mapping[str, float]
Request = tuple[Hashable, ...]


@dataclass
class Measured:
    """What one side answered to one request. ``samples`` has an entry for each round, None where the launch failed."""

    samples: list[Sample | None] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def median(self, what: str) -> float:
        """Nan if no launch succeeded."""
        return _median([sample[what] for sample in self.samples if sample])

    def ratio_to(self, other: Measured, what: str) -> float:
        """Median of the rounds' ratios; nan if there is no round in which both succeeded."""
        both = zip(self.samples, other.samples, strict=True)
        return _median([mine[what] / theirs[what] for mine, theirs in both if mine and theirs])

    def share(self, what: str) -> str:
        """Of the launches that succeeded, how many gave something other than 0: ``"3 of 5"``."""
        told = [bool(sample[what]) for sample in self.samples if sample]
        return f"{sum(told)} of {len(told)}"

    @property
    def launches(self) -> str:
        """How many, and how many of them failed."""
        failed = len(self.failures)
        return f"{len(self.samples)}" + (f", {failed} failed" if failed else "")


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else float("nan")


Results = Mapping[Any, Mapping[str, Measured]]


def run(sides: Sequence[Side], requests: Sequence[Request], repeats: int) -> Results:
    """``repeats`` rounds; in each, every side answers every request once, in an order of sides that rotates.

    A side's first launch does not count: after it the fork server is warm, and every import is done.
    """
    results = {request: {side.name: Measured() for side in sides} for request in requests}
    for number in range(repeats):
        first = number % len(sides)
        for request in requests:
            for side in (*sides[first:], *sides[:first]):
                _try(side, request, results[request][side.name])
        print(f"round {number + 1} of {repeats} done", file=sys.stderr, flush=True)
    return results


def _try(side: Side, request: Request, measured: Measured) -> None:
    try:
        if not side.is_warm:
            side.ask(*request)
            side.is_warm = True
        measured.samples.append(side.ask(*request))
    except LaunchFailedError as error:
        measured.samples.append(None)
        measured.failures.append(str(error))
        print(f"{side.name}, {request}: {error}", file=sys.stderr, flush=True)


def failures(results: Results, labels: Mapping[str, str]) -> list[str]:
    """One line for each launch that gave no sample."""
    return [
        f"failed: {labels[name]}, {' '.join(map(str, request))} ranks: {why}"
        for request, by_side in results.items()
        for name, measured in by_side.items()
        for why in measured.failures
    ]

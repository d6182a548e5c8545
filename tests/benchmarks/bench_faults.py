"""What a launcher is trusted with, accelerate's notebook_launcher and ours side by side in one run.

    python tests/benchmarks/bench_faults.py [--repeats 5]

How soon the cell has the error of a rank, whether lines of many ranks arrive whole and how fast, and how much memory a
large tensor argument takes. The sides take turns; every ratio is taken within a round, then the median over the rounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Final

from machine import load, machine_facts
from rounds import Measured, Results, failures, run
from side import all_sides

SCRIPT: Final = "fault_sides.py"
LABELS: Final = {"accelerate": "accelerate", "forkserver": "nbstate, forkserver", "fork": "nbstate, fork"}
OURS: Final = ("forkserver", "fork")
REQUESTS: Final = [("raise", 2), ("raise", 4), ("lines", 4), ("memory", 2)]
SOON: Final = 0.1  # seconds from a raise to the error
ONE_COPY: Final = 1.1  # copies of a tensor argument; the tenth is what its way costs besides

Column = tuple[str, Callable[[Measured, Measured], str]]
COLUMNS: Final[dict[str, list[Column]]] = {
    "raise": [
        ("raise to error", lambda mine, _: f"{mine.median('seconds') * 1e3:.0f} ms"),
        ("x accelerate", lambda mine, peer: f"{mine.ratio_to(peer, 'seconds'):.3f}"),
        ("says what was raised", lambda mine, _: mine.share("told")),
    ],
    "lines": [
        ("lines a second", lambda mine, _: f"{mine.median('rate'):,.0f}"),
        ("x accelerate", lambda mine, peer: f"{mine.ratio_to(peer, 'rate'):.2f}"),
        ("lines intact", lambda mine, _: f"{mine.median('intact'):.2%}"),
    ],
    "memory": [
        ("extra copies of 600 MB", lambda mine, _: f"{mine.median('copies'):.2f}"),
        ("launch", lambda mine, _: f"{mine.median('seconds'):.1f} s"),
        ("x accelerate", lambda mine, peer: f"{mine.ratio_to(peer, 'seconds'):.2f}"),
    ],
}


def table(measure: str, results: Results) -> str:
    """The medians and ratios of one measure, as markdown."""
    columns = COLUMNS[measure]
    lines = [
        f"| ranks | side | launches | {' | '.join(title for title, _ in columns)} |",
        f"|---:|---|---:|{'---:|' * len(columns)}",
    ]
    for (measured_what, ranks), by_side in results.items():
        if measured_what != measure:
            continue
        for name, measured in by_side.items():
            cells = [str(ranks), LABELS[name], measured.launches]
            cells += [show(measured, by_side["accelerate"]) for _, show in columns]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def goals(results: Results) -> Iterator[str]:
    """For each goal, size and start method of ours: one line on whether it holds."""
    for (measure, ranks), by_side in results.items():
        for name in OURS:
            mine, who = by_side[name], f"{LABELS[name]}, {ranks} ranks"
            if measure == "raise":
                seconds = mine.median("seconds")
                yield _goal(seconds <= SOON, f"{who}, raise to error {seconds * 1e3:.0f} ms, at most {SOON * 1e3:.0f}")
            elif measure == "lines":
                intact = mine.median("intact")
                yield _goal(intact == 1, f"{who}, {intact:.2%} of the lines intact, all of them")
            else:
                copies = mine.median("copies")
                yield _goal(copies <= ONE_COPY, f"{who}, {copies:.2f} extra copies, at most one")


def _goal(holds: bool, text: str) -> str:
    return f"{'holds' if holds else 'DOES NOT HOLD'}: {text}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="rounds (default: 5)")
    options = parser.parse_args()
    before = load()
    with all_sides(SCRIPT, LABELS) as sides:
        results = run(sides, REQUESTS, options.repeats)
    print(f"{machine_facts(['torch', 'accelerate'])}; load before {before}, after {load()}\n")
    for measure in COLUMNS:
        print(table(measure, results), end="\n\n")
    print("Values are medians; each ratio is the median of the rounds' own ratios.\n")
    print("\n".join(f"- {line}" for line in (*goals(results), *failures(results, LABELS))))


if __name__ == "__main__":
    main()

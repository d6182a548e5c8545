"""How long a launch takes: the bare limit, accelerate's notebook_launcher and ours, side by side in one run.

    python tests/benchmarks/bench_launch.py [--repeats 10] [--ranks 2 8]

The sides take turns, one launch each a round, so that what else the machine does falls on all of them alike; and every
ratio is taken within a round, then the median over the rounds. Each side has a process of its own (``launch_sides``)
whose first launch does not count: after it the fork server is warm, and every import is done.
"""

from __future__ import annotations

import argparse
from typing import Final

from machine import load, machine_facts
from rounds import Results, failures, run
from side import all_sides

SCRIPT: Final = "launch_sides.py"
LABELS: Final = {
    "bare": "bare limit",
    "accelerate": "accelerate",
    "forkserver": "nbstate, forkserver",
    "fork": "nbstate, fork",
}
OURS: Final = ("forkserver", "fork")
OF_ACCELERATE: Final = 0.5
OF_BARE: Final = 1.5


def table(results: Results) -> str:
    """The medians and ratios, as markdown."""
    lines = [
        "| ranks | side | launches | wall | x bare | x accelerate | first barrier | x bare | x accelerate |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for (ranks,), by_side in results.items():
        for name, measured in by_side.items():
            cells = [str(ranks), LABELS[name], measured.launches]
            for what in ("wall", "barrier"):
                cells.append(f"{measured.median(what) * 1e3:.0f} ms")
                cells += [f"{measured.ratio_to(by_side[peer], what):.2f}" for peer in ("bare", "accelerate")]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def goals(results: Results) -> list[str]:
    """For each goal, size and start method of ours: one line on whether it holds."""
    return [
        line
        for (ranks,), by_side in results.items()
        for name in OURS
        for line in (
            _goal(ranks, name, "wall", by_side[name].ratio_to(by_side["accelerate"], "wall"), OF_ACCELERATE),
            _goal(ranks, name, "first barrier", by_side[name].ratio_to(by_side["bare"], "barrier"), OF_BARE),
        )
    ]


def _goal(ranks: int, name: str, what: str, ratio: float, limit: float) -> str:
    peer = "accelerate's" if what == "wall" else "the bare limit's"
    verdict = "holds" if ratio <= limit else "DOES NOT HOLD"
    return f"{verdict}: {LABELS[name]}, {ranks} ranks, {what} {ratio:.3f} of {peer}, at most {limit}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10, help="rounds (default: 10)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8], help="sizes of the world (default: 2 8)")
    options = parser.parse_args()
    before = load()
    with all_sides(SCRIPT, LABELS) as sides:
        results = run(sides, [(ranks,) for ranks in options.ranks], options.repeats)
    print(f"{machine_facts(['torch', 'accelerate'])}; load before {before}, after {load()}\n")
    print(table(results), end="\n\n")
    print("Times are medians; each ratio is the median of the rounds' own ratios.\n")
    print("\n".join(f"- {line}" for line in (*goals(results), *failures(results, LABELS))))


if __name__ == "__main__":
    main()

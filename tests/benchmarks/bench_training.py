"""What a training step costs: a loop by hand in plain torch, with accelerate, and with nbstate, in one run.

    python tests/benchmarks/bench_training.py [--repeats 5]

The same model, data and batches in each; the sides take turns, every ratio is taken within a round, then the median
over the rounds. And what it costs to read a state's attributes, which loops do all the time.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Final

from machine import load, machine_facts
from rounds import Results, failures, run
from side import all_sides

SCRIPT: Final = "training_sides.py"
LABELS: Final = {"plain": "plain torch", "accelerate": "accelerate", "nbstate": "nbstate"}
STEPS: Final = [("step", size, ranks) for size in ("tiny", "medium") for ranks in (1, 2)]
READS: Final = ("reads", "", 2)
NAMES: Final = {
    "is_main_process": "`accelerator.is_main_process`",
    "end_of_dataloader": "`gradient_state.end_of_dataloader`",
    "PartialState": "`PartialState()`",
}
TINY: Final = 1.2  # times the plain loop
THIRD: Final = 1 / 3  # of accelerate's


def steps_table(results: Results) -> str:
    """Time per step, as markdown."""
    lines = ["| model | ranks | side | a step | x plain |", "|---|---:|---|---:|---:|"]
    for request in STEPS:
        _, size, ranks = request
        by_side = results[request]
        for name, measured in by_side.items():
            micro = measured.median("seconds") * 1e6
            ratio = measured.ratio_to(by_side["plain"], "seconds")
            lines.append(f"| {size} | {ranks} | {LABELS[name]} | {micro:,.0f} us | {ratio:.2f} |")
    return "\n".join(lines)


def reads_table(results: Results) -> str:
    """Time per read, as markdown."""
    lines = ["| read | accelerate | nbstate | ratio |", "|---|---:|---:|---:|"]
    theirs, ours = (results[READS][side] for side in ("accelerate", "nbstate"))
    for name, shown in NAMES.items():
        times = " | ".join(f"{side.median(name) * 1e9:,.0f} ns" for side in (theirs, ours))
        lines.append(f"| {shown} | {times} | {ours.ratio_to(theirs, name):.2f} |")
    return "\n".join(lines)


def goals(results: Results) -> Iterator[str]:
    """For each goal one line on whether it holds."""
    for request in STEPS:
        _, size, ranks = request
        by_side = results[request]
        ratio = by_side["nbstate"].ratio_to(by_side["plain"], "seconds")
        if size == "tiny":
            yield _goal(ratio <= TINY, f"tiny model, {ranks} ranks: {ratio:.2f} of the plain loop, at most {TINY}")
        peer = by_side["nbstate"].ratio_to(by_side["accelerate"], "seconds")
        yield _goal(peer < 1, f"{size} model, {ranks} rank(s): {peer:.2f} of accelerate's step, less than 1")
    for name, shown in NAMES.items():
        ratio = results[READS]["nbstate"].ratio_to(results[READS]["accelerate"], name)
        yield _goal(ratio <= THIRD, f"{shown}: {ratio:.2f} of accelerate's, at most a third")


def _goal(holds: bool, text: str) -> str:
    return f"{'holds' if holds else 'DOES NOT HOLD'}: {text}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="rounds (default: 5)")
    options = parser.parse_args()
    before = load()
    with all_sides(SCRIPT, LABELS) as sides:
        results = run(sides, [*STEPS, READS], options.repeats)
    print(f"{machine_facts(['torch', 'accelerate'])}; load before {before}, after {load()}\n")
    print(steps_table(results), end="\n\n")
    print(reads_table(results), end="\n\n")
    print("Values are medians; each ratio is the median of the rounds' own ratios.\n")
    print("\n".join(f"- {line}" for line in (*goals(results), *failures(results, LABELS))))


if __name__ == "__main__":
    main()

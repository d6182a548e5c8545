"""Launch after launch of 8 ranks in one kernel that prints from a thread and computes: nothing hangs, nothing grows."""

from __future__ import annotations

import ast

import pytest
from real_kernel import RealKernel

RANKS = 8
MEGABYTE = 2**20

SETUP = f"""
import os, threading, time
import psutil, torch
from nbstate import PartialState, notebook_launcher
import nbstate.launch.preflight as preflight
# the chattering thread would make preflight refuse a fork; here it only ever prints, which is what is tested
preflight._busy_looking_threads = lambda: []

stop = threading.Event()
def chatter():
    while not stop.is_set():
        print('.', end='', flush=True)
        time.sleep(0.002)

def meet():
    state = PartialState()
    state.wait_for_everyone()
    return state.process_index

def compute():
    x = torch.randn(200, 200, requires_grad=True)
    (x @ x).sum().backward()

def launch_times(number):
    good = 0
    for turn in range(number):
        compute()
        method = 'fork' if turn % 2 else 'forkserver'
        results = notebook_launcher(meet, num_processes={RANKS}, start_method=method, dashboard=False, timeout=60)
        good += results == list(range({RANKS}))
    return good

here = psutil.Process()
def files():
    for fd in os.listdir('/proc/self/fd'):
        try:
            yield os.readlink('/proc/self/fd/' + fd)
        except OSError:  # the listing's own
            pass
def held():
    # IPython's history opens its journal whenever it likes
    number = sum('history.sqlite' not in file for file in files())
    return number, here.num_threads(), len(here.children(recursive=True))

talker = threading.Thread(target=chatter)
talker.start()
"""

SETTLED = """
for _ in range(200):  # a thread that was joined still takes a moment to leave the system
    after = held()
    if after == before:
        break
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("launches", "growth"),
    [
        pytest.param(100, 30 * MEGABYTE, marks=pytest.mark.timeout(300)),
        pytest.param(1000, 30 * MEGABYTE, marks=[pytest.mark.long, pytest.mark.timeout(1800)]),
    ],
)
def test_launches_neither_hang_nor_grow_the_kernel(
    own_kernel: RealKernel, launches: int, growth: int, shown_at_the_end: dict[str, list[str]]
) -> None:
    """Case C36."""
    own_kernel.good(SETUP)
    own_kernel.good("launch_times(20)")
    own_kernel.good("before, memory = held(), [here.memory_info().rss]")
    good, seconds, step = 0, 0.0, launches // 10
    for _ in range(0, launches, step):
        reply = own_kernel.good(f"launch_times({step})", timeout=10.0 * step)
        good += int(reply.result)
        seconds += reply.seconds
        own_kernel.good("memory.append(here.memory_info().rss)")
    own_kernel.good(SETTLED)
    before, after = ast.literal_eval(own_kernel.good("before, after").result)
    memory = ast.literal_eval(own_kernel.good("memory").result)
    own_kernel.good("stop.set(); talker.join()")
    shown_at_the_end[f"{launches} launches of {RANKS} ranks in one kernel"] = [
        f"{seconds / launches * 1e3:.0f} ms each; files, threads, processes before {before}, after {after}",
        "memory in MB: " + " ".join(f"{rss / MEGABYTE:.0f}" for rss in memory),
    ]
    assert good == launches
    assert after == before
    assert memory[-1] - memory[0] < growth

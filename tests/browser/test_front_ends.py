"""The dashboard where people open it: JupyterLab and Notebook 7, with ipykernel 7.4 and 7.3.

``tests/ipykernel-older`` installs the older ipykernel into a directory of its own; ``tests/run`` calls it.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from .conftest import Watch
from .lab import Lab, Notebook

pytestmark = pytest.mark.browser

OLDER = Path(os.environ.get("NBSTATE_OLDER_IPYKERNEL", Path(__file__).parents[2] / ".venv" / "ipykernel-7.3"))

# What the page shows a step at, and when the rank took it, both by the one clock that this machine has. Steps come
# at odd times, as in a training, so that none keeps pace with the refreshes.
STEPS = """
import random, time
import nbstate
from nbstate.telemetry import probe

def count(steps):
    nbstate.PartialState()
    odd, taken = random.Random(0), []
    for step in range(steps):
        time.sleep(odd.uniform(0.15, 0.35))
        probe.step(True)
        taken.append(time.time())
    time.sleep(0.5)
    return taken

[taken, _] = nbstate.notebook_launcher(count, (16,), num_processes=2)
"""

WATCH = """index => {
    window.shown = {};
    new MutationObserver(() => {
        const step = document.querySelector(".nbs tbody .nbs-c-step")?.textContent;
        if (step && !(step in window.shown)) window.shown[step] = Date.now() / 1000;
    }).observe(document.body, {subtree: true, childList: true, characterData: true});
}"""

BUSY = """
def wait():
    state = nbstate.PartialState()
    if state.process_index == 1:
        time.sleep(600)
    state.wait_for_everyone()

nbstate.notebook_launcher(wait, num_processes=2)
"""


@pytest.fixture(scope="module", params=["lab-7.4", "lab-7.3", "notebook-7.4"])
def front_end(
    request: pytest.FixtureRequest, watch: Watch, browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Notebook]:
    app, _, version = request.param.partition("-")
    packages = OLDER if version == "7.3" else None
    if packages is not None and not packages.exists():
        pytest.skip(f"no {packages}: `bash tests/ipykernel-older` installs it")
    with Lab(tmp_path_factory.mktemp(app), browser, app=app, packages=packages) as server:
        notebook = server.open(["import ipykernel, time\nimport nbstate\n%load_ext nbstate\nipykernel.__version__"])
        of_the_page_itself = len(notebook.complaints)
        notebook.run()
        expect(notebook.cell().locator(".jp-OutputArea-output")).to_contain_text(f"'{version}.")
        yield notebook
        assert notebook.complaints[of_the_page_itself:] == []
        notebook.close()
        watch.look()


def test_what_a_rank_writes_is_on_the_page_at_once(front_end: Notebook) -> None:
    front_end.put(STEPS)
    front_end.page.evaluate(WATCH)
    front_end.run()
    shown = {int(step): moment for step, moment in front_end.page.evaluate("window.shown").items() if step.isdecimal()}
    front_end.put("import json; json.dumps(taken)")
    front_end.run()
    said = front_end.cell().locator(".jp-OutputArea-output").text_content() or ""
    taken = json.loads(said.strip().strip("'"))
    late = [shown[step + 1] - moment for step, moment in enumerate(taken) if step + 1 in shown]
    assert len(late) > 10
    print(f"from the board to the page: {statistics.median(late) * 1e3:.0f} ms (median of {len(late)})")
    assert statistics.median(late) < 0.1, late


@pytest.mark.parametrize(("button", "ending"), [("Stop", "Stopped after"), ("Interrupt", "Interrupted after")])
def test_a_button_ends_a_busy_cell_within_a_second(front_end: Notebook, button: str, ending: str) -> None:
    took = []
    for _ in range(3):
        front_end.put(BUSY)
        front_end.start()
        expect(front_end.dashboard().get_by_text("1 of 2", exact=True)).to_be_visible(timeout=30_000)
        assert front_end.busy()
        took.append(front_end.press(button))
        expect(front_end.picture()).to_contain_text(ending)
    # The median: one click may meet a machine that is busy with something else.
    assert statistics.median(took) < 1.0, took

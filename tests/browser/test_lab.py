"""The dashboard in a real JupyterLab: real kernels, real ranks, a real page.

One notebook is trained in and reopened (``trained``); all other tests share a second one and its kernel (``notebook``),
each with a cell of its own. What they look like at the end of each step is left in ``screenshots/``. The README's
picture is one of these, looked at and copied by hand::

    pytest tests/browser -k screenshot && cp screenshots/readme.png notebooks/dashboard.png
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from .lab import Lab, Notebook

pytestmark = pytest.mark.browser

QUICKSTART = Path(__file__).parents[2] / "notebooks" / "01_quickstart.ipynb"
SETUP = "import time\nimport nbstate\n%load_ext nbstate"

LATE = """
def meet(wait):
    state = nbstate.PartialState()
    if state.process_index == 1:
        time.sleep(wait)
    state.wait_for_everyone()

nbstate.notebook_launcher(meet, ({wait},), num_processes=2)
"""

# Rank 0 is in C++, where no KeyboardInterrupt arrives, and rank 1 will not have any.
STUBBORN = """
def meet():
    state = nbstate.PartialState()
    while state.process_index == 1:
        try:
            time.sleep(600)
        except KeyboardInterrupt:
            print("no")
    state.wait_for_everyone()

nbstate.notebook_launcher(meet, num_processes=2)
"""

BOOM = """
def train():
    state = nbstate.PartialState()
    print("rank", state.process_index, "is up")
    state.wait_for_everyone()
    if state.process_index == 1:
        raise ValueError("the loss is nan")
    state.wait_for_everyone()

nbstate.notebook_launcher(train, num_processes=2)
"""

# Digits on four ranks, the third of which has a slow epoch: a real wait in a real training.
FOR_THE_README = """
import torch
from sklearn.datasets import load_digits

digits = load_digits()
data = torch.utils.data.TensorDataset(torch.tensor(digits.data).float() / 16, torch.tensor(digits.target))

def train(epochs=7):
    accelerator = nbstate.Accelerator(gradient_accumulation_steps=4)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        if accelerator.process_index == 2:
            time.sleep(0.02 * epoch)
            if epoch == epochs - 1:
                print("writing samples to a slow disk")
                time.sleep(60)
        accelerator.wait_for_everyone()
        accelerator.print(f"epoch {epoch}  step {(epoch + 1) * len(loader)}  loss {loss.item():.3f}")

nbstate.notebook_launcher(train, num_processes=4)
"""

# For every text in a dashboard: its contrast, as WCAG 2.2 defines it. Surfaces may be translucent.
CONTRASTS = """root => {
    const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
    const rgba = (colour) => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = colour;
        canvas.fillRect(0, 0, 1, 1);
        const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
        return [r, g, b, a / 255];
    };
    const over = (top, ground) => [0, 1, 2].map((i) => top[i] * top[3] + ground[i] * (1 - top[3])).concat(1);
    const surface = (node) => {
        if (!node) return [255, 255, 255, 1];
        const own = rgba(getComputedStyle(node).backgroundColor);
        return own[3] === 1 ? own : over(own, surface(node.parentElement));
    };
    const light = (colour) => {
        const part = (value) => (value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4);
        return 0.2126 * part(colour[0]) + 0.7152 * part(colour[1]) + 0.0722 * part(colour[2]);
    };
    const found = {};
    for (const node of root.querySelectorAll("*")) {
        const own = [...node.childNodes].filter((child) => child.nodeType === 3);
        const text = own.map((child) => child.data.trim()).join("");
        if (!text || !node.checkVisibility() || node.closest("[aria-disabled]")) continue;
        const ground = surface(node);
        const [a, b] = [light(over(rgba(getComputedStyle(node).color), ground)), light(ground)];
        found[`${node.className}: ${text}`] = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    }
    return found;
}"""


# The inline styles of a piece of html as a browser reads them, before any cleaning.
STYLES = """html => {
    const page = new DOMParser().parseFromString(html, "text/html");
    return [...page.querySelectorAll("[style]")].map((node) => node.style.cssText);
}"""


def ours(complaints: list[str]) -> list[str]:
    """The errors in a console that our files or widgets are in."""
    return [text for text in complaints if any(word in text.lower() for word in ("nbs", "widget", "blob:", "comm"))]


def code_cells(path: Path) -> Iterator[tuple[int, str]]:
    """The code cells of a notebook: each one's place and source."""
    for index, cell in enumerate(json.loads(path.read_text())["cells"]):
        if cell["cell_type"] == "code":
            yield index, "".join(cell["source"])


@contextmanager
def window(notebook: Notebook, width: int, height: int) -> Iterator[None]:
    """Another size of the window, for as long as the block lasts."""
    before = notebook.page.viewport_size
    notebook.page.set_viewport_size({"width": width, "height": height})
    notebook.page.wait_for_timeout(300)  # Lab lays its panels out after a moment
    try:
        yield
    finally:
        if before is not None:
            notebook.page.set_viewport_size(before)


@dataclass
class Trained:
    """The quickstart, trained: the notebook, its launching cell, what the page showed, and the file saved after it."""

    notebook: Notebook
    cell: int
    seen: list[dict[str, Any]]
    saved: dict[str, Any]


@pytest.fixture(scope="module")
def trained(lab: Lab) -> Iterator[Trained]:
    notebook = lab.open(QUICKSTART)
    for cell, source in code_cells(QUICKSTART):
        if "notebook_launcher(" in source:
            break
        notebook.run(cell)
    notebook.watch(cell)
    notebook.start(cell)
    expect(notebook.dashboard(cell).locator(".nbs-sentence")).to_contain_text("training", timeout=60_000)
    notebook.page.wait_for_timeout(500)
    notebook.shot("training-light", cell)
    notebook.theme("Dark")
    notebook.shot("training-dark", cell)
    notebook.theme("Light")
    notebook.wait(cell)
    yield Trained(notebook, cell, notebook.seen(), notebook.save())
    notebook.close()


@pytest.fixture(scope="module")
def shared(lab: Lab) -> Iterator[Notebook]:
    notebook = lab.open([SETUP])
    notebook.run()
    yield notebook
    notebook.close()


@pytest.fixture
def notebook(shared: Notebook) -> Iterator[Notebook]:
    """A notebook whose kernel is idle and has nbstate loaded."""
    before = len(shared.complaints)
    yield shared
    if shared.busy():
        shared.page.evaluate("() => window.jupyterapp.commands.execute('notebook:interrupt-kernel')")
        shared.wait()
    assert ours(shared.complaints[before:]) == []


def test_the_table_changes_while_the_quickstart_trains(trained: Trained) -> None:
    while_busy = [shown for shown in trained.seen if shown["busy"] and shown["step"]]
    assert len({shown["step"][0] for shown in while_busy}) >= 3
    assert {flag for shown in while_busy for flag in shown["gradients"]} >= {"sync", "accumulate"}
    assert ours(trained.notebook.complaints) == []


def test_after_the_run_its_picture_stays_in_place_of_the_widget(trained: Trained) -> None:
    notebook, cell = trained.notebook, trained.cell
    notebook.shot("finished-light", cell)
    notebook.theme("Dark")
    notebook.shot("finished-dark", cell)
    notebook.theme("Light")
    picture = notebook.picture(cell)
    expect(picture).to_contain_text("Finished in")
    expect(picture.locator("table").first.locator("tbody tr")).to_have_count(2)
    expect(picture.get_by_role("img", name="last 48 steps: 25 synchronised")).to_have_count(2)
    expect(notebook.dashboard(cell)).to_have_count(0)
    expect(notebook.cell(cell).get_by_text("epoch 9:")).to_have_count(1)  # the lines are the cell's own
    assert notebook.broken() == []
    assert ours(notebook.complaints) == []


def test_a_saved_notebook_holds_pictures_only(trained: Trained) -> None:
    outputs = [output for cell in trained.saved["cells"] for output in cell.get("outputs", ())]
    shown = [set(output["data"]) for output in outputs if "nbs-picture" in str(output.get("data", {}).get("text/html"))]
    assert shown == [{"text/plain", "text/html"}]
    assert "widgets" not in trained.saved["metadata"]


@pytest.mark.parametrize("trusted", [True, False], ids=["trusted", "untrusted"])
def test_a_saved_notebook_shows_the_picture_to_another_kernel(trained: Trained, lab: Lab, trusted: bool) -> None:
    notebook, cell = trained.notebook, trained.cell
    path = notebook.path
    if not trusted:
        strangers = {**trained.saved, "cells": [dict(cell) for cell in trained.saved["cells"]]}
        strangers["cells"][0]["source"] = "# from someone else"
        path = lab.notebooks / "untrusted.ipynb"
        path.write_text(json.dumps(strangers))
    notebook.reopen(path)
    notebook.show(cell)
    picture = notebook.picture(cell)
    expect(picture).to_contain_text("Finished in", timeout=20_000)
    notebook.shot("trusted" if trusted else "untrusted", cell)
    # Who is trusted may have roles; both keep every style, or the picture would fall apart.
    assert (picture.get_attribute("role") == "group") is trusted
    [html] = [
        output["data"]["text/html"]
        for output in trained.saved["cells"][cell]["outputs"]
        if "text/html" in output.get("data", {})
    ]
    kept = picture.evaluate("root => [root, ...root.querySelectorAll('[style]')].map((node) => node.style.cssText)")
    assert kept == notebook.page.evaluate(STYLES, "".join(html))
    expect(notebook.cell(cell).locator(".jp-OutputArea")).not_to_contain_text("not found")
    assert ours(notebook.complaints) == []


def test_a_barrier_names_the_rank_it_waits_for(notebook: Notebook) -> None:
    notebook.put(LATE.format(wait=2.5))
    notebook.watch()
    notebook.start()
    dashboard = notebook.dashboard()
    expect(dashboard.get_by_text("1 of 2", exact=True)).to_be_visible(timeout=30_000)
    expect(dashboard.locator(".nbs-sentence")).to_contain_text("rank 1 is", timeout=10_000)
    notebook.shot("late-light")
    notebook.wait()
    waited = [shown for shown in notebook.seen() if shown["busy"] and shown["count"] == "1 of 2"]
    assert any("missing: rank 1 · waiting" in shown["barrier"] and "In[" in shown["barrier"] for shown in waited)
    assert any("late for barrier #1" in shown["verdict"] for shown in waited)
    expect(notebook.picture()).to_contain_text("2 of 2")
    assert notebook.broken() == []


def test_launches_too_short_to_be_drawn_end_as_pictures(notebook: Notebook) -> None:
    for _ in range(4):
        notebook.put(LATE.format(wait=0))
        notebook.watch()
        notebook.run()
        expect(notebook.picture()).to_contain_text("Finished in")
        expect(notebook.dashboard()).to_have_count(0)
        assert notebook.broken() == []
    notebook.put("import ipywidgets; len(ipywidgets.widgets.widget._instances)")
    notebook.run()
    expect(notebook.cell().locator(".jp-OutputArea-output")).to_have_text("0")


def test_screenshot_for_the_readme(notebook: Notebook) -> None:
    notebook.put(FOR_THE_README)
    with window(notebook, 1400, 1500):
        notebook.start()
        sentence = notebook.dashboard().locator(".nbs-sentence")
        expect(sentence).to_contain_text("rank 2 is 2.", timeout=60_000)
        notebook.shot("readme", scale=2)
        notebook.press("Stop")


def test_stop_ends_a_busy_cell_within_a_second(notebook: Notebook) -> None:
    took = []
    for _ in range(3):
        notebook.put(STUBBORN)
        notebook.start()
        expect(notebook.dashboard().get_by_text("1 of 2", exact=True)).to_be_visible(timeout=30_000)
        assert notebook.busy()
        took.append(notebook.press("Stop"))
        expect(notebook.picture()).to_contain_text("Stopped after")
    notebook.shot("stopped-light")
    # The median: one click may meet a machine that is busy with something else, a slow Stop is slow each time.
    assert statistics.median(took) < 1.0, took


def test_interrupt_is_a_keyboard_interrupt_in_the_cell(notebook: Notebook) -> None:
    notebook.put(LATE.format(wait=600))
    notebook.start()
    expect(notebook.dashboard().get_by_text("1 of 2", exact=True)).to_be_visible(timeout=30_000)
    notebook.press("Interrupt")
    expect(notebook.picture()).to_contain_text("Interrupted after")
    expect(notebook.cell().locator(".jp-OutputArea")).to_contain_text("KeyboardInterrupt")
    notebook.put(LATE.format(wait=0))
    notebook.run()
    expect(notebook.picture()).to_contain_text("Finished in")


def test_a_failed_rank_is_blamed_in_both_themes(notebook: Notebook) -> None:
    notebook.put(BOOM)
    notebook.run()
    picture = notebook.picture()
    expect(picture).to_contain_text("✕ failed Rank 1 raised ValueError: the loss is nan")
    expect(picture.locator("tbody tr", has_text="✕")).to_have_count(1)
    try:
        inks = {}
        for theme in ("Light", "Dark"):
            notebook.theme(theme)
            notebook.shot(f"failed-{theme.lower()}")
            inks[theme] = picture.evaluate("root => getComputedStyle(root).color")
            contrasts = picture.evaluate(CONTRASTS)
            assert len(contrasts) > 10
            assert {text: ratio for text, ratio in contrasts.items() if ratio < 4.5} == {}
        assert inks["Light"] != inks["Dark"]
    finally:
        notebook.theme("Light")


def test_in_a_narrow_page_tables_scroll_inside_the_picture(notebook: Notebook) -> None:
    notebook.put(BOOM)
    notebook.run()
    with window(notebook, 760, 900):
        notebook.shot("narrow-light")
        assert notebook.picture().evaluate("root => root.scrollWidth <= root.clientWidth")
        output = notebook.cell().locator(".jp-RenderedHTML")
        assert output.evaluate("node => node.scrollWidth <= node.clientWidth")
        box = notebook.picture().locator("div:has(> table)").first
        assert box.evaluate("box => [getComputedStyle(box).overflowX, box.scrollWidth > box.clientWidth]") == [
            "auto",
            True,
        ]

"""Notebooks with a dashboard, run by programs: they finish, and what is saved shows the last state (C34)."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from html import unescape
from pathlib import Path

import nbformat
import papermill
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook
from papermill.exceptions import PapermillExecutionError

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
VIEW = "application/vnd.jupyter.widget-view+json"
IT_HUNG = 90

Runner = Callable[[NotebookNode, Path], NotebookNode]


def with_nbclient(notebook: NotebookNode, path: Path) -> NotebookNode:
    """Run a notebook as ``nbconvert --execute --allow-errors`` does."""
    NotebookClient(notebook, timeout=IT_HUNG, kernel_name="python3", allow_errors=True).execute()
    nbformat.write(notebook, path)
    return nbformat.read(path, as_version=4)


def with_papermill(notebook: NotebookNode, path: Path) -> NotebookNode:
    """Run a notebook as papermill does, which saves after every cell and stops at the first that fails."""
    source = path.with_name("source.ipynb")
    nbformat.write(notebook, source)
    with contextlib.suppress(PapermillExecutionError):
        papermill.execute_notebook(
            str(source), str(path), kernel_name="python3", progress_bar=False, execution_timeout=IT_HUNG
        )
    return nbformat.read(path, as_version=4)


@pytest.fixture(params=[with_nbclient, with_papermill], ids=["nbclient", "papermill"])
def runner(request: pytest.FixtureRequest) -> Runner:
    """Each of the programs."""
    return request.param


def dashboards(notebook: NotebookNode) -> list[str]:
    """The html of each saved dashboard, which must be all there is of it: a saved view would need a saved widget."""
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            assert VIEW not in data, "a page that has no state for this view shows 'model not found' instead"
            if data.get("text/plain") == "nbstate dashboard":
                found.append(data["text/html"])
    return found


def text_in(html: str) -> str:
    """What a reader sees of a piece of html; cells of tables are set apart."""
    return unescape(re.sub(r"<[^>]*>", " ", html))


def cell_named(notebook: NotebookNode, name: str) -> NotebookNode:
    """A cell by its id."""
    return next(cell for cell in notebook.cells if cell["id"] == name)


def errors(notebook: NotebookNode) -> list[str]:
    """What the errors of all cells say."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return [output.evalue for output in outputs if output.output_type == "error"]


def text_of(cell: NotebookNode) -> str:
    """What a cell has printed."""
    return "".join(output["text"] for output in cell.outputs if output.output_type == "stream")


def check_quickstart(notebook: NotebookNode, epochs: int) -> None:
    """What a finished quickstart must hold."""
    assert not errors(notebook)
    [html] = dashboards(notebook)
    words = text_in(html).split()
    assert words[:3] == ["train", "2", "ranks"]
    assert "✓ Finished in" in " ".join(words)
    for rank in "01":
        assert f" {rank} cpu finished {47 * epochs} {epochs - 1} sync all_gather " in " ".join(words)
    assert text_of(cell_named(notebook, "launch")).splitlines()[-1].startswith(f"[0] epoch {epochs - 1}: ")
    assert "test images seen:      297 and 297" in text_of(cell_named(notebook, "results"))
    assert "same weights on both:  True" in text_of(cell_named(notebook, "results"))
    assert "what: FileNotFoundError" in text_of(cell_named(notebook, "error"))


def test_the_quickstart_runs_from_its_parameters(runner: Runner, tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOKS / "01_quickstart.ipynb", as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    [parameters] = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    assert parameters.source == "epochs = 10"
    parameters.source = "epochs = 1"
    check_quickstart(runner(notebook, tmp_path / "done.ipynb"), epochs=1)


def test_the_saved_quickstart_is_a_finished_one() -> None:
    notebook = nbformat.read(NOTEBOOKS / "01_quickstart.ipynb", as_version=4)
    nbformat.validate(notebook)
    check_quickstart(notebook, epochs=10)
    assert "accuracy above 0.9:    True" in text_of(cell_named(notebook, "results"))
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert [cell["id"] for cell in code if "nbval-ignore-output" in cell.metadata.get("tags", ())] == ["launch"]
    assert not [cell["id"] for cell in code if "execution" in cell.metadata], (
        "saved with timings: execute it with --ExecutePreprocessor.record_timing=False"
    )
    assert "widgets" not in notebook.metadata, (
        "saved with widgets nobody needs: execute it with --ExecutePreprocessor.store_widget_state=False"
    )
    assert notebook.metadata.kernelspec.name == "python3"
    assert not [o for c in code for o in c.outputs if o.get("name") == "stderr"]


FAILING = """def fail():
    state = nbstate.PartialState()
    if state.process_index == 1:
        raise ValueError("boom")
    state.wait_for_everyone()
"""


def test_a_notebook_that_fails_in_a_rank_has_the_error_and_the_last_state(runner: Runner, tmp_path: Path) -> None:
    cells = ["import nbstate", FAILING, "nbstate.notebook_launcher(fail, num_processes=2)"]
    notebook = new_notebook(cells=[new_code_cell(source) for source in cells])
    saved = runner(notebook, tmp_path / "done.ipynb")
    [error] = errors(saved)
    assert error.startswith("rank 1 raised ValueError: boom (In[2], line 4)\n")
    [html] = dashboards(saved)
    words = " ".join(text_in(html).split())
    assert "✕ failed Rank 1 raised ValueError: boom (In[2], line 4)" in words
    assert "✕ 1 cpu failed" in words

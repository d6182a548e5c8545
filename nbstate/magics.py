"""Floor 5, the face: ``%nbstate`` and ``%%launch``."""

from __future__ import annotations

import ast
import atexit
import builtins
import html
import sys
from types import ModuleType
from typing import Any

import torch
from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring
from IPython.display import display

from nbstate._version import __version__
from nbstate.launch.engines.local import warm_forkserver
from nbstate.launch.launcher import last_launch, notebook_launcher, stop_all
from nbstate.launch.shipping import install_sources
from nbstate.state import DEVICE_KINDS, AcceleratorState, GradientState, PartialState, device_count

__all__ = ["NbstateMagics", "load", "unload"]


@magics_class
class NbstateMagics(Magics):  # type: ignore[misc]
    """What ``%load_ext nbstate`` adds."""

    @magic_arguments()
    @line_magic
    def nbstate(self, line: str) -> None:
        """Show this kernel's states, its devices, and the last launch."""
        parse_argstring(self.nbstate, line)
        display(Overview())

    @magic_arguments()
    @argument(
        "-n", "--num-processes", type=int, default=None, help="Number of ranks (default: one per accelerator, else 2)."
    )
    @argument("--device", default="auto", help="Device kind, such as cpu or cuda (default: auto).")
    @argument("--precision", default="no", help="no, fp16, bf16 or fp8 (default: no).")
    @argument(
        "--accumulate", type=int, default=1, help="Gradient accumulation steps that an Accelerator in the cell takes."
    )
    @argument("--start-method", default="auto", help="auto, forkserver, fork or spawn (default: auto).")
    @argument("--threads", type=int, default=None, help="torch threads per rank (default: the cores shared out).")
    @argument("--timeout", type=float, default=None, help="Seconds that the launch may take (default: no limit).")
    @argument("--no-dashboard", action="store_true", help="Do not show the dashboard.")
    @cell_magic
    def launch(self, line: str, cell: str) -> None:
        """Run the cell's body in N ranks.

        Names of the notebook that the cell uses are visible in it, by value: the ranks work on copies, and what they
        assign stays with them. The value of the cell's last expression in each rank comes back, in rank order, as
        the variable ``results``.

        ::

            %%launch -n 2
            state = nbstate.PartialState()
            state.process_index * 10
        """
        options = parse_argstring(self.launch, line)
        if options.accumulate < 1:
            raise UsageError(f"--accumulate must be 1 or more; got {options.accumulate}")
        source = "\n" + self.shell.transform_cell(cell)  # the magic's own line is line 1 of the notebook's cell
        filename = self.shell.compile.cache(source, self.shell.execution_count, raw_code=source)
        self.shell.user_ns["results"] = notebook_launcher(
            launched_cell,
            (source, filename),
            kwargs=_names_for(source, self.shell),
            num_processes=options.num_processes,
            mixed_precision=options.precision,
            device=options.device,
            start_method=options.start_method,
            threads_per_rank=options.threads,
            timeout=options.timeout,
            dashboard=False if options.no_dashboard else "auto",
            env={"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": str(options.accumulate)} if options.accumulate > 1 else None,
        )


def _names_for(source: str, shell: Any) -> dict[str, Any]:
    """The notebook's names that a cell mentions; IPython's own (``In``, ``get_ipython``) are left out."""
    mentioned = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    hidden = shell.user_ns_hidden
    return {
        name: value
        for name, value in shell.user_ns.items()
        if name in mentioned and not (name in hidden and hidden[name] is value)
    }


def launched_cell(source: str, filename: str, /, **names: Any) -> Any:
    """Run a cell's body in a rank; returns the value of its last expression, or None.

    Parameters
    ----------
    source : str
        The body, as plain Python.
    filename : str
        What tracebacks call it.
    names : object
        What is visible in it.
    """
    install_sources({filename: source})
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins, **names}
    main = ModuleType("__main__")
    main.__dict__.update(namespace)
    sys.modules["__main__"] = main
    exec(compile(tree, filename, "exec"), main.__dict__)
    if not isinstance(last, ast.Expr):
        return None
    return eval(compile(ast.Expression(last.value), filename, "eval"), main.__dict__)


class Overview:
    """This kernel's states and devices, and the last launch; what ``%nbstate`` shows."""

    def rows(self) -> list[tuple[str, str]]:
        """Label and text of each line."""
        rows = [("nbstate", __version__), ("torch", torch.__version__), ("devices", _devices())]
        rows += [(cls.__name__, _one_line(cls)) for cls in (PartialState, AcceleratorState, GradientState)]
        launch = last_launch()
        rows.append(("last launch", "none" if launch is None else repr(launch)[1:-1]))
        return rows

    def __repr__(self) -> str:
        rows = self.rows()
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:<{width}}  {text}" for label, text in rows)

    def _repr_html_(self) -> str:
        style = "text-align:left;padding:2px 12px 2px 0;vertical-align:top"
        cells = "".join(
            f'<tr><th scope="row" style="{style}">{html.escape(label)}</th>'
            f'<td style="{style}">{html.escape(text)}</td></tr>'
            for label, text in self.rows()
        )
        return f"<table>{cells}</table>"


def _devices() -> str:
    found = [f"{count} {kind}" for kind in DEVICE_KINDS if kind != "cpu" and (count := device_count(kind)) > 0]
    return ", ".join(found) or "no accelerator; the CPU"


def _one_line(cls: type) -> str:
    """A singleton's state in one line, without building it."""
    if cls is not GradientState and not cls._shared_state:  # type: ignore[attr-defined]
        return "not built yet"
    return "; ".join(line.strip() for line in repr(cls()).splitlines() if line.strip())


def load(shell: Any) -> None:
    """Register the magics, and warm the fork server in the background."""
    shell.register_magics(NbstateMagics)
    atexit.register(stop_all)
    warm_forkserver()


def unload(shell: Any) -> None:
    """Take the magics away. The fork server stays: launches use it too."""
    atexit.unregister(stop_all)
    for kind, name in (("line", "nbstate"), ("cell", "launch")):
        shell.magics_manager.magics[kind].pop(name, None)

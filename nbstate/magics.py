"""Floor 5, the face: ``%nbstate`` and ``%%launch``."""

from __future__ import annotations

import argparse
import platform
import time
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Final

import psutil
import torch
from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring
from IPython.display import display

from nbstate._version import __version__
from nbstate.errors import ArgumentTypeError, ArgumentValueError, LaunchError
from nbstate.launch import witness
from nbstate.launch.doctor import Preflight, meet, preflight, render_rows
from nbstate.launch.engines.local import warm_forkserver
from nbstate.launch.launch import last_launch, unlisted
from nbstate.launch.launcher import notebook_launcher
from nbstate.launch.notebook import current_cell
from nbstate.launch.spec import PRECISIONS, START_METHODS
from nbstate.session.cell import cell_function
from nbstate.state import DEVICE_KINDS, AcceleratorState, GradientState, PartialState, device_count, memory
from nbstate.state.html import render_card

__all__ = ["Doctor", "NbstateMagics", "Overview", "load", "unload"]

_WORDS: Final = ("", "doctor", "stacks", "diagnose")
_STEPS_VARIABLE: Final = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"


def _count(text: str) -> int:
    """An option's value that is a whole number from 1 up."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def _seconds(text: str) -> float:
    """An option's value that is a time."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


@magics_class
class NbstateMagics(Magics):  # type: ignore[misc]
    """What ``%load_ext nbstate`` adds."""

    @magic_arguments()
    @argument("words", nargs="*", metavar="doctor | stacks | diagnose", help="What to show instead of the overview.")
    @argument("--native", action="store_true", help="With stacks: the C and C++ frames too. Needs py-spy.")
    @line_magic
    def nbstate(self, line: str) -> None:
        """Show this kernel's states, its devices, and the last launch. It builds no state that is not there.

        ``%nbstate doctor`` examines the kernel: may it fork, and if not, which cell or import spoilt it; versions,
        devices and free memory; a forked child and a launch of 2 ranks, each tried and timed.

        ``%nbstate stacks`` shows where each rank of the last launch is, also one that is stuck in C++; ranks whose
        stacks are equal are shown together. ``%nbstate diagnose`` says what is wrong with that launch, if anything is.
        Both are for a launch that runs beside the notebook (``block=False``), and neither disturbs it; the dashboard
        has the same for one that blocks its cell.
        """
        options = parse_argstring(self.nbstate, line)
        words = " ".join(options.words)
        if words not in _WORDS:
            accepted = ", ".join(filter(None, _WORDS))
            raise UsageError(f"%nbstate: {words!r} is not known; accepted: {accepted}, or nothing")
        if options.native and words != "stacks":
            raise UsageError("%nbstate: --native goes with stacks only")
        if words in ("", "doctor"):
            display(Doctor.examine() if words else Overview())
            return
        launch = last_launch()
        if launch is None:
            raise UsageError(f"%nbstate {words}: this kernel has launched nothing yet")
        display(launch.stacks(options.native) if words == "stacks" else launch.examine())

    @magic_arguments()
    @argument(
        "-n",
        "--num-processes",
        type=_count,
        metavar="N",
        help="How many ranks. Left out: one per accelerator, or 2 where there is none.",
    )
    @argument("--device", default="auto", choices=("auto", *DEVICE_KINDS), help="What the ranks compute on.")
    @argument("--precision", default="no", choices=PRECISIONS, help="The mixed precision that the states say.")
    @argument(
        "--accumulate", type=_count, metavar="STEPS", help="Gradient accumulation that an Accelerator() in it takes."
    )
    @argument("--start-method", default="auto", choices=START_METHODS, help="How a rank's process comes to be.")
    @argument("--threads", type=_count, metavar="N", help="torch's threads in each rank. Left out: the cores shared.")
    @argument("--timeout", type=_seconds, metavar="SECONDS", help="How long the launch may take. Left out: no limit.")
    @argument("--no-dashboard", action="store_true", help="Do not show the dashboard.")
    @cell_magic
    def launch(self, line: str, cell: str) -> None:
        """Run the cell's body in N ranks.

        The cell sees the notebook's names by value: each rank works on copies, and what it assigns stays with it.
        The value of the cell's last expression comes back from each rank, as the list ``results`` in rank order
        (None where the cell does not end in an expression).

        Magics and ``!commands`` do not work in it: a rank has no IPython.

        Example::

            %%launch -n 2
            state = nbstate.PartialState()
            state.process_index * 10

        and then ``results`` is ``[0, 10]``.
        """
        options = parse_argstring(self.launch, line)
        source = self._plain_python(line, cell)
        number = self._cell_number()
        filename = self.shell.compile.cache(source, number, raw_code=source)
        try:
            function, args = cell_function(
                source, filename, self.shell.user_ns, self.shell.user_ns_hidden, self.shell.compile.flags
            )
        except SyntaxError as error:
            wrong = f": {error.text.strip()}" if error.text else ""
            raise UsageError(f"%%launch: {error.msg} (In[{number}], line {error.lineno}){wrong}") from None
        try:
            self.shell.user_ns["results"] = notebook_launcher(
                function,
                args,
                num_processes=options.num_processes,
                mixed_precision=options.precision,
                device=options.device,
                start_method=options.start_method,
                threads_per_rank=options.threads,
                timeout=options.timeout,
                dashboard=False if options.no_dashboard else "auto",
                env={} if options.accumulate is None else {_STEPS_VARIABLE: str(options.accumulate)},
            )
        except (ArgumentValueError, ArgumentTypeError) as error:  # such as more ranks than devices
            raise UsageError(str(error)) from None

    def _cell_number(self) -> int:
        """The number of the cell that runs now."""
        shown = current_cell()
        return int(shown.strip("In[]")) if shown else int(self.shell.execution_count)

    def _plain_python(self, line: str, cell: str) -> str:
        """The cell with its magic as line 1, and a body without any IPython syntax."""
        body: str = self.shell.transform_cell(cell)
        if body.count("get_ipython()") > cell.count("get_ipython()"):
            raise UsageError("%%launch: a rank has no IPython, so magics, !commands and help? do not work in its cell")
        # IPython drops empty lines at the top; put back, they keep the notebook's line numbers true.
        lines = cell.splitlines()
        dropped = next((i for i, text in enumerate(lines) if text.strip()), 0)
        return f"%%launch {line}".rstrip() + "\n" * (1 + dropped) + body


class Overview:
    """This kernel's states and devices, and the last launch; what ``%nbstate`` shows."""

    def rows(self) -> dict[str, str]:
        """Label and text of each line."""
        launch = last_launch()
        return {
            "torch": torch.__version__,
            "devices": _devices(),
            **{cls.__name__: _one_line(cls) for cls in (PartialState, AcceleratorState, GradientState)},
            "last launch": "none" if launch is None else repr(launch).strip("<>").removeprefix("Launch of "),
        }

    def __repr__(self) -> str:
        rows = {"nbstate": __version__, **self.rows()}
        width = max(map(len, rows))
        return "\n".join(f"{label:<{width}}  {text}" for label, text in rows.items())

    def _repr_html_(self) -> str:
        return render_card("nbstate", __version__, self.rows())


@dataclass(frozen=True)
class Doctor:
    """What ``%nbstate doctor`` shows.

    Attributes
    ----------
    report : Preflight
        ``nbstate.preflight(canary=True)``.
    versions : str
        Of nbstate and what it stands on.
    memory : str
        Free and total memory of the machine and of the devices.
    launch : str
        How a launch of 2 ranks went.
    """

    report: Preflight
    versions: str
    memory: str
    launch: str

    @classmethod
    def examine(cls) -> Doctor:
        """Examine this kernel. Forks one child and launches 2 ranks."""
        report = preflight(canary=True)
        return cls(report, _versions(), _free_memory(report), _test_launch())

    def rows(self) -> dict[str, tuple[str, ...]]:
        """Label and text of each row; what to do comes last."""
        rows = self.report.rows()
        advice = rows.pop("what to do")
        return {
            "versions": (self.versions,),
            "memory": (self.memory,),
            **rows,
            "test launch": (self.launch,),
            "what to do": advice,
        }

    def __repr__(self) -> str:
        return render_rows({"doctor": (self.report.summary,), **self.rows()})

    def _repr_html_(self) -> str:
        rows = {label: "; ".join(lines) for label, lines in self.rows().items()}
        return render_card("nbstate doctor", self.report.summary, rows)


def _versions() -> str:
    found = [f"nbstate {__version__}", f"Python {platform.python_version()}"]
    for name in ("torch", "ipython", "ipykernel", "ipywidgets", "anywidget"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"{name} missing")
    return ", ".join(found)


def _free_memory(report: Preflight) -> str:
    """Free memory of the machine and of each device in use; that of others is not known without a context."""
    machine = psutil.virtual_memory()
    found = [f"machine {_gib(machine.available)} of {_gib(machine.total)} GiB free"]
    for use in report.devices:
        for index in range(use.count):
            taken, total = memory(f"{use.kind}:{index}")
            room = f"{_gib(total - taken)} of {_gib(total)} GiB free" if total else "not known before its first use"
            found.append(f"{use.kind}:{index} {room}")
    return ", ".join(found)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"


def _test_launch() -> str:
    """Launch 2 ranks on the CPU, which meet in a barrier. Twice: the first launch may have to wait for its server."""
    took = []
    for _ in range(2):
        began = time.monotonic()
        try:
            with unlisted():
                notebook_launcher(meet, num_processes=2, device="cpu", timeout=60.0, dashboard=False)
        except LaunchError as error:
            return f"failed: {str(error).splitlines()[0]}"
        took.append(1000 * (time.monotonic() - began))
    return f"2 ranks met in a barrier and returned within {took[0]:.0f} ms, and again within {took[1]:.0f} ms"


def _devices() -> str:
    found = [f"{count} {kind}" for kind in DEVICE_KINDS if kind != "cpu" and (count := device_count(kind)) > 0]
    return ", ".join(found) or "no accelerator; the CPU"


def _one_line(cls: type[PartialState | AcceleratorState | GradientState]) -> str:
    """A singleton in one line. To look must not build it."""
    if not cls._shared_state:
        return "not built"
    return repr(cls()).removeprefix(f"{cls.__name__}(").removesuffix(")")


def load(shell: Any) -> None:
    """Register the magics, watch for what spoils a fork, and warm the fork server in the background."""
    shell.register_magics(NbstateMagics)
    witness.watch(shell)
    warm_forkserver()


def unload(shell: Any) -> None:
    """Take the magics away. The fork server stays: launches use it too."""
    witness.unwatch()
    for kind, name in (("line", "nbstate"), ("cell", "launch")):
        shell.magics_manager.magics[kind].pop(name, None)
    shell.magics_manager.registry.pop(NbstateMagics.__name__, None)

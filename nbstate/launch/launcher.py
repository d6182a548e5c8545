"""notebook_launcher: check what was asked for, settle how, launch, and wait."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from nbstate.errors import ArgumentTypeError, ArgumentValueError, LaunchError, NestedLaunchError
from nbstate.launch.interrupts import Interrupts
from nbstate.launch.launch import Launch
from nbstate.launch.output import flush_c_streams
from nbstate.launch.preflight import Choice, choose_start_method
from nbstate.launch.spec import LaunchSpec
from nbstate.telemetry import probe

__all__ = ["notebook_launcher"]


def notebook_launcher(
    function: Callable[..., Any],
    args: tuple[Any, ...] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: int | str | None = None,
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    device: str = "auto",
    start_method: str = "auto",
    threads_per_rank: int | None = None,
    timeout: float | None = None,
    dashboard: bool | str = "auto",
    block: bool = True,
    env: Mapping[str, str] | None = None,
    engine: str = "local",
) -> Any:
    """Run a function on N ranks and bring its results back.

    Positional arguments stand in the order that users of accelerate's ``notebook_launcher`` know.

    Parameters
    ----------
    function : callable
        What each rank calls. It may be defined in a cell; its globals travel with it by value.
    args : tuple
        Its positional arguments.
    num_processes : int, optional
        Number of ranks. Left out: one per accelerator; 2 on a machine without any.
    mixed_precision : {"no", "fp16", "bf16", "fp8"}
        What every rank's ``AcceleratorState`` says.
    use_port : int, optional
        Port of the store where ranks find each other. Left out: any free one.
    master_addr : str
        Address of that store.
    node_rank, num_nodes, rdzv_backend, rdzv_endpoint, rdzv_conf, rdzv_id
        For more than one machine, which this version does not do.
    max_restarts : int
        How many times all ranks are started anew after one has failed. ``NBSTATE_ATTEMPT`` and torchrun's
        ``TORCHELASTIC_RESTART_COUNT`` tell a rank how many attempts there were before; the last failure is raised.
    monitor_interval : float
        Accepted for compatibility: nbstate learns of a rank's end at once, without polling.
    log_line_prefix_template : str, optional
        Put before each line of output; may hold ``${rank}``, ``${local_rank}``, ``${role_name}``.
        Left out: ``"[${rank}] "``.
    kwargs : dict, optional
        The function's keyword arguments.
    device : str
        ``"auto"`` takes the accelerator that is here, else the CPU; or name a kind, such as ``"cpu"`` or ``"cuda"``.
    start_method : {"auto", "forkserver", "fork", "spawn"}
        How a rank's process comes to be. ``auto`` takes forkserver, and says so if it cannot.
    threads_per_rank : int, optional
        torch's threads in each rank. Left out: ``OMP_NUM_THREADS``, or the cores shared out.
    timeout : float, optional
        Seconds that the whole launch may take, all attempts together.
    dashboard : bool or "auto"
        Whether to show the live dashboard. ``auto``: in a notebook.
    block : bool
        Wait for the results; otherwise return a ``Launch`` at once.
    env : dict of str to str, optional
        Environment variables to add in each rank.
    engine : {"local"}
        What makes the ranks.

    Returns
    -------
    list or Launch
        What each rank returned, in rank order; or the ``Launch`` if ``block`` is False.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError, NotImplementedError
        An argument is not acceptable; raised before any process starts.
    ShippingError
        The function, an argument or a result cannot travel; the text names it.
    RankError
        A rank failed. The text holds its traceback and what each other rank was doing.
    LaunchTimeoutError, LaunchStoppedError, KeyboardInterrupt
        The launch was ended from outside.

    Examples
    --------
    >>> from nbstate import PartialState, notebook_launcher
    >>> def train(scale):
    ...     state = PartialState()
    ...     return state.process_index * scale
    >>> notebook_launcher(train, (10,), num_processes=2, dashboard=False)
    [0, 10]
    """
    __tracebackhide__ = True  # its 24 arguments would be all that IPython shows
    if probe.attached() or "NBSTATE_LAUNCH" in os.environ:
        raise NestedLaunchError(
            f"rank {os.environ.get('RANK', '?')} asked for a launch; only the notebook itself can launch ranks"
        )
    try:
        spec = LaunchSpec.check(
            function,
            args,
            num_processes,
            mixed_precision,
            use_port,
            master_addr,
            node_rank,
            num_nodes,
            rdzv_backend,
            rdzv_endpoint,
            rdzv_conf,
            rdzv_id,
            max_restarts,
            monitor_interval,
            log_line_prefix_template,
            kwargs=kwargs,
            device=device,
            start_method=start_method,
            threads_per_rank=threads_per_rank,
            timeout=timeout,
            dashboard=dashboard,
            block=block,
            env=env,
            engine=engine,
        )
    except (ArgumentTypeError, ArgumentValueError, NotImplementedError) as error:
        raise error.with_traceback(None) from None  # where in our checks it was found helps nobody
    choice = choose_start_method(spec.start_method, spec.function, spec.args, spec.kwargs)
    _flush()
    for note in (*spec.notes, choice.note):
        if note:
            print(f"nbstate: {note}", flush=True)
    if block:
        return _run_to_the_end(spec, choice)
    with Interrupts() as interrupts:
        launch = Launch(spec, choice)
        interrupts.pass_on(launch.interrupt)
        launch.begin()
        threading.Thread(target=launch.wait, name="nbstate-settler", daemon=True).start()
    if interrupts.count:
        raise KeyboardInterrupt
    return launch


def _run_to_the_end(spec: LaunchSpec, choice: Choice) -> list[Any]:
    """Wait on the caller's thread; an interrupt ends the ranks, a second one ends them faster."""
    __tracebackhide__ = True
    interrupted = False
    with Interrupts() as interrupts:
        launch = Launch(spec, choice)
        interrupts.pass_on(launch.interrupt)
        try:
            launch.begin()
        except KeyboardInterrupt:  # here and below: from a handler that is not ours
            if not launch.begun:
                raise
            interrupted = True
            launch.interrupt()
        while True:
            try:
                launch.wait()
                break
            except KeyboardInterrupt:
                interrupted = True
                launch.interrupt()
    if interrupted or interrupts.count:
        raise KeyboardInterrupt
    try:
        return launch.results()
    except LaunchError as error:
        raise error.with_traceback(None) from error.__cause__


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    flush_c_streams()

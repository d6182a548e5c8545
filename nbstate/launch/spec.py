"""LaunchSpec: what a launch will be, decided and checked before any process exists.

Every bad argument is caught here. The errors say what was given and what is accepted.
"""

from __future__ import annotations

import inspect
import math
import numbers
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from nbstate.errors import ArgumentTypeError, ArgumentValueError
from nbstate.state import DEVICE_KINDS, device_count

__all__ = ["CPU_DEFAULT_RANKS", "LaunchSpec"]

PRECISIONS: Final = ("no", "fp16", "bf16", "fp8")
START_METHODS: Final = ("auto", "fork", "forkserver", "spawn")
ENGINES: Final = ("local", "ray", "elastic")
CPU_DEFAULT_RANKS: Final = 2
SHARE_VARIABLE: Final = "NBSTATE_SHARE_DEVICES"


@dataclass(frozen=True)
class LaunchSpec:
    """One run of a function on N ranks, as it was asked for. Build it with ``LaunchSpec.check``."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    num_processes: int
    mixed_precision: str
    port: int
    master_addr: str
    device: str
    start_method: str
    threads_per_rank: int
    timeout: float | None
    dashboard: bool | str
    block: bool
    env: Mapping[str, str]
    engine: str
    prefix: str
    max_restarts: int = 0
    notes: tuple[str, ...] = field(default=())

    @property
    def title(self) -> str:
        """What to call the function."""
        return function_name(self.function)

    @classmethod
    def check(
        cls,
        function: Any,
        args: Any = (),
        num_processes: Any = None,
        mixed_precision: Any = "no",
        use_port: Any = None,
        master_addr: Any = "127.0.0.1",
        node_rank: Any = 0,
        num_nodes: Any = 1,
        rdzv_backend: Any = "static",
        rdzv_endpoint: Any = "",
        rdzv_conf: Any = None,
        rdzv_id: Any = "none",
        max_restarts: Any = 0,
        monitor_interval: Any = 0.1,
        log_line_prefix_template: Any = None,
        *,
        kwargs: Any = None,
        device: Any = "auto",
        start_method: Any = "auto",
        threads_per_rank: Any = None,
        timeout: Any = None,
        dashboard: Any = "auto",
        block: Any = True,
        env: Any = None,
        engine: Any = "local",
    ) -> LaunchSpec:
        """Check every argument of ``notebook_launcher`` and settle its defaults.

        Raises
        ------
        ArgumentTypeError, ArgumentValueError
            An argument is not acceptable; the text names it, what was given and what is accepted.
        NotImplementedError
            The argument asks for something that this version does not do.
        """
        notes: list[str] = []
        args, kwargs = _check_call(function, args, kwargs)
        environment = _check_env(env)
        _check_many_nodes(num_nodes, node_rank, rdzv_backend, rdzv_endpoint, rdzv_conf, rdzv_id)
        _check_interval(monitor_interval)
        kind = _check_device(device)
        sharing = environment.get(SHARE_VARIABLE, os.environ.get(SHARE_VARIABLE, "")) in ("1", "true", "yes")
        ranks = _check_ranks(num_processes, kind, sharing, notes)
        return cls(
            function=function,
            args=args,
            kwargs=kwargs,
            num_processes=ranks,
            mixed_precision=_one_of(
                "mixed_precision", "no" if mixed_precision is None else mixed_precision, PRECISIONS
            ),
            port=_check_port(use_port),
            master_addr=_check_address(master_addr),
            device=kind,
            start_method=_one_of("start_method", start_method, START_METHODS),
            threads_per_rank=_check_threads(threads_per_rank, ranks, environment),
            timeout=_check_timeout(timeout),
            dashboard=_check_dashboard(dashboard),
            block=_check_bool("block", block),
            env=environment,
            engine=_check_engine(engine),
            prefix=_check_prefix(log_line_prefix_template),
            max_restarts=_check_restarts(max_restarts),
            notes=tuple(notes),
        )


def function_name(function: Any) -> str:
    """A name for any callable: a function's own, a partial's inner one, else its class's."""
    name = getattr(function, "__name__", None)
    if isinstance(name, str):
        return name
    inner = getattr(function, "func", None)
    return function_name(inner) if callable(inner) else type(function).__name__


def _one_of(name: str, value: Any, accepted: Sequence[str]) -> str:
    listed = ", ".join(repr(a) for a in accepted)
    value = getattr(value, "value", value)
    if not isinstance(value, str):
        raise ArgumentTypeError(f"{name} must be one of {listed}; got {value!r} of type {type(value).__name__}")
    if value not in accepted:
        raise ArgumentValueError(f"{name} must be one of {listed}; got {value!r}")
    return value


def _check_bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{name} must be True or False; got {value!r}")
    return value


def _whole(name: str, value: Any, accepted: str) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ArgumentTypeError(f"{name} must be {accepted}; got {value!r} of type {type(value).__name__}")
    return int(value)


def _check_call(function: Any, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if not callable(function):
        raise ArgumentTypeError(
            f"function must be something that can be called, such as a function defined in a cell; got {function!r}"
        )
    if not isinstance(args, (tuple, list)):
        raise ArgumentTypeError(
            f"args must be a tuple of the function's positional arguments, such as args=({args!r},); "
            f"got {args!r} of type {type(args).__name__}"
        )
    if kwargs is None:
        kwargs = {}
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise ArgumentTypeError(f"kwargs must be a dict with the function's keyword arguments; got {kwargs!r}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have none; the rank will tell
        return tuple(args), dict(kwargs)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ArgumentTypeError(
            f"{function_name(function)}{signature} cannot be called with args={tuple(args)!r} and "
            f"kwargs={dict(kwargs)!r}: {error}"
        ) from None
    return tuple(args), dict(kwargs)


def _check_env(env: Any) -> dict[str, str]:
    if env is None:
        return {}
    if not isinstance(env, Mapping) or not all(isinstance(k, str) and isinstance(v, str) for k, v in env.items()):
        raise ArgumentTypeError(f"env must be a dict of environment variables, str to str; got {env!r}")
    bad = [k for k, v in env.items() if not k or "=" in k or "\0" in k + v]
    if bad:
        raise ArgumentValueError(f"env has a name or value that no environment can hold: {bad[0]!r}")
    return dict(env)


def _check_many_nodes(num_nodes: Any, node_rank: Any, backend: Any, endpoint: Any, conf: Any, run_id: Any) -> None:
    nodes = _whole("num_nodes", num_nodes, "a whole number of machines, 1 or more")
    if nodes < 1:
        raise ArgumentValueError(f"num_nodes must be 1 or more; got {nodes}")
    if nodes > 1:
        raise NotImplementedError(f"num_nodes={nodes}: this version launches on one machine only (num_nodes=1)")
    if _whole("node_rank", node_rank, "a whole number, 0 on the first machine") != 0:
        raise ArgumentValueError(f"node_rank must be 0 when num_nodes is 1; got {node_rank}")
    _one_of("rdzv_backend", backend, ("static", "c10d"))
    for name, value, default in (("rdzv_endpoint", endpoint, ("", None)), ("rdzv_conf", conf, (None, {}))):
        if value not in default:
            raise NotImplementedError(
                f"{name}={value!r}: ranks on one machine find each other without it; leave it at {default[0]!r}"
            )
    if run_id is not None and not isinstance(run_id, str):
        raise ArgumentTypeError(f"rdzv_id must be a str; got {run_id!r}")


def _check_restarts(max_restarts: Any) -> int:
    restarts = _whole("max_restarts", max_restarts, "a whole number, 0 or more")
    if restarts < 0:
        raise ArgumentValueError(f"max_restarts must be 0 or more; got {restarts}")
    return restarts


def _check_interval(monitor_interval: Any) -> None:
    if isinstance(monitor_interval, bool) or not isinstance(monitor_interval, numbers.Real):
        raise ArgumentTypeError(f"monitor_interval must be a number of seconds; got {monitor_interval!r}")
    if not float(monitor_interval) > 0:
        raise ArgumentValueError(f"monitor_interval must be more than 0 seconds; got {monitor_interval!r}")


def _check_device(device: Any) -> str:
    """The device kind that ranks will use, as a row's name in the table of devices."""
    kinds = tuple(DEVICE_KINDS)
    kind = _one_of("device", device, ("auto", *kinds))
    if kind == "auto":
        return next((name for name in kinds if name != "cpu" and device_count(name) > 0), "cpu")
    if kind != "cpu" and device_count(kind) == 0:
        raise ArgumentValueError(f"device={kind!r}: this machine has no such device; 'cpu' works everywhere")
    return kind


def _check_ranks(num_processes: Any, kind: str, sharing: bool, notes: list[str]) -> int:
    if num_processes is None:
        if kind != "cpu":
            return device_count(kind)
        notes.append(
            f"no accelerator is used and num_processes was not given: launching {CPU_DEFAULT_RANKS} ranks on the CPU"
        )
        return CPU_DEFAULT_RANKS
    ranks = _whole("num_processes", num_processes, "a whole number of ranks, 1 or more, or None")
    if ranks < 1:
        raise ArgumentValueError(f"num_processes must be 1 or more, or None for one rank per device; got {ranks}")
    if kind != "cpu" and ranks > device_count(kind) and not sharing:
        raise ArgumentValueError(
            f"num_processes={ranks}, but this machine has {device_count(kind)} {kind} device(s). Ask for at most "
            f"{device_count(kind)}, for device='cpu', or let ranks share devices with env={{'{SHARE_VARIABLE}': '1'}}"
        )
    return ranks


def _check_port(port: Any) -> int:
    """0 stands for "any free port"."""
    if port is None:
        return 0
    if isinstance(port, str) and port.isdecimal():
        port = int(port)
    port = _whole("use_port", port, "a port number from 1 to 65535, 0 or None for any free one")
    if not 0 <= port <= 65535:
        raise ArgumentValueError(f"use_port must lie between 0 and 65535 (0 or None: any free one); got {port}")
    return int(port)


def _check_address(address: Any) -> str:
    if not isinstance(address, str) or not address:
        raise ArgumentTypeError(f"master_addr must be a host name or address, such as '127.0.0.1'; got {address!r}")
    return address


def _check_threads(threads: Any, ranks: int, env: Mapping[str, str]) -> int:
    if threads is not None:
        count = _whole("threads_per_rank", threads, "a whole number of threads, 1 or more, or None")
        if count < 1:
            raise ArgumentValueError(f"threads_per_rank must be 1 or more, or None; got {count}")
        return count
    asked = env.get("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", ""))
    if asked.isdecimal() and int(asked) > 0:
        return int(asked)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // ranks)


def _check_timeout(timeout: Any) -> float | None:
    if timeout is None:
        return None
    seconds = timeout.total_seconds() if hasattr(timeout, "total_seconds") else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, numbers.Real):
        raise ArgumentTypeError(f"timeout must be a number of seconds, a timedelta or None; got {timeout!r}")
    seconds = float(seconds)
    if not seconds > 0 or math.isnan(seconds):
        raise ArgumentValueError(f"timeout must be more than 0 seconds, or None for no limit; got {timeout!r}")
    return None if math.isinf(seconds) else seconds


def _check_dashboard(dashboard: Any) -> bool | str:
    if isinstance(dashboard, bool):
        return dashboard
    return _one_of("dashboard", dashboard, ("auto",))


def _check_engine(engine: Any) -> str:
    name = _one_of("engine", engine, ENGINES)
    if name != "local":
        raise NotImplementedError(f"engine={name!r}: this version has the engine 'local' only")
    return name


def _check_prefix(template: Any) -> str:
    if template is None:
        return "[${rank}] "
    if not isinstance(template, str):
        raise ArgumentTypeError(
            "log_line_prefix_template must be a str with ${rank}, ${local_rank} or ${role_name} in it, or None; "
            f"got {template!r}"
        )
    return template

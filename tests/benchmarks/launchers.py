"""The launchers that are compared, each called in the same way."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from typing import Any, Final

__all__ = ["LAUNCHERS", "Launcher", "state_of"]

Launcher = Callable[[Callable[..., Any], tuple[Any, ...], int], Any]


def accelerate(function: Callable[..., Any], args: tuple[Any, ...], ranks: int) -> Any:
    """The peer's notebook_launcher, with its defaults and a port that nobody has used."""
    from accelerate import notebook_launcher

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return notebook_launcher(function, args, num_processes=ranks, use_port=str(port))


def nbstate(start_method: str, function: Callable[..., Any], args: tuple[Any, ...], ranks: int) -> Any:
    """Ours."""
    from nbstate import notebook_launcher

    return notebook_launcher(
        function, args, num_processes=ranks, device="cpu", start_method=start_method, dashboard=False
    )


LAUNCHERS: Final[dict[str, Launcher]] = {
    "accelerate": accelerate,
    "forkserver": partial(nbstate, "forkserver"),
    "fork": partial(nbstate, "fork"),
}


def state_of(launcher: str) -> Any:
    """In a rank: the process state of whoever launched it."""
    if launcher == "accelerate":
        from accelerate import PartialState as TheirState

        # without cpu=True these would be N worlds of one rank each
        return TheirState(cpu=True)
    from nbstate import PartialState

    return PartialState()

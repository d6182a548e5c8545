"""How the ranks of one machine find each other: a store that rank 0 hosts, after it has come to be.

No process that forks may run a store's server: its thread can hold a libc lock at the moment of the fork, and the
child then hangs for ever in name resolution. So the kernel only binds the socket, which fixes the port without a
race, and rank 0 serves on it.

``init_process_group`` takes its store from torch's ``env://`` rendezvous, which is replaced here for our own world:
each process group that is built gets a prefix of its own in the store. Without it a second ``init_process_group``
in one run reads the addresses of the first, and hangs.
"""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from torch._C._distributed_c10d import PrefixStore, TCPStore

from nbstate.errors import ArgumentValueError

__all__ = ["Store", "bind", "join"]

_NAMES: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PATIENCE: Final = timedelta(seconds=60)


def bind(address: str, port: int, backlog: int) -> socket.socket:
    """Take the port on which rank 0 will host the store.

    Parameters
    ----------
    address : str
        Address of this machine; loopback for a launch that stays on it.
    port : int
        0 for any free one.
    backlog : int
        How many ranks may knock at once.

    Raises
    ------
    ArgumentValueError
        The address is not this machine's, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(max(16, backlog))
    except OSError as error:
        listener.close()
        asked = f"use_port={port}: port {port} of" if port else f"master_addr={address!r}: a port of"
        raise ArgumentValueError(
            f"{asked} {address} cannot be had ({error.strerror}); "
            "leave use_port out to get any free one, or name another"
        ) from error
    return listener


@dataclass
class Store:
    """This rank's way to the store of its launch."""

    rank: int
    world_size: int
    address: str
    port: int
    server: TCPStore | None
    client: TCPStore | None = None
    groups: int = 0

    def next_prefix(self, timeout: timedelta) -> PrefixStore:
        """The store for the next process group of the whole world."""
        self.groups += 1
        store = self.server or self.client
        if store is None:
            store = self.client = TCPStore(
                self.address, self.port, self.world_size, is_master=False, timeout=timeout, wait_for_workers=False
            )
        store.set_timeout(timeout)
        return PrefixStore(f"nbstate/{self.groups}", store)


def join(rank: int, world_size: int, listener: int | None) -> None:
    """Prepare this rank's way to the store; on rank 0 (the one with the listener), serve it."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    server = None
    if listener is not None:
        server = TCPStore(
            address,
            port,
            world_size,
            is_master=True,
            timeout=_PATIENCE,
            wait_for_workers=False,
            master_listen_fd=listener,
        )
    _serve_env_rendezvous(Store(rank, world_size, address, port, server))


def _serve_env_rendezvous(store: Store) -> None:
    # torch.distributed.rendezvous is also the name of a function, hence the import by name
    handlers = getattr(importlib.import_module("torch.distributed.rendezvous"), "_rendezvous_handlers", None)
    if handlers is None:  # torch moved its table: env:// then goes to the store without prefixes
        return
    plain = handlers["env"]
    ours = {name: os.environ[name] for name in _NAMES}

    def rendezvous(url: str, timeout: timedelta = _PATIENCE, **options: Any) -> Iterator[tuple[Any, int, int]]:
        if "?" in url or any(os.environ.get(name) != value for name, value in ours.items()):
            yield from plain(url, timeout=timeout, **options)
            return
        yield store.next_prefix(timeout), store.rank, store.world_size
        raise RuntimeError("env:// rendezvous cannot be done twice for one process group")

    handlers["env"] = rendezvous

"""Big tensors and arrays reach all ranks through one piece of shared memory, by value.

The problem: pickled, a tensor of 600 MB is copied into the pickle, into the pipe of each rank, and out of it again. And
pickle, which torch.save serves here, gives each view of a storage a storage of its own.

What does: the bytes of every large CPU storage (and of every large contiguous numpy array, and whatever else offers
pickle's out-of-band buffers) stay out of the pickle. They are written once into a file that has no name, whose
descriptor the ranks inherit, and each rank maps it privately, copy on write. Until a rank writes, all ranks read the
same pages, so a call costs one copy of its tensors however many ranks there are. What a rank writes, only it sees.

It is done for storages, not for tensors, and a storage is sent once: views that share one share one in the rank, and
parameters, sparse tensors and subclasses come out right since they are rebuilt over the same storages as ever. A
storage that is not in the CPU's memory goes through torch.save as before.

Two things differ from a tensor that the rank allocated itself, as they do after ``torch.load(mmap=True)``: its storage
cannot grow in place (``resize_``), and pinned memory arrives unpinned. numpy knows no storages: two arrays that share
memory in the kernel are two arrays in the rank.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import pickle
import tempfile
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch.storage import TypedStorage

from nbstate.launch.plan import OwnedFd

__all__ = ["BIG", "lay_out", "map_places", "raw_bytes", "reduce_storage"]

BIG: Final = 64 * 1024
"""Bytes from which on a buffer is shared. A place in the file costs at most a page, so it may be small."""

_ALIGNED: Final = 4096


def reduce_storage(obj: Any) -> Any:
    """How to pickle a torch storage, for ``Pickler.reducer_override``.

    Returns
    -------
    tuple or NotImplemented
        NotImplemented for what is no storage, or none in the CPU's memory.
    """
    if isinstance(obj, TypedStorage):
        # Made anew for each tensor that is pickled. What lies below is one object, which pickle sends once.
        untyped = obj._untyped_storage
        return (_as_dtype, (untyped, obj.dtype)) if _is_plain(untyped) else NotImplemented
    if isinstance(obj, torch.UntypedStorage) and _is_plain(obj):
        content = torch.empty(0, dtype=torch.uint8, device="cpu").set_(obj)
        return _storage, (pickle.PickleBuffer(content.numpy().data),)
    return NotImplemented


def _is_plain(storage: torch.UntypedStorage) -> bool:
    return storage.device.type == "cpu" and (storage.data_ptr() != 0 or storage.nbytes() == 0)


def _storage(content: Any) -> TypedStorage:
    """A storage over a mapped place, which it keeps alive; one of its own if the bytes came with the pickle.

    It is typed, since torch expects that where it rebuilds a tensor of one of its newer dtypes.
    """
    if not len(content):
        return _typed(torch.empty(0, device="cpu").untyped_storage(), torch.uint8)
    tensor = torch.frombuffer(content, dtype=torch.uint8)
    return _typed((tensor if isinstance(content, memoryview) else tensor.clone()).untyped_storage(), torch.uint8)


def _as_dtype(storage: TypedStorage, dtype: torch.dtype) -> TypedStorage:
    return _typed(storage._untyped_storage, dtype)


def _typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> TypedStorage:
    return TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def raw_bytes(buffer: pickle.PickleBuffer) -> memoryview | None:
    """The bytes of an out-of-band buffer, or None if it is small or in pieces and better stays in the pickle."""
    try:
        raw = buffer.raw()
    except BufferError:
        return None
    return raw if raw.nbytes >= BIG else None


def lay_out(blocks: Iterable[memoryview]) -> tuple[OwnedFd, tuple[tuple[int, int], ...]]:
    """Write blocks into a new file without a name.

    Parameters
    ----------
    blocks : iterable of memoryview
        Bytes, each contiguous and not empty.

    Returns
    -------
    tuple
        The file's descriptor, and ``(offset, length)`` in bytes of each block in it.

    Raises
    ------
    OSError
        There is no room.

    Examples
    --------
    >>> fd, places = lay_out([memoryview(b"one"), memoryview(b"two")])
    >>> [bytes(place) for place in map_places(fd.fd, places)]
    [b'one', b'two']
    >>> fd.close()
    """
    fd = OwnedFd(_nameless_file())
    places = []
    offset = 0
    for block in blocks:
        _write(fd.fd, block, offset)
        places.append((offset, block.nbytes))
        offset += -(-block.nbytes // _ALIGNED) * _ALIGNED
    _seal(fd.fd)
    return fd, tuple(places)


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("nbstate-tensors", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryDirectory(prefix="nbstate-") as private:
        return os.open(os.path.join(private, "tensors"), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)


def _write(fd: int, block: memoryview, offset: int) -> None:
    done = 0
    while done < block.nbytes:  # one call writes at most 2 GB
        done += os.pwrite(fd, block[done:], offset + done)


def _seal(fd: int) -> None:
    """Let nobody change the file any more, not even a rank's own code through the descriptor it inherits."""
    if hasattr(os, "memfd_create"):
        fcntl.fcntl(
            fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        )


def map_places(fd: int, places: Iterable[tuple[int, int]]) -> list[memoryview]:
    """Map a file privately, copy on write, and cut it into its blocks.

    The map stays as long as one of the blocks, or a tensor or array over it, does. It needs the descriptor no longer.

    Parameters
    ----------
    fd : int
        The file.
    places : iterable of tuple of int
        Offset and length of each block, in bytes.
    """
    whole = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY))
    return [whole[offset : offset + length] for offset, length in places]

"""What a rank says on its control channel, a type for each message, and the framing.

The channel is a socketpair that only the two processes hold, so the bytes on it are as trustworthy as the function
that the user asked to run. A frame is an 8-byte big-endian length and a pickle of one of these classes; the pickles
of the user's own objects inside are plain bytes here, unpacked later and one by one.
"""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass
from typing import Final

from nbstate.launch.report import ErrorReport

__all__ = ["Error", "Inbox", "Interrupted", "Message", "Result", "Unsendable", "encode"]

_HEADER: Final = struct.Struct(">Q")


@dataclass(frozen=True)
class Result:
    """The function returned; ``data`` is for ``shipping.unpack_result``."""

    data: bytes


@dataclass(frozen=True)
class Unsendable:
    """The function returned something that cannot be pickled."""

    type_name: str
    report: ErrorReport


@dataclass(frozen=True)
class Error:
    """The function raised."""

    report: ErrorReport


@dataclass(frozen=True)
class Interrupted:
    """The rank was interrupted and has unwound."""


Message = Result | Unsendable | Error | Interrupted


def encode(message: Message) -> bytes:
    """One frame."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(len(body)) + body


class Inbox:
    """Puts frames together from whatever pieces arrive."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, piece: bytes) -> list[Message]:
        """Add a piece; returns the messages that are complete by now."""
        self._buffer += piece
        messages: list[Message] = []
        while len(self._buffer) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._buffer)
            end = _HEADER.size + length
            if len(self._buffer) < end:
                break
            messages.append(pickle.loads(bytes(self._buffer[_HEADER.size : end])))
            del self._buffer[:end]
        return messages

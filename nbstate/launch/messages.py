"""What a rank says on its control channel, a type for each message, and the framing.

The channel is a socketpair that only the two processes hold, so the bytes on it are as trustworthy as the function
that the user asked to run. A frame is an 8-byte big-endian length and a pickle of one of these classes; the pickles
of the user's own objects inside are plain bytes here, unpacked later and one by one.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
import threading
from dataclasses import dataclass
from typing import Final

from nbstate.launch.report import ErrorReport

__all__ = ["Display", "Error", "Inbox", "Interrupted", "Message", "Outbox", "Result", "Unsendable", "encode"]

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


@dataclass(frozen=True)
class Display:
    """The function has displayed something. No last word: it goes on when the kernel answers with one byte."""

    content: str
    """Content of a Jupyter ``display_data`` message, as JSON."""
    update: bool


Message = Result | Unsendable | Error | Interrupted


def encode(message: Message | Display) -> bytes:
    """One frame."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(len(body)) + body


class Inbox:
    """Puts frames together from whatever pieces arrive."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, piece: bytes) -> list[Message | Display]:
        """Add a piece; returns the messages that are complete by now."""
        self._buffer += piece
        messages: list[Message | Display] = []
        while len(self._buffer) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._buffer)
            end = _HEADER.size + length
            if len(self._buffer) < end:
                break
            messages.append(pickle.loads(bytes(self._buffer[_HEADER.size : end])))
            del self._buffer[:end]
        return messages


class Outbox:
    """The rank's end of its channel. What is said from several threads does not mix.

    Parameters
    ----------
    fd : int
        The channel.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        self._last_word_said = False

    def show(self, content: str, update: bool) -> None:
        """Say ``Display``, and wait until the kernel has queued it behind what was printed before.

        After the last word nobody answers: the next byte from the kernel is the permission to leave.
        """
        # The channel breaks only if the kernel is gone, and then so is this rank.
        with self._lock, self._channel() as channel, contextlib.suppress(OSError):
            channel.sendall(encode(Display(content, update)))
            if not self._last_word_said:
                channel.recv(1)

    def say(self, message: Message) -> None:
        """Say the last word."""
        with self._lock, self._channel() as channel:
            self._last_word_said = True
            channel.sendall(encode(message))

    def _channel(self) -> socket.socket:
        channel = socket.socket(fileno=os.dup(self._fd))
        channel.setblocking(True)
        return channel

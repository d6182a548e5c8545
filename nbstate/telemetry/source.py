"""Where in the user's own code: the nearest line that is neither torch's nor ours, and how a notebook calls it."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Mapping
from types import CodeType, FrameType
from typing import Final

__all__ = ["caller", "is_user_file", "show_line"]

_HERE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STDLIB: Final = sysconfig.get_paths()["stdlib"] + os.sep
_NOT_THE_USERS: Final = (_HERE, _STDLIB, "<frozen ")
# Names of installed packages whose frames stand between a user's line and a collective.
_PACKAGES: Final = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")

_known: dict[str, bool] = {}

# What is known of a code object, by its id: itself, so that no other can take that id, and, if it is the user's, the
# line of each instruction that was asked for. Python finds a line by walking the code's table from its start, which
# takes 2 microseconds in a cell of a hundred lines; hashing a code object is no cheaper.
_places: dict[int, tuple[CodeType, dict[int, int] | None]] = {}
_MAX_PLACES: Final = 4096


def is_user_file(filename: str) -> bool:
    """Whether a code object's file is the user's own: a notebook cell, a script, a module on the path."""
    known = _known.get(filename)
    if known is None:
        known = not (filename.startswith(_NOT_THE_USERS) or any(part in filename for part in _PACKAGES))
        _known[filename] = known
    return known


def caller(depth: int = 1) -> tuple[str, int]:
    """File and line of the nearest user frame above the one that asks.

    Parameters
    ----------
    depth : int
        How many frames to leave out first.

    Returns
    -------
    tuple of (str, int)
        ``("", 0)`` if there is none.
    """
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        code = frame.f_code
        lines = (_places.get(id(code)) or _remember(code))[1]
        if lines is not None:
            at = frame.f_lasti
            line = lines.get(at)
            if line is None:
                line = lines[at] = frame.f_lineno or 0
            return code.co_filename, line
        frame = frame.f_back
    return "", 0


def _remember(code: CodeType) -> tuple[CodeType, dict[int, int] | None]:
    if len(_places) >= _MAX_PLACES:
        _places.clear()
    place = _places[id(code)] = code, {} if is_user_file(code.co_filename) else None
    return place


def show_line(filename: str, line: int, cells: Mapping[str, str] | None = None) -> str:
    """How a person calls a line: ``"In[5], line 14"`` for a cell, ``"train.py:14"`` for a file.

    Parameters
    ----------
    filename, line
        As a code object has them. The file may have lost its beginning (see ``Slot.write_text``).
    cells : mapping of str to str, optional
        File name of a cell to what the notebook calls it (``"In[5]"``).
    """
    if not filename:
        return ""
    for name, shown in (cells or {}).items():
        if name.endswith(filename):
            return f"{shown}, line {line}"
    return f"{os.path.basename(filename)}:{line}"

"""What a report does not carry to others: where things lie on this machine, and what it is called."""

from __future__ import annotations

import getpass
import os
import re
import socket
import sysconfig
from collections.abc import Callable
from typing import Final

__all__ = ["without_machine"]

# A path from the root on, of two parts or more. Not inside an address of the web, nor inside another path.
_PATH: Final = re.compile(r"(?<![\w.:/~-])/(?:[\w.+@=-]+/)+[\w.+@=-]*")
_PACKAGES: Final = ("/site-packages/", "/dist-packages/", "/python3/")
_STDLIB: Final = sysconfig.get_paths()["stdlib"] + "/"
_SHORT: Final = 4  # letters: a name of a machine or a user that is no longer may be a word of the text
_NOBODYS: Final = frozenset({"admin", "colab", "jovyan", "jupyter", "localhost", "runner", "ubuntu", "vscode"})


def without_machine(folder_exists: Callable[[str], bool] = os.path.isdir) -> Callable[[str], str]:
    """Make a function that takes host name, user name and paths of this machine out of a text.

    Of a path what says something is left: from the folder of installed packages on, or its last part. Names are taken
    out as whole words, if they are long enough to be nobody else's.

    Parameters
    ----------
    folder_exists : callable
        Whether there is a folder: a path is one of this machine's if its first folder is.

    Examples
    --------
    >>> clean = without_machine(folder_exists=lambda folder: folder == "/srv")
    >>> clean('File "/srv/ann/env/site-packages/torch/nn.py", /srv/ann/train.py, /v1/models/list')
    'File "torch/nn.py", train.py, /v1/models/list'
    """
    names = _names()

    def shorten(match: re.Match[str]) -> str:
        path = match[0]
        if not folder_exists("/" + path.split("/", 2)[1]):
            return path
        for folder in _PACKAGES:
            if folder in path:
                return path.rpartition(folder)[2]
        if path.startswith(_STDLIB):
            return path[len(_STDLIB) :]
        return path.rstrip("/").rpartition("/")[2]

    def clean(text: str) -> str:
        text = _PATH.sub(shorten, text)
        return names.sub("…", text) if names else text

    return clean


def _names() -> re.Pattern[str] | None:
    host = socket.gethostname()
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # an id without a name
        user = ""
    told = {name for name in (host, host.partition(".")[0], user) if len(name) > _SHORT} - _NOBODYS
    words = "|".join(re.escape(name) for name in sorted(told, key=len, reverse=True))
    return re.compile(rf"(?<![\w-])(?:{words})(?![\w-])") if words else None

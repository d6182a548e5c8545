"""Directories that are whole or not there.

A checkpoint is written into a hidden directory beside its target and takes the target's name when it is whole::

    .name.new    being written; whole once its manifest is in it
    name         the last good one
    .name.old    the one before, from the moment its name is needed until the new one has it
    .name.gone   being deleted

A directory cannot be replaced by another in one step everywhere, so there are two renames, and a process killed
between them leaves no ``name`` but both others whole. ``heal`` then finishes what was begun. Every file and directory
is flushed to the disk before the rename that makes it count.

Files of the target that no checkpoint wrote (a log, a notebook) are the user's and are carried over.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

from nbstate.errors import ArgumentValueError, CheckpointError

__all__ = [
    "PREFIX",
    "begin",
    "commit",
    "heal",
    "heal_folder",
    "is_whole",
    "numbered",
    "prune",
    "read_manifest",
    "sync",
    "write_file",
]

MANIFEST: Final = "checkpoint.json"
PREFIX: Final = "checkpoint_"


def beside(target: Path, what: str) -> Path:
    return target.with_name(f".{target.name}.{what}")


def sync(path: Path) -> None:
    """Flush a file's content, or a directory's list of names, to the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def write_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file so that under its name there is the old content or the whole new one, whatever happens.

    Parameters
    ----------
    path : Path
        The file; its directory exists.
    write : callable
        Is given the open file.
    """
    unfinished = beside(path, f"{os.getpid()}.new")
    try:
        with open(unfinished, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def read_manifest(place: Path) -> dict[str, Any] | None:
    """What a checkpoint says about itself; None if it has no manifest or not all of its files."""
    try:
        manifest = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
        sizes: dict[str, int] = manifest["files"]
        whole = all((place / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return manifest if whole else None


def is_whole(place: Path) -> bool:
    """Whether a directory is a checkpoint with all its files."""
    return read_manifest(place) is not None


def begin(target: Path) -> Path:
    """The empty directory to write a new checkpoint into, after clearing up what a killed process left."""
    if target == Path.cwd() or target in Path.cwd().parents:
        raise ArgumentValueError(
            f"A checkpoint takes the place of its directory, so it cannot be {target}, where this process works."
        )
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file; a checkpoint is a directory.")
    heal(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    new = beside(target, "new")
    if new.exists():
        shutil.rmtree(new)
    new.mkdir()
    return new


def commit(target: Path, facts: Mapping[str, Any]) -> None:
    """Make what was written the target; from here on it is the last good one.

    Parameters
    ----------
    target : Path
        As given to ``begin``.
    facts : mapping
        What the manifest says besides the files and their sizes.
    """
    new, old = beside(target, "new"), beside(target, "old")
    sizes = {}
    for path in sorted(new.rglob("*")):  # hooks may have made directories in it, and do not flush what they write
        if path.is_file():
            sizes[path.relative_to(new).as_posix()] = path.stat().st_size
        sync(path)
    text = json.dumps({**facts, "files": sizes}, indent=1)
    write_file(new / MANIFEST, lambda file: file.write(text.encode()))
    sync(new)
    if target.exists():
        target.rename(old)
    new.rename(target)
    sync(target.parent)
    if old.exists():
        _put_away(old, target)


def heal(target: Path) -> None:
    """Finish a replacement that was cut short, so that the target is the last whole checkpoint if there is one."""
    new, old = beside(target, "new"), beside(target, "old")
    if not target.exists():
        if old.exists() and not is_whole(new):
            old.rename(target)
        elif is_whole(new):
            new.rename(target)
    if old.exists():
        _put_away(old, target)


def _put_away(old: Path, target: Path) -> None:
    """Delete a replaced checkpoint, after carrying over what is the user's own."""
    manifest = old / MANIFEST
    with contextlib.suppress(OSError, ValueError, KeyError):
        for name in json.loads(manifest.read_text(encoding="utf-8"))["files"]:
            (old / name).unlink(missing_ok=True)
    manifest.unlink(missing_ok=True)
    _carry_over(old, target)
    shutil.rmtree(old)


def _carry_over(old: Path, target: Path) -> None:
    for left in old.iterdir():
        here = target / left.name
        if not here.exists():
            left.rename(here)
        elif left.is_dir() and here.is_dir():
            _carry_over(left, here)


def numbered(folder: Path) -> list[tuple[int, Path]]:
    """The checkpoints that stand in a folder by number, lowest first, whole or not."""
    names = folder.iterdir() if folder.is_dir() else ()
    found = ((re.fullmatch(rf"{PREFIX}(\d+)", path.name), path) for path in names)
    return sorted((int(match[1]), path) for match, path in found if match)


def _interrupted(folder: Path) -> Iterator[Path]:
    for path in folder.glob(f".{PREFIX}*.new"):
        yield path.with_name(path.name[1 : -len(".new")])


def heal_folder(folder: Path) -> None:
    """Finish every replacement and deletion in a folder of numbered checkpoints that was cut short."""
    if not folder.is_dir():
        return
    for target in list(_interrupted(folder)):
        heal(target)
    for path in list(folder.glob(f".{PREFIX}*.gone")):
        shutil.rmtree(path)


def prune(folder: Path, limit: int) -> None:
    """Delete the oldest numbered checkpoints beyond a limit."""
    for _, path in numbered(folder)[:-limit]:
        gone = beside(path, "gone")
        # Out of sight in one step: a process killed while deleting must not leave half of one behind.
        path.rename(gone)
        shutil.rmtree(gone)

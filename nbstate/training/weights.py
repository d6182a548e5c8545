"""A model's weights, from the model into files and back.

Safetensors holds tensors by name and refuses two names for one piece of memory, which is how tied weights come. One
name is then kept, and the file's metadata says which others stand for it.
"""

from __future__ import annotations

import importlib
import json
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch

from nbstate.errors import ArgumentTypeError, ArgumentValueError, CheckpointError
from nbstate.training.parallelism import extract_model_from_parallel
from nbstate.training.storage import sync, write_file

__all__ = [
    "full_state_dict",
    "is_spread",
    "load_full_state_dict",
    "parse_size",
    "read_weights",
    "safe_or_plain",
    "save_object",
    "weight_files",
    "write_shards",
    "write_weights",
]

SAFE: Final = "model.safetensors"
PLAIN: Final = "pytorch_model.bin"
_UNITS: Final = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS_BINARY: Final = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def _safetensors() -> ModuleType | None:
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError:
        return None


def safe_or_plain(wanted: bool) -> bool:
    """Whether weights go into safetensors; says so once where that is wanted and cannot be."""
    if wanted and _safetensors() is None:
        warnings.warn(
            f"safetensors is not installed, so weights are saved by torch.save into {PLAIN}; "
            "pip install safetensors, or pass safe_serialization=False",
            stacklevel=4,
        )
        return False
    return wanted


def full_state_dict(model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
    """A model's whole state by the names of the user's own model, also if its parameters are spread over ranks.

    Parameters
    ----------
    model : torch.nn.Module
        Prepared or not.
    unwrap : bool
        Use the names that the user's own model has.

    Returns
    -------
    dict
        Of a model that is the same on every rank: its tensors, not copies. Of a sharded one: copies on the CPU, put
        together on the main process; empty on the others. That is a collective: every rank is to call it.
    """
    if is_spread(model):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        return dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)))
    own = extract_model_from_parallel(model, keep_torch_compile=False) if unwrap else model
    return dict(own.state_dict())


def is_spread(model: torch.nn.Module) -> bool:
    """Whether no rank has the whole of some parameter."""
    tensor = importlib.import_module("torch.distributed.tensor").DTensor
    return any(isinstance(parameter, tensor) for parameter in model.parameters())


def load_full_state_dict(model: torch.nn.Module, state: Mapping[str, Any], **options: Any) -> None:
    """Load what ``full_state_dict`` gave; every rank has the whole of it.

    Parameters
    ----------
    model : torch.nn.Module
        Prepared or not.
    state : mapping
        Tensors by the names of the user's own model.
    **options
        For the model's ``load_state_dict``: ``strict``, ``assign``.
    """
    if is_spread(model):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        strict = bool(options.get("strict", True))
        set_model_state_dict(model, dict(state), options=StateDictOptions(full_state_dict=True, strict=strict))
        return
    extract_model_from_parallel(model, keep_torch_compile=False).load_state_dict(state, **options)


def _untied(state: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors that share no memory, and which of the other names stands for which of them."""
    kept: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    name_of: dict[tuple[Any, ...], str] = {}
    storages: set[int] = set()
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentTypeError(
                f"Safetensors holds tensors only, and {name!r} is a {type(tensor).__name__}; "
                "pass safe_serialization=False."
            )
        storage = tensor.untyped_storage().data_ptr() if tensor.numel() else 0
        place = (tensor.device, storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if storage and place in name_of:
            aliases[name] = name_of[place]
            continue
        name_of[place] = name
        # A view into memory that another name has too: equal values, though not tied any more when read back.
        kept[name] = tensor.detach().clone() if storage in storages else tensor.detach()
        kept[name] = kept[name].contiguous()
        if storage:
            storages.add(storage)
    return kept, aliases


def write_weights(state: Mapping[str, Any], path: Path, safe: bool) -> None:
    """Write one file with a model's state, flushed to the disk.

    Parameters
    ----------
    state : mapping
        Tensors by name; shapes and types as they are.
    path : Path
        The file.
    safe : bool
        Safetensors; otherwise ``torch.save``.
    """
    if not safe:
        write_file(path, lambda file: torch.save(dict(state), file))
        return
    kept, aliases = _untied(state)
    _write_safe(kept, path, aliases)


def _write_safe(tensors: dict[str, torch.Tensor], path: Path, aliases: Mapping[str, str]) -> None:
    library = _safetensors()
    assert library is not None
    unfinished = path.with_name(f".{path.name}.new")
    try:
        library.save_file(tensors, str(unfinished), metadata={"format": "pt", **aliases})
        sync(unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def read_weights(path: Path, device: str = "cpu") -> dict[str, Any]:
    """Read what ``write_weights`` wrote, tied names included; of others' files those of the same two kinds."""
    if path.suffix != ".safetensors":
        return dict(torch.load(path, map_location=device, weights_only=True))
    if _safetensors() is None:
        raise CheckpointError(f"{path} needs safetensors to be read: pip install safetensors")
    with importlib.import_module("safetensors").safe_open(str(path), framework="pt", device=device) as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        metadata = file.metadata() or {}
    state.update({alias: state[name] for alias, name in metadata.items() if name in state and alias not in state})
    return state


def weight_files(folder: Path, number: int) -> tuple[Path, Path]:
    """Where the ``number``-th model of a checkpoint stands: as safetensors, and by ``torch.save``."""
    tail = f"_{number}" if number else ""
    return tuple(folder / f"{name.stem}{tail}{name.suffix}" for name in (Path(SAFE), Path(PLAIN)))  # type: ignore[return-value]


def save_object(obj: Any, path: Path, safe: bool = False) -> None:
    """Write an object into a file, whole or not at all; tensors by name into safetensors if ``safe``."""
    if safe and not isinstance(obj, Mapping):
        raise ArgumentTypeError(f"safe_serialization=True takes tensors by name, not a {type(obj).__name__}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    if safe and safe_or_plain(safe):
        write_weights(obj, path, safe=True)
    else:
        write_file(path, lambda file: torch.save(obj, file))


def parse_size(size: int | str) -> int:
    """Bytes.

    Examples
    --------
    >>> parse_size("10GB"), parse_size("1.5 MiB"), parse_size(20)
    (10000000000, 1572864, 20)
    """
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?B)?", str(size).strip().upper())
    if not match or float(match[1]) == 0:
        raise ArgumentValueError(f"A size is a number of bytes, or like '10GB' or '500MiB'; not {size!r}.")
    return int(float(match[1]) * {**_UNITS, **_UNITS_BINARY}[match[2] or ""])


def write_shards(state: Mapping[str, Any], folder: Path, limit: int, safe: bool) -> None:
    """Write a model's state into as few files as the limit allows, with an index if there are several.

    Parameters
    ----------
    state : mapping
        Tensors by name.
    folder : Path
        Where to; made if need be. What an earlier call left under these names is replaced or deleted.
    limit : int
        Bytes of tensors in a file; a larger tensor has a file of its own.
    safe : bool
        Safetensors; otherwise ``torch.save``.
    """
    kept, aliases = _untied(state)
    shards = _divide(kept, limit)
    stem, suffix = (SAFE if safe else PLAIN).split(".")
    names = [f"{stem}.{suffix}"]
    if len(shards) > 1:
        names = [f"{stem}-{number:05d}-of-{len(shards):05d}.{suffix}" for number in range(1, len(shards) + 1)]
    folder.mkdir(parents=True, exist_ok=True)
    where: dict[str, str] = {}
    for name, shard in zip(names, shards, strict=True):
        here = {alias: kept_name for alias, kept_name in aliases.items() if kept_name in shard}
        if safe:
            _write_safe(shard, folder / name, here)
        else:
            write_weights({**shard, **{alias: shard[tied] for alias, tied in here.items()}}, folder / name, safe=False)
        where.update(dict.fromkeys([*shard, *here], name))
    index = folder / f"{names[0] if len(shards) == 1 else f'{stem}.{suffix}'}.index.json"
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in kept.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=1)
        write_file(index, lambda file: file.write(text.encode()))
        names.append(index.name)
    for path in folder.iterdir():
        if re.fullmatch(rf"{stem}(-\d+-of-\d+)?\.{suffix}(\.index\.json)?", path.name) and path.name not in names:
            path.unlink()
    sync(folder)


def _divide(tensors: Mapping[str, torch.Tensor], limit: int) -> list[dict[str, torch.Tensor]]:
    shards: list[dict[str, torch.Tensor]] = [{}]
    room = limit
    for name, tensor in tensors.items():
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = limit
        shards[-1][name] = tensor
        room -= tensor.nbytes
    return shards

"""What a rank puts into a collective: bytes, shape and dtype, as the board shows them."""

from __future__ import annotations

from typing import Any, Final

import torch

__all__ = ["facts_of", "known", "remember", "shape_of", "size_of"]

# Size in bytes and text of a dense tensor, by dtype and shape. One text for all tensors alike, so that the board need
# not be written again where the text is the same object.
known: Final[dict[tuple[torch.dtype, torch.Size], tuple[int, str]]] = {}
_MAX_KNOWN: Final = 4096


def facts_of(part: Any) -> tuple[int, str]:
    """Bytes and text of what a rank puts in: ``(128, "4x8 float32")``."""
    return size_of(part), shape_of(part)


def remember(tensor: torch.Tensor) -> tuple[int, str]:
    """The same of a tensor, to be looked up in ``known`` from now on; nothing is known of a sparse one."""
    try:
        nbytes = tensor.nbytes
    except RuntimeError:  # a sparse tensor has no such number
        return 0, ""
    if len(known) >= _MAX_KNOWN:
        known.clear()
    return known.setdefault((tensor.dtype, tensor.shape), (nbytes, _text(tensor)))


def _text(tensor: torch.Tensor) -> str:
    sizes = "x".join(map(str, tensor.shape)) or "scalar"
    return f"{sizes} {str(tensor.dtype).removeprefix('torch.')}"


def size_of(part: Any) -> int:
    """Bytes of a tensor, or of a list of tensors.

    What is no tensor counts nothing: it is for the wrapped function to say what is wrong with its arguments.
    """
    if part is None:
        return 0
    try:
        if isinstance(part, list | tuple):
            return sum(item.nbytes for item in part)
        return int(part.nbytes)
    except (AttributeError, RuntimeError):
        return 0


def shape_of(part: Any) -> str:
    """Shape and dtype of a tensor; of a list of tensors that are alike also how many: ``"2 of 4x8 float32"``."""
    if isinstance(part, torch.Tensor):
        return (known.get((part.dtype, part.shape)) or remember(part))[1]
    if not isinstance(part, list | tuple) or not part or not all(isinstance(item, torch.Tensor) for item in part):
        return ""
    kinds = {shape_of(item) for item in part}
    return f"{len(part)} of {kinds.pop()}" if len(kinds) == 1 else f"{len(part)} tensors"

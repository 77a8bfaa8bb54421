"""How many elements a mask selects, where neither mask nor result has values.

``x[mask]`` has as many elements as the mask has true ones.  Who knows that number (from token
counts) says so around the code that selects, and shapes come out as with values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_known: list[int] = []
_next: list[int] = []


@contextlib.contextmanager
def reading(*values: int) -> Iterator[None]:
    """Integers that the host reads inside are these, one after the other."""
    before = _next.copy()
    _next[:] = values
    try:
        yield
    finally:
        _next[:] = before


@contextlib.contextmanager
def selecting(count: int) -> Iterator[None]:
    """Inside, every mask selects ``count`` elements, and an integer that the host reads is it."""
    _known.append(count)
    try:
        yield
    finally:
        _known.pop()


def expected() -> bool:
    """Whether anything inside was said of values."""
    return bool(_known or _next)


def shaped(func: Any, args: tuple) -> torch.Tensor | int | None:
    """Result of an operation whose shape or value is the known count; None for any other."""
    if not args or not isinstance(args[0], FakeTensor):
        return None
    source = args[0]
    if _next and func is torch.ops.aten._local_scalar_dense.default:
        return _next.pop(0)
    if not _known:
        return None
    count = _known[-1]
    if func is torch.ops.aten._local_scalar_dense.default and not source.dtype.is_floating_point:
        return count
    if func is torch.ops.aten.masked_select.default:
        return source.new_empty((count,))
    if func is torch.ops.aten.repeat_interleave.Tensor:
        return source.new_empty((count,))
    if func is torch.ops.aten.index.Tensor and _is_mask(args[1]):
        return source.new_empty((count, *source.shape[args[1][0].dim() :]))
    return None


def _is_mask(indices: Any) -> bool:
    return len(indices) == 1 and indices[0] is not None and indices[0].dtype is torch.bool

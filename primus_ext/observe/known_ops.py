"""The ops of calls that were classified before, by all that an op follows from.

A model's layers are alike, so nearly every call of a recording is one of a few hundred.  What
:mod:`classify` looks at is the operator, its arguments that are no tensors, and of tensors the
shape, the strides, the number format, how many bytes move, and whether two are the same object.
Collectives name their group as well: they are left out here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_iter

from primus_ext.trace import Op

_OF_GROUPS = frozenset({"c10d", "_c10d_functional", "primus_deep_ep"})
"""Namespaces whose ops depend on a process group."""
_TENSORS = frozenset({FakeTensor, torch.Tensor, torch.nn.Parameter})
_PLAIN = frozenset(
    {int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
ABSENT: Any = object()
"""Instead of an op: the call was not classified yet."""


class _NoKey(Exception):
    """An argument that is neither plain nor an ordinary tensor."""


class KnownOps:
    """What calls were classified as; the places of ops in the table of one recording."""

    def __init__(self) -> None:
        """Nothing is known."""
        self._found: dict[tuple, Op | None] = {}

    def get(self, key: tuple | None) -> Op | None:
        """The op under a key, None for no device work, or :data:`ABSENT`."""
        return ABSENT if key is None else self._found.get(key, ABSENT)

    def put(self, key: tuple | None, op: Op | None) -> None:
        """Remember an op."""
        if key is not None:
            self._found[key] = op


def key(func: Any, args: tuple, kwargs: dict[str, Any], produced: list[Any]) -> tuple | None:
    """What a call's op follows from; None where that is not known.

    Args:
        func: Operator.
        args: Its arguments.
        kwargs: By name.
        produced: Tensors in its result.
    """
    if func.namespace in _OF_GROUPS:
        return None
    found: list[Any] = [func, tuple(kwargs)]
    read: list[int] = []
    try:
        _describe(args, found, read)
        _describe(kwargs.values(), found, read)
        _describe(produced, found, [])
    except (_NoKey, RuntimeError):  # sparse tensors have no strides
        return None
    return tuple(found) if len(set(read)) == len(read) else None


def _describe(values: Iterable[Any], found: list[Any], read: list[int]) -> None:
    for value in values:
        kind = type(value)
        if kind in _TENSORS:
            size = value.numel() * value.element_size()
            moved = min(size, value.untyped_storage().nbytes())
            found.append((value.shape, value.stride(), value.dtype, moved))
            read.append(id(value))
        elif kind in _PLAIN:
            found.append(value)
        elif kind is bool or kind is float:  # True, 1 and 1.0 are equal as keys
            found.append((kind, value))
        elif kind is list or kind is tuple:
            inner: list[Any] = []
            _describe(value, inner, read)
            found.append((kind, tuple(inner)))
        else:
            raise _NoKey


def tensors(value: Any) -> list[torch.Tensor]:
    """Tensors in the result of an operator."""
    if isinstance(value, torch.Tensor):
        return [value]
    if value is None:
        return []
    return [leaf for leaf in tree_iter(value) if isinstance(leaf, torch.Tensor)]

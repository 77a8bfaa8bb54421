"""Tensors of an op's shapes with realistic random data, and how much memory they take."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch

from primus_ext.observe.specs import DTYPE_NAMES
from primus_ext.trace import Op, TensorSpec

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_INTEGERS = (torch.int64, torch.int32, torch.uint8, torch.int8)
_BLOCK = 1 << 20
_NARROW = (torch.float8_e4m3fn, torch.float8_e5m2)


class CannotRun(ValueError):
    """This op can't be run alone here; the message is one sentence that names it."""


Run = Callable[[], object]
"""One execution."""


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a trace's name for it.

    Raises:
        CannotRun: It is none of torch's.
    """
    found = DTYPES.get(name) or getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CannotRun(f"dtype {name} is none of torch's")
    return found


def size_of(spec: TensorSpec) -> int:
    """Bytes."""
    return math.prod(spec.shape) * dtype_of(spec.dtype).itemsize


def needed_bytes(op: Op) -> int:
    """Of all tensors of an op; those that it writes in place are counted twice at most."""
    if not op.inputs and not op.outputs:
        return op.bytes
    return sum(map(size_of, (*op.inputs, *op.outputs)))


def random(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Normal numbers (zeros run faster than real data), small whole numbers, or coin flips.

    Large tensors repeat a block of them: making a tensor must not take longer than timing it.
    """
    elements = math.prod(shape)
    if elements > _BLOCK:
        block = random((_BLOCK,), dtype, device)
        return block.repeat(-(-elements // _BLOCK))[:elements].reshape(tuple(shape))
    if dtype is torch.bool:
        return torch.rand(tuple(shape), device=device) > 0.5
    if dtype in _INTEGERS:
        return torch.randint(0, 100, tuple(shape), device=device).to(dtype)
    if dtype in _NARROW:
        return torch.randn(tuple(shape), device=device).to(dtype)
    return torch.randn(tuple(shape), device=device, dtype=dtype)


def make(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    """A dense tensor of a spec."""
    return random(spec.shape, dtype_of(spec.dtype), device)


def inputs_of(op: Op, device: torch.device) -> list[torch.Tensor]:
    """The inputs of memory-bound work; one of them is broadcast where the op's bytes say so.

    Raises:
        CannotRun: The bytes are those of no such tensors.
    """
    missing = sum(map(size_of, (*op.inputs, *op.outputs))) - op.bytes
    if missing <= 0:
        return [make(spec, device) for spec in op.inputs]
    for place, spec in enumerate(op.inputs):
        kept = _stored_shape(spec, size_of(spec) - missing)
        if kept is not None:
            made = [make(s, device) for i, s in enumerate(op.inputs) if i != place]
            small = random(kept, dtype_of(spec.dtype), device).expand(spec.shape)
            return [*made[:place], small, *made[place:]]
    raise CannotRun(f"{op.name} moves {op.bytes} bytes, which none of its inputs broadcast explain")


def _stored_shape(spec: TensorSpec, stored: int) -> tuple[int, ...] | None:
    """The shape that is expanded to ``spec`` and takes ``stored`` bytes; the last ones first."""
    elements, rest = divmod(stored, dtype_of(spec.dtype).itemsize)
    if stored <= 0 or rest:
        return None
    wide = [dim for dim, size in enumerate(spec.shape) if size > 1]
    for count in range(1, len(wide) + 1):
        for expanded in reversed(list(itertools.combinations(wide, count))):
            shape = tuple(1 if d in expanded else size for d, size in enumerate(spec.shape))
            if math.prod(shape) == elements:
                return shape
    return None

"""Kinds of work that one regression holds for, and where in it an op stands.

Ops of one kind differ in sizes alone, products in their layout too.  The kind of a matrix product
or of attention says nothing of the op's name: a product is the same work whoever calls it.  That of
memory-bound work is its name, its number formats, and which of its tensors are broadcast or
reduced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from primus_ext.trace import Family, Op, TensorSpec

Place = tuple[float, ...]
"""Logarithms (base 2) of an op's sizes: one step is an octave."""
_MATRIX = (Family.GEMM, Family.GROUPED_GEMM)
_TRANSPOSED = {"tn": (0.0, 1.0), "nn": (0.0, 0.0), "nt": (1.0, 0.0), "tt": (1.0, 1.0)}
"""Which operands of a product lie transposed: like in all else, such two are an octave apart."""
_MANY = 8
"""Tensors above which an op works on a list of them (optimizers), whose shapes don't matter."""


def kind_of(op: Op) -> str:
    """The kind of an op's work."""
    attrs = dict(op.attrs)
    if op.family in _MATRIX:
        batched = "batched" if int(attrs.get("batch", 1)) > 1 else "single"
        into = "accumulated" if attrs.get("accumulate") else "written"
        formats = (attrs.get("dtype"), attrs.get("out_dtype"))
        return _joined(op.family, *formats, into, batched)
    if op.family is Family.ATTENTION:
        window = attrs.get("window") or (-1, -1)
        return _joined(
            op.family, attrs.get("dtype"), attrs.get("direction"),
            "causal" if attrs.get("causal") else "full", "window" if window[0] >= 0 else "all",
        )  # fmt: skip
    return _joined(op.family, op.name, _pattern(op.inputs, op.outputs))


def group_of(kind: str) -> str:
    """The family of a kind: what stands in where nothing of the kind itself is known."""
    return kind.partition(" ")[0]


def place_of(op: Op) -> Place:
    """Where an op stands among those of its kind."""
    attrs = dict(op.attrs)
    if op.family in _MATRIX:
        first, second = _TRANSPOSED.get(str(attrs.get("layout")), (0.0, 0.0))
        return (*_logs(attrs, ("m", "n", "k", "batch", "groups")), first, second)
    if op.family is Family.ATTENTION:
        return _logs(attrs, ("batch", "heads", "kv_heads", "seq_q", "seq_kv", "dim_qk", "dim_v"))
    tensors = (*op.inputs, *op.outputs)
    last = max(tensors, key=_elements, default=TensorSpec((1,), ""))
    width = 1 if len(tensors) > _MANY else (last.shape or (1,))[-1]
    return (math.log2(max(1, op.bytes)), math.log2(max(1, width)))


def _joined(*parts: Any) -> str:
    return " ".join(str(part) for part in parts)


def _logs(attrs: dict[str, Any], names: Sequence[str]) -> Place:
    return tuple(math.log2(max(1, int(attrs.get(name, 1) or 1))) for name in names)


def _elements(spec: TensorSpec) -> int:
    return math.prod(spec.shape)


def _pattern(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> str:
    """Formats of the tensors, and how each lies to the largest of them.

    f: as large; s: one element; r: its rows are those of the largest; c: anything else.
    """
    tensors = (*inputs, *outputs)
    if len(tensors) > _MANY:
        formats = sorted({spec.dtype for spec in tensors if _elements(spec) > 1})
        return f"many:{'+'.join(formats)}"
    largest = max(tensors, key=_elements, default=TensorSpec((1,), ""))

    def told(spec: TensorSpec) -> str:
        if _elements(spec) == _elements(largest):
            how = "f"
        elif _elements(spec) <= 1:
            how = "s"
        else:
            how = "r" if spec.shape[-1:] == largest.shape[-1:] else "c"
        return f"{spec.dtype}:{how}"

    return f"{','.join(map(told, inputs))}>{','.join(map(told, outputs))}"

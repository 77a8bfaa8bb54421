"""What a measured time is kept under: an op's canonical form, its text and its key.

Two ops have one signature exactly if they are the same work: names of dimensions
(:attr:`TensorSpec.origins`), the order of attributes, lists for tuples and the two ways to say that
a causal mask has no right side do not count; anything else does.  ``bytes`` count too: they tell a
broadcast operand, which is read once, from one of full size.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import operator
from typing import Any

from primus_ext import trace_io
from primus_ext.cost.priced import CostError
from primus_ext.trace import Family, Op, TensorSpec, to_plain

MEASURABLE = (Family.GEMM, Family.GROUPED_GEMM, Family.ATTENTION, Family.MEMORY, Family.QUANTIZE)
"""Work of one device alone, which an isolated run can time."""
_SWITCHES = ("accumulate", "causal", "fused")


class SignatureError(CostError):
    """An op has no signature; the message is one sentence."""


def canonical(op: Op) -> Op:
    """The op in its one spelling.

    Raises:
        SignatureError: It is no work of one device (collectives and what the host does have no
            place in the database), or an attribute is no plain value.
    """
    if op.family not in MEASURABLE or op.collective is not None:
        raise SignatureError(
            f"op {op.name} of family {op.family} has no signature: it is not one device's work, "
            f"which {', '.join(MEASURABLE)} are"
        )
    attrs = {name: _plain(op, name, value) for name, value in op.attrs}
    if attrs.get("window") is not None:
        attrs["window"] = _window(attrs)
    return Op(
        name=str(op.name),
        family=Family(op.family),
        inputs=tuple(map(_tensor, op.inputs)),
        outputs=tuple(map(_tensor, op.outputs)),
        flops=operator.index(op.flops),
        bytes=operator.index(op.bytes),
        attrs=tuple(sorted(attrs.items())),
    )


def text(op: Op) -> str:
    """The canonical form as JSON; :func:`parse` reads it back."""
    plain = to_plain(canonical(op))
    del plain["collective"]
    for spec in (*plain["inputs"], *plain["outputs"]):
        del spec["origins"]
    return json.dumps(plain, sort_keys=True, separators=(",", ":"))


def key(op: Op) -> str:
    """32 hexadecimal digits that stand for the text."""
    return key_of(text(op))


def key_of(written: str) -> str:
    """The key of a signature's text."""
    return hashlib.sha256(written.encode()).hexdigest()[:32]


def parse(written: str) -> Op:
    """The op whose :func:`text` this is.

    Raises:
        SignatureError: It is none.
    """
    try:
        found = trace_io.from_plain(Op, json.loads(written))
    except (ValueError, TypeError, AttributeError) as error:
        raise SignatureError(f"{written[:80]!r} is no signature of an op: {error}") from error
    if text(found) != written:
        raise SignatureError(f"the signature of {found.name} is not in its canonical form")
    return found


def _tensor(spec: TensorSpec) -> TensorSpec:
    shape = tuple(operator.index(size) for size in spec.shape)
    return dataclasses.replace(spec, shape=shape, origins=())


def _window(attrs: dict[str, Any]) -> tuple[int, int]:
    """A causal mask ends at the query, whatever the right side of its window says."""
    left, right = attrs["window"]
    return max(left, -1), 0 if attrs.get("causal") else max(right, -1)


def _plain(op: Op, name: str, value: Any) -> Any:
    if name in _SWITCHES:
        return bool(value)
    if value is None or isinstance(value, bool | str):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, list | tuple):
        return tuple(_plain(op, "", one) for one in value)
    try:
        return operator.index(value)  # NumPy's too
    except TypeError:
        pass
    if isinstance(value, float):
        return float(value)
    raise SignatureError(f"attribute {name}={value!r} of op {op.name} is no plain value")

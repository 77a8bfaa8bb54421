"""A recorded model chunk as exact functions of the microbatch and the sequence length.

A chunk is recorded at a few points.  Where its ops and allocations come in the same order at all
of them, every dimension, size and count is solved for as ``sum(c * mbs**a * seq**b)`` with one or
two terms and rational ``c``, and must reproduce every recorded value exactly: more points than
unknowns, nothing is fitted.  What is not of this form, or a point outside the conditions under
which the structure holds (token counts that experts or quantized blocks don't divide), is refused:
such a point has to be recorded itself.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from primus_ext import trace, trace_io
from primus_ext.trace import ChunkMemory, Op, TensorSpec

Point = tuple[int, int]
"""Microbatch (sequences) and sequence length (tokens)."""
_ITEM_BYTES = {"fp32": 4, "int32": 4, "fp64": 8, "int64": 8, "bf16": 2, "fp16": 2}
_EXPONENTS = ((0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2), (2, 2))


class NotParametric(ValueError):
    """A point or a recording that must be recorded itself."""


@dataclasses.dataclass(frozen=True, slots=True)
class Terms:
    """``sum(numerator * mbs**a * seq**b) / denominator``, a whole number where it is valid."""

    terms: tuple[tuple[int, int, int], ...]
    """Numerator, a, b."""
    denominator: int

    def at(self, mbs: Any, seq: Any) -> Any:
        """The value, for whole numbers or arrays of them.

        Raises:
            NotParametric: The value is no whole number there.
        """
        total = sum(n * mbs**a * seq**b for n, a, b in self.terms)
        if self.denominator != 1:
            if np.any(total % self.denominator):
                raise NotParametric(f"{self} is no whole number at mbs={mbs}, seq={seq}")
            total = total // self.denominator
        return total


def solve(points: Sequence[Point], values: Sequence[int]) -> Terms:
    """The function of one or two terms that has these values at these points.

    Args:
        points: At least four, with three microbatches and three sequence lengths among them.
        values: Recorded.

    Raises:
        NotParametric: None has.
    """
    if len(set(values)) == 1:
        return Terms(((values[0], 0, 0),), 1)
    single = (((a, b),) for a in range(3) for b in range(3))
    for exponents in itertools.chain(single, itertools.combinations(_EXPONENTS, 2)):
        found = _coefficients(exponents, points, values)
        if found is not None:
            common = math.lcm(*(c.denominator for c in found))
            terms = zip(found, exponents, strict=True)
            return Terms(tuple((int(c * common), a, b) for c, (a, b) in terms), common)
    raise NotParametric(f"{list(values)} at {list(points)} is no sum of two terms")


def _coefficients(
    exponents: Sequence[tuple[int, int]], points: Sequence[Point], values: Sequence[int]
) -> tuple[Fraction, ...] | None:
    rows = [[Fraction(m**a * s**b) for a, b in exponents] for m, s in points]
    if len(exponents) == 1:
        found = (values[0] / rows[0][0],)
    else:
        for (x, one), (y, two) in itertools.combinations(zip(rows, values, strict=True), 2):
            determinant = x[0] * y[1] - x[1] * y[0]
            if determinant:
                found = (
                    (one * y[1] - two * x[1]) / determinant,
                    (two * x[0] - one * y[0]) / determinant,
                )
                break
        else:
            return None
    same = all(
        sum(c * r for c, r in zip(found, row, strict=True)) == value
        for row, value in zip(rows, values, strict=True)
    )
    return found if same else None


@dataclasses.dataclass(frozen=True, slots=True)
class Recording:
    """One microbatch through a chunk at one point."""

    point: Point
    calls: tuple[tuple[Op, str, str], ...]
    """Op, phase and module of every call, in order."""
    forward: tuple[int, ...]
    """Bytes allocated (positive) and freed (negative) in the forward, in order."""
    backward: tuple[int, ...]
    boundary_bytes: int

    @property
    def memory(self) -> ChunkMemory:
        """The chunk's memory, from the allocations."""
        ahead, back = np.cumsum((0, *self.forward)), np.cumsum((0, *self.backward))
        return ChunkMemory(
            saved_bytes=int(ahead[-1]),
            forward_peak_bytes=int(ahead.max()),
            backward_peak_bytes=int(ahead[-1] + back.max()),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Condition:
    """``mbs * seq * share`` must be a multiple of ``modulus``."""

    share: Fraction
    modulus: int
    reason: str

    def holds(self, mbs: Any, seq: Any) -> Any:
        """Whether it is, for whole numbers or arrays of them."""
        return (mbs * seq * self.share.numerator) % (self.share.denominator * self.modulus) == 0


def to_plain(recording: Recording) -> dict[str, Any]:
    """JSON-able values; every distinct op once."""
    index: dict[Op, int] = {}
    calls = [[index.setdefault(op, len(index)), *rest] for op, *rest in recording.calls]
    return {
        "point": list(recording.point),
        "ops": [trace.to_plain(op) for op in index],
        "calls": calls,
        "forward": list(recording.forward),
        "backward": list(recording.backward),
        "boundary_bytes": recording.boundary_bytes,
    }


def from_plain(value: dict[str, Any]) -> Recording:
    """The recording that :func:`to_plain` made ``value`` of.

    Raises:
        FormatError: It has another shape.
    """
    ops = [trace_io.from_plain(Op, op) for op in value["ops"]]
    mbs, seq = value["point"]
    return Recording(
        point=(mbs, seq),
        calls=tuple((ops[i], phase, module) for i, phase, module in value["calls"]),
        forward=tuple(value["forward"]),
        backward=tuple(value["backward"]),
        boundary_bytes=value["boundary_bytes"],
    )


def _shape(recording: Recording) -> tuple:
    """What must be equal at all points: everything but the numbers."""
    calls = tuple(
        (op.name, op.family, phase, module, op.collective and (op.collective.kind,
         op.collective.group, op.collective.dtype, op.collective.asynchronous),
         tuple((len(t.shape), t.dtype) for t in (*op.inputs, *op.outputs)),
         tuple((k, None if _is_number(v) else v) for k, v in op.attrs))
        for op, phase, module in recording.calls
    )  # fmt: skip
    signs = tuple(tuple(n > 0 for n in part) for part in (recording.forward, recording.backward))
    return calls, signs


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _tensor_bytes(*lists: Sequence[TensorSpec]) -> int:
    """Bytes of all tensors together."""
    return sum(math.prod(t.shape) * _ITEM_BYTES.get(t.dtype, 1) for specs in lists for t in specs)


def _numbers(op: Op) -> list[int]:
    """Every number of an op, in a fixed order."""
    dims = [d for t in (*op.inputs, *op.outputs) for d in t.shape]
    # Traffic is that of the tensors and something simple: zero, or an output that is also read.
    moved = op.bytes - _tensor_bytes(op.inputs, op.outputs)
    message = [op.collective.bytes] if op.collective else []
    return [*dims, op.flops, moved, *message, *(v for _, v in op.attrs if _is_number(v))]


class ParametricChunk:
    """A chunk at any microbatch and sequence length that its conditions allow."""

    def __init__(
        self, recordings: Sequence[Recording], conditions: Sequence[Condition] = ()
    ) -> None:
        """Solve for every number.

        Args:
            recordings: At four points or more; see :func:`solve`.
            conditions: Where the structure holds.

        Raises:
            NotParametric: The structure is another at one of the points, or a number is not of
                the form.
        """
        shapes = [_shape(r) for r in recordings]
        for recording, shape in zip(recordings, shapes, strict=True):
            if shape != shapes[0]:
                raise NotParametric(
                    f"the ops or allocations at {recording.point} differ from those at "
                    f"{recordings[0].point}"
                )
        self.conditions = tuple(conditions)
        self._points = [r.point for r in recordings]
        self._known: dict[tuple[int, ...], Terms] = {}
        first = recordings[0]
        rows: dict[tuple[Op, ...], int] = {}
        self.calls: list[tuple[int, str, str]] = []
        """Index into the ops, phase and module, in order."""
        for together in zip(*(r.calls for r in recordings), strict=True):
            index = rows.setdefault(tuple(call[0] for call in together), len(rows))
            self.calls.append((index, together[0][1], together[0][2]))
        self._templates = [ops[0] for ops in rows]
        self._ops = [
            [self._solve(values) for values in zip(*map(_numbers, ops), strict=True)]
            for ops in rows
        ]
        self._forward, self._backward = (
            [self._solve(values) for values in zip(*parts, strict=True)]
            for parts in ([r.forward for r in recordings], [r.backward for r in recordings])
        )
        self._boundary = self._solve([r.boundary_bytes for r in recordings])
        self.size = len(first.calls), len(rows)

    def _solve(self, values: Sequence[int]) -> Terms:
        key = tuple(values)
        if key not in self._known:
            self._known[key] = solve(self._points, key)
        return self._known[key]

    def require(self, mbs: Any, seq: Any) -> None:
        """Refuse points where the structure may be another.

        Raises:
            NotParametric: A condition does not hold.
        """
        for condition in self.conditions:
            if not np.all(condition.holds(mbs, seq)):
                raise NotParametric(
                    f"mbs={mbs}, seq={seq} must be recorded itself: {condition.reason}"
                )

    def memory(self, mbs: np.ndarray, seq: np.ndarray) -> dict[str, np.ndarray]:
        """Saved, forward-peak, backward-peak and boundary bytes at many points at once.

        Args:
            mbs: Microbatches ``[n]``, int64.
            seq: Sequence lengths ``[n]``.
        """
        self.require(mbs, seq)
        ahead, back = (_running(terms, mbs, seq) for terms in (self._forward, self._backward))
        saved = ahead[-1]
        return {
            "saved_bytes": saved,
            "forward_peak_bytes": ahead.max(axis=0),
            "backward_peak_bytes": saved + back.max(axis=0),
            "boundary_bytes": self._boundary.at(mbs, seq) + np.zeros_like(mbs),
        }

    def ops(self, mbs: int, seq: int) -> list[Op]:
        """The ops at one point; :attr:`calls` has their order."""
        self.require(mbs, seq)
        return [
            _filled(template, [int(t.at(mbs, seq)) for t in terms])
            for template, terms in zip(self._templates, self._ops, strict=True)
        ]

    def recording(self, mbs: int, seq: int) -> Recording:
        """What recording the point itself gives."""
        ops = self.ops(mbs, seq)
        forward, backward = (
            tuple(int(t.at(mbs, seq)) for t in terms) for terms in (self._forward, self._backward)
        )
        return Recording(
            point=(mbs, seq),
            calls=tuple((ops[i], phase, module) for i, phase, module in self.calls),
            forward=forward,
            backward=backward,
            boundary_bytes=int(self._boundary.at(mbs, seq)),
        )


class ParametricChunks:
    """A chunk whose structure at a microbatch of one sequence may be another.

    The embedding and the loss copy ``[mbs, seq]`` tensors in another order of dimensions, which at
    ``mbs=1`` is the same order.
    """

    def __init__(
        self, recordings: Sequence[Recording], conditions: Sequence[Condition] = ()
    ) -> None:
        """Solve once, or once for ``mbs=1`` and once for the rest where that fails.

        Raises:
            NotParametric: That fails as well.
        """
        try:
            self._single = self._several = ParametricChunk(recordings, conditions)
        except NotParametric:
            ones = [r for r in recordings if r.point[0] == 1]
            rest = [r for r in recordings if r.point[0] > 1]
            if len(ones) < 3 or len(rest) < 4:
                raise
            self._single = ParametricChunk(ones, conditions)
            self._several = ParametricChunk(rest, conditions)

    def of(self, mbs: int) -> ParametricChunk:
        """What holds for this microbatch (for any other one above 1 too, if it is above 1)."""
        return self._single if mbs == 1 else self._several


def _running(terms: Sequence[Terms], mbs: np.ndarray, seq: np.ndarray) -> np.ndarray:
    """Live bytes after every event ``[events + 1, n]``; each distinct size is computed once."""
    distinct = {term: row for row, term in enumerate(dict.fromkeys(terms))}
    values = np.zeros((len(distinct) + 1, len(mbs)), dtype=np.int64)
    for term, row in distinct.items():
        values[row + 1] = term.at(mbs, seq)
    rows = np.array([0, *(distinct[term] + 1 for term in terms)])
    return np.cumsum(values[rows], axis=0)


def _filled(op: Op, numbers: Sequence[int]) -> Op:
    """The op with other numbers, in the order of :func:`_numbers`."""
    rest = iter(numbers)

    def tensors(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        return tuple(
            dataclasses.replace(t, shape=tuple(next(rest) for _ in t.shape)) for t in specs
        )

    inputs, outputs = tensors(op.inputs), tensors(op.outputs)
    flops, size = next(rest), next(rest) + _tensor_bytes(inputs, outputs)
    collective = op.collective
    if collective is not None:
        collective = dataclasses.replace(collective, bytes=next(rest))
    attrs = tuple((k, next(rest) if _is_number(v) else v) for k, v in op.attrs)
    return dataclasses.replace(
        op, inputs=inputs, outputs=outputs, flops=flops, bytes=size, collective=collective,
        attrs=attrs,
    )  # fmt: skip

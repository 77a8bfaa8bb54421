"""Ops that no cost model knows: they are named, never priced in silence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from primus_ext.trace import Call, Family, RankTrace

_KNOWN = {
    "aten", "c10d", "_c10d_functional", "primus_te", "primus_apex", "deep_ep", "fused", "triton",
}  # fmt: skip
"""Where recorded ops come from: torch, its collectives, and the stand-ins of this package."""

_COMPUTE = (
    "aten.convolution", "aten._convolution", "aten.cudnn_convolution", "aten.miopen_convolution",
    "aten._scaled_mm", "aten._scaled_grouped_mm", "aten._grouped_mm", "aten._int_mm",
    "aten._weight_int", "aten.linalg_inv", "aten.linalg_cholesky", "aten.linalg_lu",
    "aten.linalg_qr", "aten._linalg_svd", "aten._linalg_eigh", "aten._fft", "aten._trilinear",
    "aten._thnn_fused", "aten._cudnn_rnn", "aten._sparse", "aten.cdist", "aten._flex",
)  # fmt: skip
"""Torch's own ops (by the start of the name) whose arithmetic outweighs their memory traffic, and
which the recorder has no formula for."""

Found = dict[str, tuple[int, str]]
"""Name of an op to how often it runs in a microbatch, and the first module with it."""


def _calls(trace: RankTrace) -> Iterator[tuple[Call, int]]:
    """Every call with how often it runs."""
    for chunk in trace.chunks:
        for segment in chunk.segments:
            for call in (*segment.forward, *segment.backward):
                yield call, segment.count
    for call in trace.step:
        yield call, 1


def of_rank(trace: RankTrace) -> Found:
    """Ops of one rank that are neither torch's nor a stand-in's, or that are mispriced."""
    unknown = {
        index: op.name
        for index, op in enumerate(trace.ops)
        if op.family is Family.MEMORY and is_unknown(op.name)
    }
    found: Found = {}
    for call, times in _calls(trace) if unknown else ():
        if call.op in unknown:
            count, module = found.get(unknown[call.op], (0, call.module))
            found[unknown[call.op]] = (count + times, module)
    return found


def unknown_ops(
    stages: Iterable[RankTrace], of: Callable[[RankTrace], Found] = of_rank
) -> tuple[str, ...]:
    """One line for each such op.

    Args:
        stages: Trace of every pipeline rank.
        of: :func:`of_rank`, or what knows its answers.
    """
    most: Found = {}
    for trace in stages:
        for name, item in of(trace).items():
            most[name] = max(most.get(name, (0, "")), item)
    return tuple(
        f"op {name} is not known: priced as one pass over its inputs and outputs "
        f"({count} in a microbatch{f', first in {module}' if module else ''})"
        for name, (count, module) in sorted(most.items())
    )


def is_unknown(name: str) -> bool:
    """Whether an op of that name, found to be bound by memory, may be priced wrongly."""
    return name.partition(".")[0] not in _KNOWN or name.startswith(_COMPUTE)

"""Every collective of one step, by pipeline rank: what a cluster's network team asks for first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from primus_ext.plan import Plan
from primus_ext.project import memory
from primus_ext.project.kept import Kept
from primus_ext.project.programs import Shape
from primus_ext.project.result import Row
from primus_ext.trace import Call, ChunkTrace, Family, RankTrace, Segment

MOST_ROWS = 100
"""Rows that a projection lists; a job with more of them has its inventory left out."""


Key = tuple[str, str, str, int, int, str, bool]
"""Direction, kind, group, size, bytes, dtype and asynchronous of a :class:`Row`."""


def of_step(
    plan: Plan, stages: Sequence[RankTrace], shape: Shape, kept: Kept | None = None
) -> tuple[Row, ...]:
    """All collectives that one step issues.

    Args:
        plan: The job.
        stages: Trace of every pipeline rank, in order.
        shape: The schedule.
        kept: What other projections found out.
    """
    transfers = pipeline_transfers(stages, shape, plan.precision.params)
    holders: dict[tuple[Key, int], list[int]] = {}
    for pp_rank, trace in enumerate(stages):
        own = _known(trace, shape, kept) if kept else of_rank(trace, shape)
        for key, count in (own + transfers[pp_rank]).items():
            holders.setdefault((key, count), []).append(pp_rank)
    return tuple(
        sorted(Row(tuple(ranks), *key, count) for (key, count), ranks in holders.items())
    )


def _known(trace: RankTrace, shape: Shape, kept: Kept) -> Counter[Key]:
    """As :func:`of_rank`; of equal microbatches one is counted, and once."""
    if any(chunk.microbatches for chunk in trace.chunks):
        key = ("collectives", shape.microbatches)
        return kept.of(trace, key, lambda: of_rank(trace, shape))
    once = kept.of(trace, "collectives of a step", lambda: of_rank(trace, _microbatches_of(0)))
    found = kept.of(trace, "collectives with one", lambda: of_rank(trace, _microbatches_of(1)))
    return Counter(
        {key: once[key] + (count - once[key]) * shape.microbatches for key, count in found.items()}
    )


def _microbatches_of(count: int) -> Shape:
    return Shape(pp=1, microbatches=count)


def listed(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """The rows, or none if they are more than :data:`MOST_ROWS`."""
    return rows if len(rows) <= MOST_ROWS else ()


def of_rank(trace: RankTrace, shape: Shape) -> Counter[Key]:
    """What one rank issues in one step, but for the pipeline's transfers.

    Args:
        trace: The rank.
        shape: The schedule.
    """
    found: Counter[Key] = Counter()
    for chunk in trace.chunks:
        for kind, times in _microbatches(chunk, shape.microbatches):
            for segment in kind:
                calls = (*segment.forward, *segment.backward)
                _count(found, trace, calls, segment.count * times)
    _count(found, trace, trace.step, 1)
    _count(found, trace, trace.sync, 1)
    return found


def _microbatches(chunk: ChunkTrace, count: int) -> Iterator[tuple[tuple[Segment, ...], int]]:
    """Segments of every kind of microbatch and how often it runs in a step."""
    if not chunk.microbatches:  # all are alike
        yield chunk.segments, count
        return
    for index, one in enumerate(chunk.microbatches):  # the second of three stands for the rest
        times = count - 2 if (len(chunk.microbatches), index) == (3, 1) else 1
        yield one.segments or chunk.segments, times


def _count(found: Counter[Key], trace: RankTrace, calls: Iterable[Call], times: int) -> None:
    for call in calls:
        op = trace.ops[call.op]
        if op.collective is None:
            continue
        one, kind = op.collective, str(op.collective.kind)
        if op.family is Family.P2P:
            kind = "send" if op.name.endswith("send") else "recv"
        size = len(trace.groups[one.group])
        key = (call.phase, kind, one.group, size, one.bytes, one.dtype, one.asynchronous)
        found[key] += times


def pipeline_transfers(
    stages: Sequence[RankTrace], shape: Shape, dtype: str
) -> list[Counter[Key]]:
    """Sends and receives of activations and their gradients, by pipeline rank.

    Args:
        stages: Trace of every pipeline rank.
        shape: The schedule.
        dtype: Of the activations.
    """
    found: list[Counter[Key]] = [Counter() for _ in stages]
    if shape.pp == 1:
        return found
    for boundary, size in enumerate(memory.boundary_bytes(stages, shape)):
        here, there = boundary % shape.pp, (boundary + 1) % shape.pp
        for direction, source, target in (("forward", here, there), ("backward", there, here)):
            for kind, rank in (("send", source), ("recv", target)):
                key = (direction, kind, "pp", shape.pp, size, dtype, True)
                found[rank][key] += shape.microbatches
    return found

"""Reduction of gradient buckets and gathering of parameters, overlapped as Megatron does it.

With ``overlap_grad_reduce`` a bucket is reduced as soon as the last microbatch's backward has
passed its parameters; later pipeline ranks (``align_grad_reduce``, Megatron's default) start when
the first one does.  With ``overlap_param_gather`` a bucket is gathered while the forward of the
first microbatch works on the bucket before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from primus_ext.cost.model import CostModel
from primus_ext.cost.priced import CostError
from primus_ext.plan import Plan
from primus_ext.project.interleaved import order
from primus_ext.project.programs import Shape
from primus_ext.project.schedule import Timeline
from primus_ext.trace import Bucket, Collective, CollectiveKind, RankTrace


@dataclasses.dataclass(frozen=True, slots=True)
class BucketTimes:
    """One bucket on one rank."""

    chunk: int
    group: str
    share: float
    """Of the parameters that the same chunk reduces over the same group."""
    reduce_s: float
    gather_s: float
    reduce_working_s: float = 0.0
    """Part that takes the cores that compute, so that nothing hides it."""
    gather_working_s: float = 0.0


def bucket_times(cost: CostModel, trace: RankTrace, sharded: bool) -> list[BucketTimes]:
    """Price the buckets of a rank, in the order in which the backward fills them.

    Args:
        cost: Prices on the target.
        trace: The rank.
        sharded: Whether the optimizer is distributed.

    Raises:
        CostError: The group of a bucket is not in the trace, or not on the target.
    """
    totals: dict[tuple[int, str], int] = {}
    for bucket in trace.buckets:
        key = (bucket.chunk, bucket.group)
        totals[key] = totals.get(key, 0) + bucket.parameters
    times = []
    for bucket in trace.buckets:
        share = bucket.parameters / max(1, totals[bucket.chunk, bucket.group])
        reduce, gather = collectives_of(cost, bucket, sharded)
        reduce_s, reducing = _seconds(cost, trace, reduce)
        gather_s, gathering = _seconds(cost, trace, gather) if gather else (0.0, 0.0)
        times.append(
            BucketTimes(bucket.chunk, bucket.group, share, reduce_s, gather_s * bucket.gathers,
                        reducing, gathering * bucket.gathers)
        )  # fmt: skip
    return times


def collectives_of(
    cost: CostModel, bucket: Bucket, sharded: bool
) -> tuple[Collective, Collective | None]:
    """What reduces the gradients of a bucket, and what gathers its parameters, if anything.

    Measured times depend on the numbers that are added; the model's lines are for any.
    """
    kind = CollectiveKind.REDUCE_SCATTER if sharded else CollectiveKind.ALL_REDUCE
    dtype = ""
    if cost.measured_collectives is not None:
        dtype = "fp32" if bucket.grad_bytes >= 4 * bucket.parameters else "bf16"
    reduce = Collective(kind=kind, group=bucket.group, bytes=bucket.grad_bytes, dtype=dtype)
    if not sharded:
        return reduce, None
    return reduce, Collective(kind=CollectiveKind.ALL_GATHER, group=bucket.group,
                              bytes=bucket.param_bytes, dtype="")  # fmt: skip


def _seconds(cost: CostModel, trace: RankTrace, collective: Collective) -> tuple[float, float]:
    """Of a collective, and of these what takes cores that compute."""
    ranks = trace.groups.get(collective.group)
    if ranks is None:
        raise CostError(
            f"group {collective.group} of a gradient bucket is not in the trace: it has "
            f"{', '.join(trace.groups)}"
        )
    if len(ranks) == 1 or not collective.bytes:
        return 0.0, 0.0
    priced = cost.collective_seconds(collective, ranks)
    return priced.seconds, 0.0 if cost.cluster.hides_communication else priced.processor_s


def first_forward_waits(
    buckets: Sequence[BucketTimes], forward: Sequence[float], overlap: bool
) -> list[float]:
    """Seconds that the first microbatch's forward waits for parameters, by chunk.

    The first bucket is waited for; each next one is gathered beside the forward of the one before.

    Args:
        buckets: Of one rank, in backward order.
        forward: Seconds of a forward, by chunk.
        overlap: ``overlap_param_gather``; without it nothing is gathered during the forward.
    """
    waits = [0.0 for _ in forward]
    if not overlap:
        return waits
    beside: dict[tuple[int, str], float] = {}
    for bucket in reversed(buckets):
        key = (bucket.chunk, bucket.group)
        working = bucket.gather_working_s
        waits[bucket.chunk] += working
        waits[bucket.chunk] += max(0.0, bucket.gather_s - working - beside.get(key, 0.0))
        beside[key] = bucket.share * forward[bucket.chunk]
    return waits


def first_waits(
    plan: Plan,
    shape: Shape,
    buckets: Sequence[Sequence[BucketTimes]],
    forward: Sequence[Sequence[float]],
) -> list[list[float]]:
    """Seconds that the first forward of each chunk waits for parameters, by pipeline rank.

    With interleaving and ``align_param_gather`` (Megatron's default) every rank gathers its first
    two chunks at the start of the step, and each later one when the chunk before it is begun: the
    forwards of a whole group of microbatches hide it (``param_sync_func`` in Megatron-Core 0.19,
    ``pipeline_parallel/schedules.py``).

    Args:
        plan: The job.
        shape: Its schedule.
        buckets: Of each pipeline rank.
        forward: Seconds of a forward, by pipeline rank and chunk.
    """
    overlap = plan.parallelism.overlap_param_gather
    alone = [
        first_forward_waits(own, times, overlap)
        for own, times in zip(buckets, forward, strict=True)
    ]
    if shape.vpp == 1 or not plan.flags.get("align_param_gather", True):
        return alone
    waits = []
    for rank, (own, times) in enumerate(zip(alone, forward, strict=True)):
        hidden = [0.0, *(shape.group_size * seconds for seconds in times[:-1])]
        late = [max(0.0, wait - beside) for wait, beside in zip(own, hidden, strict=True)]
        if rank:  # what the first rank waited for is there when its work arrives here
            arrival = rank * times[0]
            late = [max(0.0, w - f - arrival) for w, f in zip(late, waits[0], strict=True)]
        waits.append(late)
    return waits


def reduced_at(
    plan: Plan,
    shape: Shape,
    timeline: Timeline,
    rank: int,
    buckets: Sequence[BucketTimes],
    backward: Sequence[float],
) -> float:
    """When the gradients of one pipeline rank are reduced, on the timeline of the step.

    Args:
        plan: The job.
        shape: The schedule.
        timeline: Of the pipeline.
        rank: Pipeline rank.
        buckets: Of this rank.
        backward: Seconds of a backward, by chunk.
    """
    finish = timeline.finish[rank]
    if not plan.parallelism.overlap_grad_reduce:
        return finish + sum(bucket.reduce_s for bucket in buckets)
    starts = _starts(plan, shape, timeline, rank, buckets, backward)
    free = 0.0
    for start, bucket in sorted(zip(starts, buckets, strict=True), key=lambda pair: pair[0]):
        free = max(free, start) + bucket.reduce_s - bucket.reduce_working_s
    return max(finish, free) + sum(bucket.reduce_working_s for bucket in buckets)


def _starts(
    plan: Plan,
    shape: Shape,
    timeline: Timeline,
    rank: int,
    buckets: Sequence[BucketTimes],
    backward: Sequence[float],
) -> list[float]:
    """Earliest start of the reduction of each bucket."""
    aligned = shape.pp > 1 and bool(plan.flags.get("align_grad_reduce", True))
    last = _last_backwards(shape)
    ends = timeline.backward_ends[rank]
    if aligned and shape.vpp > 1:
        # a chunk is reduced when the first rank's chunk is through: rank backwards later here
        at = [min(position + rank, len(ends) - 1) for position in last]
        return [ends[at[bucket.chunk]] for bucket in buckets]
    if aligned and rank > 0:
        return [timeline.finish[rank] for _ in buckets]
    starts, passed = [], {}
    for bucket in buckets:
        key = (bucket.chunk, bucket.group)
        passed[key] = passed.get(key, 0.0) + bucket.share
        end = ends[last[bucket.chunk]]
        starts.append(end - (1 - min(1.0, passed[key])) * backward[bucket.chunk])
    return starts


def _last_backwards(shape: Shape) -> list[int]:
    """Position of the last microbatch's backward in a rank's order, by chunk."""
    if shape.vpp == 1:
        return [shape.microbatches - 1]
    found = [0 for _ in range(shape.vpp)]
    for position, (microbatch, chunk) in enumerate(order(shape)):
        if microbatch == shape.microbatches - 1:
            found[shape.vpp - 1 - chunk] = position
    return found

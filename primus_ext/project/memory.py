"""Peak memory of every pipeline rank, its parts, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence

from primus_ext.cluster import Cluster
from primus_ext.plan import Plan
from primus_ext.project import inflight
from primus_ext.project.programs import Shape
from primus_ext.project.result import Memory, MemoryParts, RoleMemory
from primus_ext.project.retained import Retained
from primus_ext.project.schedule import programs
from primus_ext.trace import RankTrace, ScopeKind

SLACK = 0.047
"""What torch reserves above what is allocated at the peak, as a share of the latter.  Median of 216
ranks of 27 Megatron runs on 8 B200 (SimuMax 4dcaae5 docs/b200, torch 2.10;
``scripts/fit/allocator_slack.py``)."""

SLACK_HIGH = 0.069
"""The same where nine of ten ranks lie below (same rows); the largest was 0.093."""


def per_role(
    plan: Plan, stages: Sequence[RankTrace], cluster: Cluster, shape: Shape
) -> tuple[RoleMemory, ...]:
    """Memory of one rank of every pipeline stage.

    Args:
        plan: The job.
        stages: Trace of every pipeline rank, in order.
        cluster: The target.
        shape: The schedule.
    """
    short = inflight.steady(shape)
    order = programs(short)
    sizes = boundary_bytes(stages, shape)
    return tuple(
        _role(plan, trace, cluster, rank, shape, sizes,
              inflight.peak(short, order[rank], rank, [c.memory for c in trace.chunks], sizes,
                            shape.microbatches - short.microbatches))
        for rank, trace in enumerate(stages)
    )  # fmt: skip


def boundary_bytes(stages: Sequence[RankTrace], shape: Shape) -> list[int]:
    """Bytes of the activation that crosses each boundary between stages."""
    return [
        stages[stage % shape.pp].chunks[stage // shape.pp].boundary_bytes
        for stage in range(shape.stages - 1)
    ]


def outside_bytes(trace: RankTrace, cluster: Cluster) -> int:
    """Device memory that is no tensor: context, communicators that are used, DeepEP's buffers."""
    accelerator = cluster.accelerator
    used = {op.collective.group for op in trace.ops if op.collective is not None}
    used |= {bucket.group for bucket in trace.buckets} | {"pp"}
    members = {trace.groups[name] for name in used if name in trace.groups}
    communicators = sum(len(ranks) > 1 for ranks in members)
    return trace.static.libraries + int(
        accelerator.context_bytes.value + communicators * accelerator.communicator_bytes.value
    )


def _role(
    plan: Plan, trace: RankTrace, cluster: Cluster, rank: int, shape: Shape,
    sizes: Sequence[int], moment: inflight.Moment,
) -> RoleMemory:
    static = trace.static
    chunks = [chunk.memory for chunk in trace.chunks]
    kept = Retained(shape, rank, sizes, chunks).at_the_end()
    if static.step_peak_bytes + kept > moment.total:
        moment = inflight.Moment(0, static.step_peak_bytes, kept, ())
    parts = MemoryParts(
        parameters=static.parameters,
        gradients=static.gradients,
        optimizer=static.optimizer,
        activations=moment.activations,
        temporaries=moment.temporaries,
        communication=moment.communication,
        reserve=static.workspaces,
    )
    peak = parts.total
    pipeline = trace.groups.get("pp", (trace.rank,))
    return RoleMemory(
        role=role_name(plan, trace, rank),
        ranks=plan.parallelism.world_size // plan.parallelism.pp,
        example_rank=pipeline[rank] if rank < len(pipeline) else trace.rank,
        parameters=trace.parameters,
        peak_bytes=peak,
        reserved_bytes=int(peak * (1 + SLACK)) + outside_bytes(trace, cluster),
        parts=parts,
    )


def role_name(plan: Plan, trace: RankTrace, rank: int) -> str:
    """E.g. ``pp stage 0 (embedding, 20 layers)``."""
    held = plan.parallelism.layers_per_stage
    counts = {kind: 0 for kind in ScopeKind}
    for chunk in trace.chunks:
        for segment in chunk.segments:
            counts[segment.kind] += segment.count
    recorded = counts[ScopeKind.DENSE_LAYER] + counts[ScopeKind.MOE_LAYER]
    layers = sum(held[rank]) if held else recorded
    words = ["embedding"] if counts[ScopeKind.EMBEDDING] else []
    words += [f"{layers} layer{'' if layers == 1 else 's'}"] if layers else []
    words += ["MTP"] if counts[ScopeKind.MTP_LAYER] else []
    words += ["output"] if counts[ScopeKind.OUTPUT] else []
    return f"pp stage {rank} ({', '.join(words)})"


def verdict(
    plan: Plan, stages: Sequence[RankTrace], cluster: Cluster, shape: Shape
) -> Memory:
    """Whether the job fits, judged on the heaviest role.

    ``oom``: the tensors, the context and the communicators alone need more than there is.
    ``at_risk``: they fit, but not with the slack that one in ten ranks shows (``SLACK_HIGH``).
    """
    roles = per_role(plan, stages, cluster, shape)
    capacity = int(cluster.accelerator.hbm_bytes.value)
    heaviest = max(range(len(roles)), key=lambda i: roles[i].reserved_bytes)
    outside = [outside_bytes(trace, cluster) for trace in stages]
    least = max(role.peak_bytes + out for role, out in zip(roles, outside, strict=True))
    high = max(
        role.peak_bytes * (1 + SLACK_HIGH) + out for role, out in zip(roles, outside, strict=True)
    )
    word = "oom" if least > capacity else "at_risk" if high > capacity else "fits"
    return Memory(
        verdict=word,
        capacity_bytes=capacity,
        binding_role=roles[heaviest].role,
        per_role=roles,
    )

"""Peak memory of every pipeline rank, its parts, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence

from primus_ext.cluster import Cluster
from primus_ext.plan import Plan
from primus_ext.project import (
    allocator_config,
    anchored,
    host,
    inflight,
    outside,
    sharded,
    shortfall,
    tight,
)
from primus_ext.project.allocator_config import AllocatorConfig
from primus_ext.project.footprint import Replayed, enough, footprint, replayable
from primus_ext.project.kept import Kept
from primus_ext.project.observed import Measured
from primus_ext.project.programs import Shape
from primus_ext.project.result import Memory, MemoryParts, RoleMemory
from primus_ext.project.retained import Retained
from primus_ext.project.schedule import programs
from primus_ext.trace import LAYERS, RankTrace, ScopeKind

SLACK = 0.047
"""What torch reserves above what is allocated at the peak, as a share of the latter, where a trace
has no allocations to replay.  Median of 216 ranks of 27 Megatron runs on 8 B200 (SimuMax 4dcaae5
docs/b200, torch 2.10; ``scripts/fit/allocator_slack.py``)."""


AGREEMENT = 0.01
"""Share of the peak by which replay and composition may differ: the exchanges between stages and
a few boundary activations; more means that one of them has another program in mind."""



def per_role(
    plan: Plan, stages: Sequence[RankTrace], cluster: Cluster, shape: Shape,
    kept: Kept | None = None,
) -> tuple[RoleMemory, ...]:  # fmt: skip
    """Memory of one rank of every pipeline stage.

    Args:
        plan: The job.
        stages: Trace of every pipeline rank, in order.
        cluster: The target.
        shape: The schedule.
        kept: What other projections on this target found out.

    Raises:
        ValueError: A trace was recorded for its times alone.
    """
    if any(trace.only_timed for trace in stages):
        raise ValueError("the trace was recorded for its times alone, so it has no memory")
    kept, short = kept or Kept(cluster), inflight.steady(shape)
    sizes = tuple(boundary_bytes(stages, shape))
    config = allocator_config.from_environment(plan.flags)
    workspace = outside.workspace_bytes(cluster.accelerator, plan.flags)
    found = []
    for rank, trace in enumerate(stages):
        # each microbatch may leave something, or be another one
        counts = any(c.memory.logged_bytes or c.microbatches for c in trace.chunks)
        key = ("role", rank, short, sizes, config, workspace, plan.parallelism,
               shape.microbatches * counts)  # fmt: skip
        found.append(
            kept.of(trace, key, lambda t=trace, r=rank: _role(
                plan, t, kept, r, shape, short, sizes, config
            ))
        )  # fmt: skip
    return tuple(found)


def boundary_bytes(stages: Sequence[RankTrace], shape: Shape) -> list[int]:
    """Bytes of the activation that crosses each boundary between stages."""
    return [
        stages[stage % shape.pp].chunks[stage // shape.pp].boundary_bytes
        for stage in range(shape.stages - 1)
    ]


def outside_bytes(trace: RankTrace, cluster: Cluster) -> int:
    """Device memory beside torch's allocator: driver context and communicators."""
    return sum(outside.by_source(trace, cluster).values())


def _role(
    plan: Plan, trace: RankTrace, kept: Kept, rank: int, shape: Shape, short: Shape,
    sizes: tuple[int, ...], config: AllocatorConfig,
) -> RoleMemory:  # fmt: skip
    static, cluster, program = trace.static, kept.cluster, programs(short)[rank]
    chunks = [chunk.memory for chunk in trace.chunks]
    skipped = shape.microbatches - short.microbatches
    moment = inflight.peak(short, program, rank, chunks, sizes, skipped)
    at_the_end = Retained(shape, rank, sizes, chunks).at_the_end()
    if static.step_peak_bytes + at_the_end > moment.total:
        moment = inflight.Moment(0, static.step_peak_bytes, at_the_end, ())
    parts = MemoryParts(
        parameters=static.parameters,
        gradients=static.gradients,
        optimizer=static.optimizer,
        activations=moment.activations,
        temporaries=moment.temporaries,
        communication=moment.communication,
        reserve=static.workspaces - moment.absent,
    )
    if trace.chunks[0].microbatches:
        parts = sharded.parts(trace, shape.microbatches)
    peak = parts.total
    pipeline = trace.groups.get("pp", (trace.rank,))
    beside = outside.by_source(trace, cluster)
    library = outside.blas_workspaces(trace, cluster.accelerator, plan.flags)
    found, replayed = None, None
    if replayable(trace):
        # what is allocated depends on a few microbatches only
        key = ("footprint", rank, enough(short, rank), sizes, config, library)
        replay = Replayed(trace, rank, short, sizes, config, library)
        found = kept.of(trace, key, lambda: footprint(replay))
        replayed = found.tensor_bytes - sum(library)
        if abs(replayed - peak) > AGREEMENT * peak:
            found = None
    within = found.reserved_bytes if found else int(peak * (1 + SLACK)) + sum(library)
    return RoleMemory(
        role=role_name(plan, trace, rank),
        ranks=plan.parallelism.world_size // plan.parallelism.pp,
        example_rank=pipeline[rank] if rank < len(pipeline) else trace.rank,
        parameters=trace.parameters,
        peak_bytes=peak,
        reserved_bytes=within + sum(beside.values()),
        parts=parts,
        outside=beside,
        library_bytes=sum(library),
        replayed_bytes=replayed,
        allocated_bytes=found and found.allocated_bytes,
        allocator_bytes=found and found.reserved_bytes,
        timeline=found and found.timeline,
        top_allocations=found.top_allocations if found else (),
        setup_bytes=found and found.setup_bytes,
        host_bytes=host.peak(trace, program),
    )


def role_name(plan: Plan, trace: RankTrace, rank: int) -> str:
    """E.g. ``pp stage 0 (embedding, 20 layers)``."""
    held = plan.parallelism.layers_per_stage
    counts = {kind: 0 for kind in ScopeKind}
    for chunk in trace.chunks:
        for segment in chunk.segments:
            counts[segment.kind] += segment.count
    recorded = sum(counts[kind] for kind in LAYERS)
    layers = sum(held[rank]) if held else recorded
    words = ["embedding"] if counts[ScopeKind.EMBEDDING] else []
    words += [f"{layers} layer{'' if layers == 1 else 's'}"] if layers else []
    words += ["MTP"] if counts[ScopeKind.MTP_LAYER] else []
    words += ["output"] if counts[ScopeKind.OUTPUT] else []
    return f"pp stage {rank} ({', '.join(words)})"


def verdict(
    plan: Plan, stages: Sequence[RankTrace], cluster: Cluster, shape: Shape,
    kept: Kept | None = None, measured: Measured | None = None,
) -> Memory:  # fmt: skip
    """Whether the job fits, judged on the rank that needs most.

    ``oom``: the tensors and what lies beside them need more than there is.
    ``at_risk``: they fit, but not with what the allocator reserves.  It gives unused segments back
    when the device has no more, so such a job may run; pieces of segments stay lost.  At risk is
    also what published runs of its kind took more than is projected, see
    :mod:`primus_ext.project.shortfall`.
    """
    kept = kept or Kept(cluster)
    roles, seen = anchored.roles(per_role(plan, stages, cluster, shape, kept), stages, measured)
    capacity = int(cluster.accelerator.hbm_bytes.value)
    heaviest = max(range(len(roles)), key=lambda i: roles[i].reserved_bytes)
    least = max(role.least_bytes for role in roles)
    word = "oom" if least > capacity else "fits"
    if word == "fits" and roles[heaviest].reserved_bytes > capacity:
        word = "at_risk"
    missing = shortfall.sentences(plan, cluster, roles, capacity) if word == "fits" else []
    return Memory(
        verdict="at_risk" if missing else word,
        capacity_bytes=capacity,
        binding_role=roles[heaviest].role,
        per_role=roles,
        notes=(
            *seen,
            *_disagreements(roles),
            *_built_too_large(roles, capacity),
            *(_at_risk(plan, stages, kept, shape, roles) if word == "at_risk" else ()),
            *missing,
        ),
    )


def _built_too_large(roles: Sequence[RoleMemory], capacity: int) -> list[str]:
    """Roles that fit in every step and not while they are built."""
    return [
        f"{role.role}: building the model takes {role.setup_bytes:,} bytes, more than any step, "
        "before its parameters are sharded; --use-cpu-initialization (torch FSDP2) or "
        "--init-model-with-meta-device (Megatron-FSDP) builds it elsewhere"
        for role in roles
        if role.setup_bytes is not None
        and role.least_bytes > capacity
        and role.setup_bytes > role.peak_bytes + role.library_bytes
    ]


def _disagreements(roles: Sequence[RoleMemory]) -> list[str]:
    """Roles whose replay can't be used."""
    return [
        f"{role.role}: allocations replay to {role.replayed_bytes:,} bytes where "
        f"{role.peak_bytes:,} are composed, so {SLACK:.1%} stand for what the allocator adds"
        for role in roles
        if role.replayed_bytes is not None and role.allocator_bytes is None
    ]


def _at_risk(
    plan: Plan, stages: Sequence[RankTrace], kept: Kept, shape: Shape,
    roles: Sequence[RoleMemory],
) -> tuple[str, ...]:  # fmt: skip
    """What becomes of the rank at risk that needs most."""
    cluster = kept.cluster
    capacity = int(cluster.accelerator.hbm_bytes.value)
    rank = max(range(len(roles)), key=lambda i: roles[i].reserved_bytes)
    trace, role = stages[rank], roles[rank]
    if role.allocator_bytes is None:
        return ()
    replayed = Replayed(
        trace, rank, inflight.steady(shape), tuple(boundary_bytes(stages, shape)),
        allocator_config.from_environment(plan.flags),
        outside.blas_workspaces(trace, cluster.accelerator, plan.flags),
    )  # fmt: skip
    room = capacity - sum(role.outside.values())
    key = ("tight", rank, enough(replayed.shape, rank), replayed.sizes, replayed.config,
           replayed.workspaces, room)  # fmt: skip
    text = kept.of(trace, key, lambda: tight.sentence(replayed, room))
    return (f"{role.role} would reserve more than the device has: {text}",)

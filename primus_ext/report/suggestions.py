"""What to try next: only what follows from the numbers of this projection."""

from __future__ import annotations

from primus_ext.plan import Plan
from primus_ext.project.result import Projection, RoleMemory
from primus_ext.report.units import gib, percent, seconds

WORTH = 0.05
"""Share of a step from which a term is worth a suggestion."""
ROOM = 0.25
"""Share of the memory that must be free before a suggestion spends some."""


def heaviest(projection: Projection) -> RoleMemory:
    """The role that binds the memory verdict."""
    memory = projection.memory
    return next(role for role in memory.per_role if role.role == memory.binding_role)


def suggestions(projection: Projection) -> list[str]:
    """Sentences, the most useful first; empty where nothing stands out."""
    if projection.memory.verdict != "fits":
        return _to_fit(projection.plan, heaviest(projection))
    return _to_be_faster(projection)


def _to_fit(plan: Plan, role: RoleMemory) -> list[str]:
    """Which knob makes the largest part of the heaviest role smaller."""
    parts, parallel = role.parts, plan.parallelism
    weights = parts.parameters + parts.gradients
    moving = parts.activations + parts.temporaries
    largest = max(weights, parts.optimizer, moving)
    if largest == moving:
        return _less_activations(plan, moving)
    if largest == parts.optimizer and not parallel.distributed_optimizer and parallel.dp > 1:
        return [
            f"The optimizer holds {gib(parts.optimizer)} on every rank: the distributed optimizer "
            f"shares it over {parallel.dp} data-parallel ranks."
        ]
    what = "weights and gradients" if largest == weights else "optimizer"
    knobs = "tp or pp"
    if plan.model.num_experts:
        knobs = "ep, tp or pp" if parallel.ep < plan.model.num_experts else "tp or pp"
    return [f"The {what} take {gib(largest)} of the heaviest rank: raise {knobs}."]


def _less_activations(plan: Plan, size: int) -> list[str]:
    parallel, found = plan.parallelism, []
    if parallel.tp > 1 and not parallel.sequence_parallel:
        found.append(
            f"Activations take {gib(size)}: sequence parallelism splits what tensor parallelism "
            f"leaves whole over {parallel.tp} ranks."
        )
    if plan.recompute.granularity != "full":
        found.append(f"Activations take {gib(size)}: recompute more of the layers.")
    if plan.batch.mbs > 1:
        found.append(f"Lower mbs={plan.batch.mbs}: activations shrink in proportion.")
    if not found:
        found.append(f"Activations take {gib(size)} with full recomputation: raise tp, cp or pp.")
    return found


def _to_be_faster(projection: Projection) -> list[str]:
    step, plan = projection.throughput.step_s, projection.plan
    exposed = {term.term: term.exposed_seconds for term in projection.breakdown}
    free = 1 - heaviest(projection).reserved_bytes / projection.memory.capacity_bytes
    found: list[tuple[float, str]] = []

    def consider(term: str, sentence: str, applies: bool) -> None:
        cost = exposed.get(term, 0.0)
        if applies and cost > WORTH * step:
            share = f"{term} takes {seconds(cost)} ({percent(cost / step)} of the step)"
            found.append((cost, f"{share[0].upper()}{share[1:]}: {sentence}"))

    parallel, spare = plan.parallelism, free > ROOM
    room = f"{percent(free)} of the memory is free"
    consider("recompute", f"{room}, so recompute less.", spare)
    bubble = "more model chunks per rank (vpp)" if parallel.vpp == 1 else "a larger vpp or gbs"
    consider("pipeline bubble", f"{bubble} or fewer stages shorten it.", parallel.pp > 1)
    consider("tensor-parallel communication", f"{room}, so a smaller tp may do.",
             spare and parallel.tp > 1)  # fmt: skip
    consider("data-parallel communication", "overlap_grad_reduce and overlap_param_gather hide it.",
             not (parallel.overlap_grad_reduce and parallel.overlap_param_gather))  # fmt: skip
    found.sort(reverse=True)
    sentences = [sentence for _, sentence in found]
    if _twice_the_microbatch_fits(projection):
        larger = 2 * plan.batch.mbs
        sentences.append(f"{room[0].upper()}{room[1:]}: mbs={larger} fits; kernels get larger.")
    return sentences


def _twice_the_microbatch_fits(projection: Projection) -> bool:
    """Whether every role has room for its activations and temporaries once more.

    The global batch must still divide, and a pipeline must keep more microbatches than stages.
    """
    batch, parallel = projection.plan.batch, projection.plan.parallelism
    microbatches = batch.num_microbatches
    if microbatches % 2 or microbatches // 2 < parallel.pp:
        return False
    return all(
        role.reserved_bytes + role.parts.activations + role.parts.temporaries
        < (1 - ROOM) * projection.memory.capacity_bytes
        for role in projection.memory.per_role
    )

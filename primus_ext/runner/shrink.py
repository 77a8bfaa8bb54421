"""A smaller world that stands for a larger one: what a few devices can really run.

Pipeline stages go first, then expert parallelism (the experts of a rank stay as many), then tensor
parallelism.  Data parallelism takes no part in a rank's own work but through experts.  Parts of the
small job are timed; what they say of the large one goes through the traces of both
(:func:`primus_ext.project.observed.carried`).
"""

from __future__ import annotations

import math
from typing import Any

from primus_ext.plan import Plan

MICROBATCHES = 4
"""Most microbatches of a shrunk step: later ones are like those before."""


class ShrinkError(ValueError):
    """The job has no smaller world; the message is one sentence."""


def changes(plan: Plan, devices: int) -> dict[str, Any]:
    """Values of Megatron's arguments that make a job of ``devices`` ranks.

    Args:
        plan: The job.
        devices: Processes that can run, one a device.

    Raises:
        ShrinkError: It can't be made as small.
    """
    degrees, model = plan.parallelism, plan.model
    if devices < 1:
        raise ShrinkError(f"shrink={devices} is not legal: it must be at least 1")
    if degrees.cp > devices:
        raise ShrinkError(
            f"shrink={devices} is not legal with context_parallel_size={degrees.cp}: the pieces of "
            f"a sequence depend on each other; legal: {degrees.cp} or more"
        )
    tp = max(t for t in _divisors(degrees.tp) if t * degrees.cp <= devices)
    dense = tp * degrees.cp
    ep = max(e for e in _divisors(degrees.ep) if _world(e, degrees.etp, tp, dense) <= devices)
    world = _world(ep, degrees.etp, tp, dense)
    layers = max(sum(stage) for stage in degrees.layers_per_stage)
    dp = world // dense
    found: dict[str, Any] = {
        "world_size": world,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": ep,
        "num_layers": layers,
        "global_batch_size": plan.batch.mbs * dp * min(MICROBATCHES, plan.batch.num_microbatches),
        "num_virtual_stages_per_pipeline_rank": None,
        "num_layers_per_virtual_pipeline_stage": None,
        "pipeline_model_parallel_layout": None,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "sequence_parallel": degrees.sequence_parallel and tp > 1,
    }
    if model.num_experts:
        found["num_experts"] = model.num_experts // degrees.ep * ep
        found["expert_tensor_parallel_size"] = min(degrees.etp, tp)
    return found


def _world(ep: int, etp: int, tp: int, dense: int) -> int:
    """Fewest ranks that hold the dense layers' groups and ``ep`` experts' groups."""
    return math.lcm(dense, ep * min(etp, tp))


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]

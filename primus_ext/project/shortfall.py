"""Device memory that published runs took beyond their projection, for reasons not known.

On AMD's GPUs experts take more than tensors, the allocator's fragments, the driver's context and
RCCL's buffers explain.  Until that is understood a projection says how much it was: a job that
would not fit with as much more is at risk.  The share of the measured peak that is missing, at
most, of published runs with that dispatcher (``scripts/fit/device_shortfall.py``): six runs of
DeepSeek-V2-Lite on 8 MI355X with all-to-all, largest at microbatch 1; four with DeepEP (up to 4 %)
and Qwen3-235B on 32, 1F1B (``validation/memory_runs.yaml``).  The figure for flex is that last
run's alone, whose configuration is partly assumed: a warning, not a prediction.
"""

from __future__ import annotations

from collections.abc import Sequence

from primus_ext.cluster import Cluster
from primus_ext.plan import Plan
from primus_ext.project.result import RoleMemory

MISSING = {"alltoall": 0.201, "allgather": 0.201, "flex": 0.139}
"""Share of the measured device memory, by ``--moe-token-dispatcher-type``; all-gather, of which
there is no run, as all-to-all: both are RCCL's."""


def share(plan: Plan, cluster: Cluster) -> float:
    """How much of the device memory of such a job may be missing, as a share of it; 0 if none."""
    if cluster.accelerator.vendor != "amd" or not plan.model.num_experts:
        return 0.0
    dispatcher = str(plan.flags.get("moe_token_dispatcher_type"))
    return MISSING.get(dispatcher, max(MISSING.values()))


def sentences(
    plan: Plan, cluster: Cluster, roles: Sequence[RoleMemory], capacity: int
) -> list[str]:
    """What is said of roles that fit as projected, but not with what may be missing.

    Args:
        plan: The job.
        cluster: The target.
        roles: Memory of every pipeline rank.
        capacity: Bytes of the device.
    """
    missing = share(plan, cluster)
    return [
        f"{role.role}: published runs of experts on AMD's GPUs took up to "
        f"{missing / (1 - missing):.0%} more device memory than is projected, for reasons not "
        f"known; with that these {role.reserved_bytes / 2**30:.1f} GiB do not fit"
        for role in roles
        if missing and role.reserved_bytes <= capacity < role.reserved_bytes / (1 - missing)
    ]

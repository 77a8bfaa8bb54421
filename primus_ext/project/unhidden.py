"""Jobs whose asynchronous communication takes the cores that compute."""

from __future__ import annotations

import dataclasses

from primus_ext.cluster import Cluster
from primus_ext.plan import Plan


def as_timed(plan: Plan, cluster: Cluster) -> Plan:
    """The plan by whose switches pipeline transfers, and other schedules, are timed.

    Where communication takes the cores that compute, what is issued early takes about as long as
    what is issued when it is needed: the same plan without its overlaps.
    """
    if cluster.hides_communication:
        return plan
    parallelism = dataclasses.replace(
        plan.parallelism, overlap_grad_reduce=False, overlap_param_gather=False, overlap_p2p=False
    )
    return dataclasses.replace(plan, parallelism=parallelism)

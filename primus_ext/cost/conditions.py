"""What of a job decides prices beside its ops: the host, kernels of its time, overlap in pieces."""

from __future__ import annotations

import dataclasses

from primus_ext.cluster import Accelerator
from primus_ext.cost.host_time import HostTime
from primus_ext.plan import Plan


@dataclasses.dataclass(frozen=True, slots=True)
class Conditions:
    """Of one job on one accelerator."""

    host: HostTime | None = None
    """The host that issues the work; None: it is always ahead of the device."""
    attention_kernel: str = ""
    """Which fused attention runs, where ops don't say
    (:func:`primus_ext.cost.attention.kernel_of`)."""
    pipelined_tp: int = 1
    """Pieces in which tensor-parallel communication runs beside the product that needs or makes it
    (``tp_comm_overlap``: tp); 1 for none."""

    @classmethod
    def of(cls, plan: Plan, accelerator: Accelerator) -> Conditions:
        """Those of a plan."""
        return cls(
            host=HostTime.of(plan, accelerator),
            attention_kernel=str(plan.flags.get("attention_kernel", "")),
            pipelined_tp=plan.parallelism.tp if plan.flags.get("tp_comm_overlap") else 1,
        )

"""How each term is known, in words."""

from __future__ import annotations

from primus_ext.cluster import Cluster
from primus_ext.cost import collective_tables, tables
from primus_ext.plan import Plan
from primus_ext.project.ledger import TermName

_COMMUNICATION = (TermName.TENSOR, TermName.CONTEXT, TermName.EXPERT, TermName.OTHER,
                  TermName.DATA, TermName.P2P)  # fmt: skip
_TRAFFIC = (TermName.MEMORY, TermName.QUANTIZE, TermName.OPTIMIZER)


def of(term: TermName, plan: Plan, cluster: Cluster, schedule: str | None = None) -> str:
    """Evidence of one term: its kind (``model``), and what it stands on.

    Args:
        term: The term.
        plan: The job.
        cluster: The target.
        schedule: What was simulated, if not the plan's own.
    """
    accelerator = cluster.accelerator
    number_format = plan.precision.number_format
    share = accelerator.gemm_efficiency.get(number_format)
    gemm = f"{share.value:.0%} of the {number_format} peak" if share else "published efficiency"
    known = tables.source() if accelerator.measured_tables else None
    corrected = f", corrected near the shapes of {known}" if known else ""
    memory = f"{accelerator.hbm_efficiency.value:.0%} of the memory bandwidth"
    if term is TermName.GEMM:
        return f"model: {gemm}{corrected}"
    if term is TermName.GROUPED_GEMM:
        return f"model: {gemm}"
    if term is TermName.ATTENTION:
        ahead = accelerator.attention_efficiency["forward"].value
        back = accelerator.attention_efficiency["backward"].value
        return f"model: {ahead:.0%} forward, {back:.0%} backward of the bf16 peak{corrected}"
    if term in _TRAFFIC:
        return f"model: {memory}"
    if term in (TermName.EDGES, TermName.RECOMPUTE):
        return f"model: {gemm}, {memory}"
    if term in _COMMUNICATION:
        if accelerator.measured_tables and collective_tables.available():
            return "model: links and NICs at published shares; within a node NCCL's measured times"
        return "model: links and NICs at published shares"
    return f"schedule: event simulation of {schedule or plan.schedule}"

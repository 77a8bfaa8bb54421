"""How each term is known, in words."""

from __future__ import annotations

from primus_ext.cluster import Cluster
from primus_ext.cost import collective_tables, sustained, tables
from primus_ext.plan import Plan
from primus_ext.project.ledger import TermName

_COMMUNICATION = (TermName.TENSOR, TermName.CONTEXT, TermName.EXPERT, TermName.OTHER,
                  TermName.DATA, TermName.P2P)  # fmt: skip
_TRAFFIC = (TermName.MEMORY, TermName.QUANTIZE, TermName.OPTIMIZER)


def of(
    term: TermName, plan: Plan, cluster: Cluster, schedule: str | None = None, measured: str = ""
) -> str:
    """Evidence of one term: its kind (``model``), and what it stands on.

    Args:
        term: The term.
        plan: The job.
        cluster: The target.
        schedule: What was simulated, if not the plan's own.
        measured: What the rank's own work stands on, where it was measured.
    """
    if measured and term not in (*_COMMUNICATION, TermName.BUBBLE):
        return measured
    accelerator = cluster.accelerator
    number_format = plan.precision.number_format
    share = accelerator.gemm_efficiency.get(number_format)
    gemm = f"{share.value:.0%} of the {number_format} peak" if share else "published efficiency"
    gemm += _slower(cluster, sustained.of_format(number_format))
    known = tables.source() if accelerator.measured_tables else None
    corrected = f", corrected near the shapes of {known}" if known else ""
    memory = f"{accelerator.hbm_efficiency.value:.0%} of the memory bandwidth"
    memory += _slower(cluster, "memory")
    if term is TermName.GEMM:
        return f"model: {gemm}{corrected}"
    if term is TermName.GROUPED_GEMM:
        return f"model: {gemm}{_slower(cluster, 'grouped_gemm')}"
    if term is TermName.ATTENTION:
        ahead = accelerator.attention_efficiency["forward"].value
        back = accelerator.attention_efficiency["backward"].value
        return (
            f"model: {ahead:.0%} forward, {back:.0%} backward of the bf16 peak"
            f"{_slower(cluster, 'attention')}{corrected}"
        )
    if term in _TRAFFIC:
        return f"model: {memory}"
    if term in (TermName.EDGES, TermName.RECOMPUTE):
        return f"model: {gemm}, {memory}"
    if term is TermName.HOST:
        call = accelerator.sustained[sustained.HOST].value
        return f"model: {call * 1e6:.0f} us a call on the host"
    if term in _COMMUNICATION:
        shares = f"links and NICs at published shares{_carried(cluster, plan, term)}"
        if accelerator.measured_tables and collective_tables.available():
            return f"model: {shares}; within a node NCCL's measured times"
        return f"model: {shares}"
    return f"schedule: event simulation of {schedule or plan.schedule}"


def _slower(cluster: Cluster, kind: str) -> str:
    """How much longer it lasts in training than alone, in words."""
    factor = sustained.factor(cluster.accelerator, kind)
    return "" if factor == 1.0 else f" x {factor:.2f} in training"


def _carried(cluster: Cluster, plan: Plan, term: TermName) -> str:
    """The same of communication, in a scale-up domain and between several."""
    if term is TermName.EXPERT and plan.flags.get("moe_token_dispatcher_type") == "flex":
        return _slower(cluster, "exchange")
    inside, beyond = (
        sustained.factor(cluster.accelerator, kind) for kind in ("scale_up", "scale_out")
    )
    if inside == beyond == 1.0:
        return ""
    return f" x {inside:.2f} in a node, {beyond:.2f} between nodes, in training"

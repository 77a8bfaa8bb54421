"""Model FLOPs, MFU and the interval around a step time."""

from __future__ import annotations

import math
from collections.abc import Sequence

from primus_ext.cluster import Cluster
from primus_ext.cost.formats import peak_flops
from primus_ext.plan import Plan
from primus_ext.project.imbalance import even_share
from primus_ext.project.ledger import Kind
from primus_ext.project.observed import Measured
from primus_ext.project.result import Throughput
from primus_ext.trace import Family, RankTrace

LEVEL = 0.9
"""Probability that the interval is meant to hold the measured step time."""

REPEATED = 0.06
"""Least half width of what was measured: within it lie all seven jobs of
``validation/measured_cpu.md`` whose step is mostly the rank's own work or its pipeline."""

_MODEL = (Family.GEMM, Family.ATTENTION)


def forward_flops(trace: RankTrace) -> int:
    """FLOPs of one microbatch's forward on one rank: matrix products and attention.

    Causal attention counts the half that is computed; recomputation does not count.  Experts count
    as those of the mean rank.
    """
    flops = experts = 0
    for chunk in trace.chunks:
        for segment in chunk.segments:
            for call in segment.forward:
                op = trace.ops[call.op]
                if op.family is Family.GROUPED_GEMM:
                    experts += op.flops * segment.count
                elif op.family in _MODEL:
                    flops += op.flops * segment.count
    return flops + round(experts * even_share(trace.experts))


def model_flops_per_gpu(plan: Plan, stages: Sequence[RankTrace]) -> float:
    """FLOPs of one step that one GPU owes the model: three forwards of every microbatch."""
    forwards = sum(forward_flops(trace) for trace in stages)
    return 3.0 * forwards * plan.batch.num_microbatches / plan.parallelism.pp


def half_width(
    cluster: Cluster, plan: Plan, kinds: dict[Kind, float], communication: float | None = None
) -> float:
    """Half width of the interval on the logarithm of the step time.

    What :data:`LEVEL` of the measured runs that were left out of the fit stay within
    (``step_error`` of ``Accelerator.sustained``); without it the uncertainties of the kinds of
    work, weighted by their exposed time and added: what is off in one kernel is off in all of its
    kind.  Where communication was measured ``communication`` is its own.
    """
    known = cluster.accelerator.sustained.get(
        "step_error/experts" if plan.model.num_experts else "step_error/dense"
    )
    if known is not None:
        return known.value
    total = math.fsum(kinds.values())
    if not total:
        return 0.0
    widths = _residuals(cluster, communication)
    return math.fsum(s / total * widths[kind] for kind, s in kinds.items())


def _residuals(cluster: Cluster, communication: float | None) -> dict[Kind, float]:
    """Half widths of the kinds of work; of communication where it was measured its own."""
    widths = {kind: cluster.accelerator.residuals[str(kind)].value for kind in Kind}
    return widths if communication is None else {**widths, Kind.COMMUNICATION: communication}


def measured_half_width(
    cluster: Cluster, kinds: dict[Kind, float], measured: Measured,
    communication: float | None = None,
) -> float:  # fmt: skip
    """As :func:`half_width`, where what a rank does by itself was measured.

    Its share is as uncertain as the samples, and where they were carried to another device as the
    model of its kind of work; communication is as uncertain as its model, or where it was measured
    as ``communication``.
    """
    widths = _residuals(cluster, communication)
    total = math.fsum(kinds.values())
    width = 0.0
    for kind, seconds in kinds.items():
        modelled = kind is Kind.COMMUNICATION or measured.device is not None
        own = widths[kind] if modelled else max(measured.spread, REPEATED)
        width += seconds / total * own if total else 0.0
    return width


def interval_words(measured: Measured | None) -> str:
    """What an interval stands on."""
    if measured is None:
        return "errors of published runs that were left out of the fit"
    return "spread of the measured steps, and the residuals of what was modelled"


def throughput(
    plan: Plan,
    stages: Sequence[RankTrace],
    cluster: Cluster,
    step_s: float,
    kinds: dict[Kind, float],
    measured: Measured | None = None,
    communication: float | None = None,
) -> Throughput:
    """Everything that follows from the step time.

    Args:
        plan: The job.
        stages: Trace of every pipeline rank.
        cluster: The target.
        step_s: Seconds of a step.
        kinds: Exposed seconds by kind of work.
        measured: What was measured of it.
        communication: Half width of the interval of its time, where that was measured.
    """
    tokens = plan.batch.gbs * plan.batch.seq
    rate = model_flops_per_gpu(plan, stages) / step_s
    peak = peak_flops(cluster.accelerator, plan.precision.number_format)
    width = half_width(cluster, plan, kinds, communication)
    if measured is not None:
        width = min(width, measured_half_width(cluster, kinds, measured, communication))
    return Throughput(
        step_s=step_s,
        tokens_per_s_per_gpu=tokens / step_s / plan.parallelism.world_size,
        model_tflops_per_gpu=rate / 1e12,
        mfu=rate / peak,
        interval={
            "low": step_s * math.exp(-width),
            "high": step_s * math.exp(width),
            "level": LEVEL,
        },
    )

"""Let the ranks of a job last as long as they were measured to."""

from __future__ import annotations

from collections.abc import Sequence

from primus_ext.cluster import Cluster
from primus_ext.cost.conditions import Conditions
from primus_ext.cost.model import CostModel
from primus_ext.plan import Plan
from primus_ext.project import observed, stage
from primus_ext.project.kept import Kept
from primus_ext.trace import RankTrace


def lasting(
    measured: observed.Measured, plan: Plan, stages: Sequence[RankTrace], shared: Kept
) -> Kept:
    """What is kept of this job alone; nothing of it is another job's.

    Args:
        measured: Its ranks, or a smaller world in their place.
        plan: The job.
        stages: Trace of every pipeline rank.
        shared: Prices on the target.

    Raises:
        MeasurementError: They don't match.
    """
    priced = shared.cost
    kept = Kept(
        shared.cluster, conditions=priced.conditions, collectives=priced.measured_collectives
    )
    there = _cost(measured.device, plan, priced)
    for trace in {id(trace): trace for trace in stages}.values():
        kept.observe(trace, _seen(measured, trace, there))
    return kept


def _cost(device: Cluster | None, plan: Plan, target: CostModel) -> CostModel:
    """Prices on the device that was measured."""
    if device is None:
        return target
    return CostModel(device, conditions=Conditions.of(plan, device.accelerator))


def _seen(
    measured: observed.Measured, trace: RankTrace, cost: CostModel
) -> observed.Observed:
    """How long the parts of one rank take."""
    one = measured.rank(trace)
    if not measured.small:
        return stage.observe(cost, trace, one)
    small = measured.small[0]
    alone = len(small.groups.get("default_pg", ())) < 2
    return observed.carried(stage.observe(cost, small, one, alone), small, trace)

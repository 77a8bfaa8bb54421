"""What measured collectives say of the terms that they are in."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from primus_ext.cost.model import CostModel
from primus_ext.cost.priced import MEASURED, Priced
from primus_ext.plan import Plan
from primus_ext.project import data_parallel
from primus_ext.project.ledger import TermName
from primus_ext.project.stage import GROUPS
from primus_ext.trace import Call, Collective, CollectiveKind, RankTrace

_COMMUNICATION = (*dict.fromkeys(GROUPS.values()), TermName.OTHER)
_BESIDE = (TermName.OPTIMIZER, TermName.RECOMPUTE)
"""Terms that hold collectives beside other work."""
Boundary = tuple[int, int, int]
"""Bytes of a message along the pipeline, and the global ranks at its ends."""


def of(
    term: TermName, modelled: str, stages: Sequence[RankTrace], cost: CostModel, plan: Plan,
    boundaries: Sequence[Boundary],
) -> str:  # fmt: skip
    """Evidence of a term, with what was measured of its collectives.

    Args:
        term: The term.
        modelled: Its evidence without measured collectives.
        stages: Trace of every pipeline rank.
        cost: Prices on the target.
        plan: The job.
        boundaries: Of the pipeline.
    """
    if cost.measured_collectives is None or term not in (*_COMMUNICATION, *_BESIDE):
        return modelled
    found = list(_prices(term, stages, cost, plan, boundaries))
    bases = list(dict.fromkeys(price.basis for price in found if price.evidence == MEASURED))
    if not bases:
        return modelled
    told = f"{MEASURED}: {cost.measured_collectives.title}, {'; '.join(bases)}"
    if term in _BESIDE:
        return f"{modelled}; collectives {told}"
    others = any(price.evidence != MEASURED and price.seconds for price in found)
    return f"{told}; what it does not reach {modelled}" if others else told


def half_width(
    stages: Sequence[RankTrace], cost: CostModel, plan: Plan, boundaries: Sequence[Boundary]
) -> float | None:
    """Of the interval on the logarithm of communication time, as measured times leave it.

    The collectives' own intervals, each weighing as much as it lasts; None where none is measured.
    """
    if cost.measured_collectives is None:
        return None
    total = weighted = 0.0
    for term in _COMMUNICATION:
        for price in _prices(term, stages, cost, plan, boundaries):
            if price.interval is not None and price.seconds:
                low, high = price.interval
                width = max(math.log(high / price.seconds), math.log(price.seconds / low))
                total, weighted = total + price.seconds, weighted + price.seconds * width
    return weighted / total if total else None


def _prices(
    term: TermName, stages: Sequence[RankTrace], cost: CostModel, plan: Plan,
    boundaries: Sequence[Boundary],
) -> Iterator[Priced]:  # fmt: skip
    """Of every collective that a term holds, equal ones more than once."""
    for trace in stages:
        calls = _calls(term, trace)
        for index in dict.fromkeys(call.op for call in calls):
            op = trace.ops[index]
            if op.collective is None:
                continue
            if term in _BESIDE or GROUPS.get(op.collective.group, TermName.OTHER) is term:
                yield cost.remote_seconds(op, trace.groups[op.collective.group])
        if term is TermName.DATA:
            for bucket in trace.buckets:
                ranks = trace.groups[bucket.group]
                asked = data_parallel.collectives_of(
                    cost, bucket, plan.parallelism.distributed_optimizer
                )
                yield from (cost.collective_seconds(c, ranks) for c in asked if c is not None)
    if term is TermName.P2P:
        for size, here, there in boundaries:
            message = Collective(kind=CollectiveKind.SEND_RECV, group="pp", bytes=size, dtype="")
            yield cost.collective_seconds(message, (here, there))


def _calls(term: TermName, trace: RankTrace) -> Iterator[Call]:
    """Calls whose collectives a term counts, as :mod:`primus_ext.project.stage` does."""
    if term is TermName.OPTIMIZER:
        yield from trace.step
        return
    for chunk in trace.chunks:
        parts = [*chunk.segments, *(s for one in chunk.microbatches for s in one.segments)]
        for call in (c for part in parts for c in (*part.forward, *part.backward)):
            again = call.phase == "recompute"
            if again if term is TermName.RECOMPUTE else not again:
                yield call


def provenance(cost: CostModel) -> dict[str, Any]:
    """What a projection says of measured collectives; nothing where there are none."""
    measured = cost.measured_collectives
    if measured is None:
        return {}
    sweep = measured.sweep
    return {
        "measured_collectives": {
            "file": measured.name, "backend": sweep.backend, "product": sweep.product,
            "accelerator": sweep.accelerator, "versions": sweep.versions,
            "processes": sweep.processes, "hosts": sweep.hosts, "settings": sweep.settings,
            "failures": list(sweep.failures),
        }
    }  # fmt: skip

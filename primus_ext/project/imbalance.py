"""How unevenly tokens fall on experts, in one layer and pooled over a step; and slow ranks.

Dispatch and combination make every rank of an expert-parallel group wait in each layer for the one
with most tokens there: the sum of the layers' maxima is what gates a step.  Where the busiest rank
changes from layer to layer, each rank's sum over the layers is far more even: that is what memory
sees, and what would gate a step if ranks did not wait in every layer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from statistics import NormalDist

from primus_ext.project.result import ExpertImbalance, Projection, Stragglers
from primus_ext.trace import ExpertLoad, RankTrace


def of_stages(stages: Sequence[RankTrace]) -> ExpertImbalance | None:
    """The busiest rank over the mean of its group; None where experts are alike.

    Args:
        stages: Trace of every pipeline rank.
    """
    per_layer: dict[str, float] = {}
    pooled, gates = [], []
    for trace in stages:
        if trace.experts is None:
            continue
        per_layer |= {name: over_mean(ranks) for name, ranks in trace.experts.layers.items()}
        layers = list(trace.experts.layers.values())
        sums = [sum(ranks) for ranks in zip(*layers, strict=True)]
        pooled.append(over_mean(sums))
        gates.append(sum(map(max, layers)) * len(sums) / max(1, sum(sums)))
    if not per_layer:
        return None
    return ExpertImbalance(
        per_layer=per_layer, largest=max(per_layer.values()), gating=max(gates), pooled=max(pooled)
    )


def over_mean(loads: Sequence[float]) -> float:
    """The largest load over the mean; 1 where there is none."""
    total = math.fsum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def even_share(load: ExpertLoad | None) -> float:
    """Tokens of a group's mean rank over those of the rank that was run, over all its layers."""
    if load is None:
        return 1.0
    total = sum(sum(ranks) for ranks in load.layers.values())
    own = sum(ranks[load.rank] for ranks in load.layers.values())
    return total / len(next(iter(load.layers.values()))) / own if own else 1.0


def gated(trace: RankTrace) -> RankTrace:
    """A trace for its times alone: every layer as its busiest expert-parallel rank runs it.

    The trace itself where the rank that was run is that one.  What runs at the end of a step is not
    in it: its calls refer to the rank's own ops.
    """
    load = trace.experts
    if load is None or not load.segments:
        return trace
    chunks = tuple(
        dataclasses.replace(chunk, segments=segments)
        for chunk, segments in zip(trace.chunks, load.segments, strict=True)
    )
    return dataclasses.replace(trace, ops=load.ops, chunks=chunks, step=(), experts=None)


def slowest_of(ranks: int, cv: float, quantile: float) -> float:
    """How many times the mean the slowest of so many independent, normally distributed times is.

    The maximum of ``n`` is below ``x`` where all are: its quantile is that of one of them at
    ``quantile ** (1 / n)``.

    Args:
        ranks: How many.
        cv: Standard deviation of one rank's time over its mean.
        quantile: Of the maximum.
    """
    return 1.0 + cv * NormalDist().inv_cdf(quantile ** (1 / ranks))


def stragglers(found: Projection, rank_cv: float) -> Stragglers:
    """What the slowest of all ranks would add to a projected step.

    Args:
        found: The projection.
        rank_cv: Standard deviation of one rank's step time over its mean.
    """
    world, step_s = found.plan.parallelism.world_size, found.throughput.step_s
    level = found.throughput.interval["level"]
    low, high = (
        (slowest_of(world, rank_cv, (1 + sign * level) / 2) - 1) * step_s for sign in (-1, 1)
    )
    return Stragglers(rank_cv=rank_cv, ranks=world, low_s=low, high_s=high, level=level)

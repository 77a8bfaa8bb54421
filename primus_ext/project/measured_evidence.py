"""What measured collectives say of the terms that they are in."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from primus_ext.cost.model import CostModel
from primus_ext.cost.priced import MEASURED, Priced
from primus_ext.project import data_parallel
from primus_ext.project.kept import Kept
from primus_ext.project.ledger import TermName
from primus_ext.project.stage import GROUPS
from primus_ext.trace import Call, Collective, CollectiveKind, RankTrace

_COMMUNICATION = (*dict.fromkeys(GROUPS.values()), TermName.OTHER)
_BESIDE = (TermName.OPTIMIZER, TermName.RECOMPUTE)
"""Terms that hold collectives beside other work."""
Boundary = tuple[int, int, int]
"""Bytes of a message along the pipeline, and the global ranks at its ends."""
ByTerm = Mapping[TermName, Sequence[Priced]]
"""Prices of the collectives that a term holds, each once."""


def prices(
    stages: Sequence[RankTrace], kept: Kept, sharded: bool, boundaries: Sequence[Boundary]
) -> ByTerm:
    """Of all collectives of a job; nothing where none is measured.

    Args:
        stages: Trace of every pipeline rank.
        kept: Prices on the target.
        sharded: Whether the optimizer is distributed.
        boundaries: Of the pipeline.
    """
    cost = kept.cost
    if cost.measured_collectives is None:
        return {}
    found: dict[TermName, list[Priced]] = defaultdict(list)
    for trace in stages:
        own = kept.of(
            trace, ("collective prices", sharded), lambda t=trace: _of_rank(t, cost, sharded)
        )
        for term, priced in own.items():
            found[term] += priced
    for size, here, there in boundaries:
        message = Collective(kind=CollectiveKind.SEND_RECV, group="pp", bytes=size, dtype="")
        found[TermName.P2P].append(cost.collective_seconds(message, (here, there)))
    return found


def _of_rank(trace: RankTrace, cost: CostModel, sharded: bool) -> ByTerm:
    found: dict[TermName, list[Priced]] = defaultdict(list)
    for index, term in dict.fromkeys(_terms(trace)):
        op = trace.ops[index]
        if op.collective is not None:
            found[term].append(cost.remote_seconds(op, trace.groups[op.collective.group]))
    for bucket in trace.buckets:
        ranks = trace.groups[bucket.group]
        for collective in data_parallel.collectives_of(cost, bucket, sharded):
            if collective is not None:
                found[TermName.DATA].append(cost.collective_seconds(collective, ranks))
    return found


def _terms(trace: RankTrace) -> Iterator[tuple[int, TermName]]:
    """Collectives that are called, and the term that counts each, as in ``stage``."""
    yield from ((call.op, TermName.OPTIMIZER) for call in trace.step)
    for chunk in trace.chunks:
        parts = [*chunk.segments, *(s for one in chunk.microbatches for s in one.segments)]
        for part in parts:
            yield from ((call.op, _term(trace, call)) for call in (*part.forward, *part.backward))


def _term(trace: RankTrace, call: Call) -> TermName:
    collective = trace.ops[call.op].collective
    if call.phase == "recompute":
        return TermName.RECOMPUTE
    return GROUPS.get(collective.group, TermName.OTHER) if collective else TermName.OTHER


def of(term: TermName, modelled: str, cost: CostModel, by_term: ByTerm) -> str:
    """Evidence of a term, with what was measured of its collectives.

    Args:
        term: The term.
        modelled: Its evidence without measured collectives.
        cost: Prices on the target.
        by_term: Of :func:`prices`.
    """
    found = by_term.get(term, ()) if term in (*_COMMUNICATION, *_BESIDE) else ()
    bases = list(dict.fromkeys(price.basis for price in found if price.evidence == MEASURED))
    if not bases or cost.measured_collectives is None:
        return modelled
    told = f"{MEASURED}: {cost.measured_collectives.title}, {'; '.join(bases)}"
    if term in _BESIDE:
        return f"{modelled}; collectives {told}"
    others = any(price.evidence != MEASURED and price.seconds for price in found)
    return f"{told}; what it does not reach {modelled}" if others else told


def half_width(by_term: ByTerm) -> float | None:
    """Of the interval on the logarithm of communication time, as measured times leave it.

    The collectives' own intervals, each weighing as much as it lasts; None where none is measured.
    """
    total = weighted = 0.0
    for price in (price for term in _COMMUNICATION for price in by_term.get(term, ())):
        if price.interval is not None and price.seconds:
            low, high = price.interval
            width = max(math.log(high / price.seconds), math.log(price.seconds / low))
            total, weighted = total + price.seconds, weighted + price.seconds * width
    return weighted / total if total else None


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

"""Expert dispatch and combine with DeepEP's or HybridEP's kernels, from what the trace counts.

A kernel sends each token once to every other node that needs it, over the NIC, and once to every
rank that needs it, over the scale-up links (there the sender on the node itself, or a GPU that
forwards).  It lasts as long as the slowest of three: the NIC, the links, and the SMs it was given,
each of which handles one row after another.
"""

from __future__ import annotations

from collections.abc import Sequence

from primus_ext.cluster import Cluster
from primus_ext.cost.libraries import library
from primus_ext.cost.placement import nic_bandwidth, placement, require_ranks
from primus_ext.cost.priced import FREE, MODEL, CostError, Priced
from primus_ext.trace import Op


def is_exchange(op: Op) -> bool:
    """Whether an op is one of these kernels."""
    return op.collective is not None and op.attr("backend") in ("deepep", "hybridep")


def seconds_of_rows(
    cluster: Cluster, backend: str, rows: float, row_bytes: float, sms: int
) -> tuple[float, float]:
    """Seconds that links and SMs need inside the scale-up domain.

    Args:
        cluster: The target.
        backend: deepep or hybridep.
        rows: Rows to ranks of the group, this one counted.
        row_bytes: Of one row on the wire.
        sms: That the kernel takes; 0 where it is not known, and no limit.
    """
    accelerator, figures = cluster.accelerator, cluster.accelerator.exchange
    links = accelerator.scale_up_bandwidth.value * figures["share"].value
    wire = rows * row_bytes / links
    if not sms or "row_s" not in figures:
        return wire, 0.0
    pace = figures.get(f"{backend}_speed")
    each = figures["row_s"].value + row_bytes / figures["sm_bandwidth"].value
    return wire, rows * each / sms / (pace.value if pace else 1.0)


def price(cluster: Cluster, op: Op, ranks: Sequence[int]) -> Priced:
    """Seconds of one dispatch or combine.

    Args:
        cluster: The target.
        op: Its collective's ``bytes`` are those of all rows to ranks; attributes ``backend``,
            ``direction``, ``node_bytes``, ``row_bytes`` and ``sms``.
        ranks: Members of the group.

    Raises:
        CostError: A rank does not exist on the target, or the accelerator has no figures for it.
    """
    collective = op.collective
    if collective is None:
        raise CostError(f"op {op.name} says nothing of its collective")
    require_ranks(cluster, collective.group, ranks)
    if len(ranks) == 1:
        return FREE
    if not cluster.accelerator.exchange:
        raise CostError(
            f"{op.attr('backend')} has no price on {cluster.name}: its kernels need GPUs"
        )
    where = placement(cluster, ranks)
    row_bytes = op.attr("row_bytes") or collective.bytes
    rows = collective.bytes / row_bytes if row_bytes else 0.0
    links, sms = seconds_of_rows(
        cluster, op.attr("backend"), rows, row_bytes, int(op.attr("sms") or 0)
    )
    start = cluster.accelerator.exchange[f"{op.attr('direction')}_start_s"].value
    terms = {"links": links, "sms": sms}
    if where.domains > 1:
        steepest = max((c.oversubscription for c in where.crossings), default=1.0)
        terms["nic"] = op.attr("node_bytes") / nic_bandwidth(cluster) * steepest
        simple = library(cluster.accelerator).protocols[-1]
        start += simple.net_tree + cluster.nic_latency_s.value
    return Priced(start + max(terms.values()), MODEL, {"latency": start, **terms})

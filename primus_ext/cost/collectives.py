"""Collectives on two tiers: the scale-up domain and the NICs.

Every GPU has its own link into the scale-up domain and its own NIC, so groups that run at the same
time on different GPUs do not share anything; what the fabric between the nodes does to them is not
modelled.  Sizes follow nccl-tests (see :class:`primus_ext.trace.Collective`).
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

from primus_ext.cluster import Cluster
from primus_ext.cost.priced import FREE, MODEL, CostError, Priced
from primus_ext.trace import Collective, CollectiveKind

BASE_LATENCY_S = 6.6e-6
"""Start of any collective (NCCL ``src/graph/tuning.cc``, ``baseLat`` of Ring/LL: 6.6 us)."""

_SCATTERING = {CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER}


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """How a group lies on the cluster."""

    size: int
    domains: int
    """Scale-up domains that it touches."""
    local: int
    """Fewest members that any of them holds: so many rings can run side by side."""


def placement(cluster: Cluster, ranks: Sequence[int]) -> Placement:
    """Where a group of global ranks lies, ranks filling nodes in order."""
    counts = Counter(rank // cluster.scale_up_domain for rank in ranks)
    return Placement(size=len(ranks), domains=len(counts), local=min(counts.values()))


def _share(cluster: Cluster, kind: CollectiveKind, members: int) -> float:
    """Share of the scale-up bandwidth that this kind reaches in a group of this size."""
    table = cluster.accelerator.scale_up_efficiency
    sizes = sorted(int(k.split("/")[1]) for k in table if k.startswith(f"{kind}/"))
    listed = [size for size in sizes if size <= members]
    key = f"{kind}/{listed[-1]}" if listed else str(kind)
    return (table.get(key) or table.get(str(kind)) or table["all"]).value


def inside_bandwidth(cluster: Cluster, kind: CollectiveKind, members: int) -> float:
    """Bytes/s per GPU and direction among ``members`` GPUs of one scale-up domain.

    In a mesh only the links to the other members count.
    """
    accelerator = cluster.accelerator
    links = 1.0
    if accelerator.scale_up_topology == "mesh":
        peers = 1 if kind is CollectiveKind.SEND_RECV else members - 1
        links = peers / (accelerator.scale_up_gpus - 1)
    return accelerator.scale_up_bandwidth.value * links * _share(cluster, kind, members)


def nic_bandwidth(cluster: Cluster) -> float:
    """Bytes/s per GPU and direction between nodes that large messages reach."""
    return cluster.nic_bandwidth.value * cluster.nic_efficiency.value


def _ring_bandwidth(cluster: Cluster, kind: CollectiveKind, where: Placement) -> float:
    """Bytes/s of all rings together: one ring enters a node for each member that it holds there."""
    inside = inside_bandwidth(cluster, kind, where.local) if where.local > 1 else math.inf
    if where.domains == 1:
        return inside
    return min(inside, where.local * nic_bandwidth(cluster))


def _hops(cluster: Cluster, inner: float, outer: float) -> float:
    inside = cluster.accelerator.scale_up_latency_s.value
    return BASE_LATENCY_S + inner * inside + outer * cluster.nic_latency_s.value


def _ring(cluster: Cluster, kind: CollectiveKind, size: int, where: Placement) -> Priced:
    """All-gather and reduce-scatter: n - 1 steps, each of size/n over every link of the ring."""
    latency = _hops(cluster, where.size - where.domains, where.domains - 1)
    wire = size * (where.size - 1) / where.size / _ring_bandwidth(cluster, kind, where)
    return Priced(latency + wire, MODEL, {"latency": latency, "wire": wire})


def _all_reduce(cluster: Cluster, kind: CollectiveKind, size: int, where: Placement) -> Priced:
    """Twice the traffic of a reduce-scatter; between nodes up and down a binary tree (latency)."""
    depth = math.ceil(math.log2(where.domains))
    latency = _hops(cluster, 2 * (where.local - 1), 2 * depth)
    wire = 2 * size * (where.size - 1) / where.size / _ring_bandwidth(cluster, kind, where)
    return Priced(latency + wire, MODEL, {"latency": latency, "wire": wire})


def _all_to_all(cluster: Cluster, kind: CollectiveKind, size: int, where: Placement) -> Priced:
    """size/n to every member; what leaves the node goes through this GPU's own NIC."""
    near = size * (where.local - 1) / where.size
    far = size * (where.size - where.local) / where.size if where.domains > 1 else 0.0
    inside = near / inside_bandwidth(cluster, kind, where.local) if near else 0.0
    outside = far / nic_bandwidth(cluster)
    latency = _hops(cluster, 1, 1 if far else 0)
    wire = max(inside, outside)
    return Priced(latency + wire, MODEL, {"latency": latency, "wire": wire})


def _message(cluster: Cluster, kind: CollectiveKind, size: int, where: Placement) -> Priced:
    """One message between two GPUs; also a broadcast, which is pipelined along a chain."""
    if where.domains == 1:
        latency = _hops(cluster, where.size - 1, 0)
        wire = size / inside_bandwidth(cluster, kind, where.size)
    else:
        latency = _hops(cluster, where.size - where.domains, where.domains - 1)
        wire = size / nic_bandwidth(cluster)
    return Priced(latency + wire, MODEL, {"latency": latency, "wire": wire})


def price(cluster: Cluster, collective: Collective, ranks: Sequence[int]) -> Priced:
    """Seconds of one collective over a group of global ranks.

    Args:
        cluster: The target.
        collective: Kind and size.
        ranks: All members of the group.

    Raises:
        CostError: The kind has no price, or a rank does not exist on the target.
    """
    where = placement(cluster, ranks)
    if max(ranks) >= cluster.world_size:
        raise CostError(
            f"rank {max(ranks)} of group {collective.group} does not exist on {cluster.name}: "
            f"it has {cluster.world_size} GPUs"
        )
    if where.size == 1:
        return FREE
    kind, size = collective.kind, collective.bytes
    if kind is CollectiveKind.ALL_REDUCE:
        return _all_reduce(cluster, kind, size, where)
    if kind in _SCATTERING:
        return _ring(cluster, kind, size, where)
    if kind is CollectiveKind.ALL_TO_ALL:
        return _all_to_all(cluster, kind, size, where)
    if kind is CollectiveKind.SEND_RECV:
        # between neighbours of a ring; the slowest pair decides
        pair = Placement(size=2, domains=min(2, where.domains), local=2 // min(2, where.domains))
        return _message(cluster, kind, size, pair)
    if kind is CollectiveKind.BROADCAST:
        return _message(cluster, kind, size, where)
    if kind is CollectiveKind.BARRIER:
        return _all_reduce(cluster, CollectiveKind.ALL_REDUCE, 0, where)
    raise CostError(f"collective {kind} has no price")

"""How a group of ranks lies on a cluster, and what its members share there.

All GPUs of a node are taken to be busy with the same collective at the same time, each in its own
group, as in any step where all ranks run the same program.  So a GPU has its share of its node's
NICs, and a group that holds ``local`` GPUs of a node has ``local`` such shares.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence

from primus_ext.cluster import Cluster
from primus_ext.cost.priced import CostError


@dataclasses.dataclass(frozen=True, slots=True)
class Crossing:
    """Switches of one tier that a group spans."""

    beyond: int
    """Members that the busiest one reaches over the switches above."""
    oversubscription: float
    nodes: int
    """Fewest nodes of the group below one of the switches."""


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """How a group lies on the cluster."""

    size: int
    domains: int
    """Scale-up domains that it touches."""
    local: int
    """Fewest members that any of them holds: so many rings can run side by side."""
    crossings: tuple[Crossing, ...] = ()

    @property
    def ring_share(self) -> float:
        """Of the NICs' bandwidth, for rings and trees.

        They cross a switch's uplinks once for each of their NICs, whatever the number of nodes
        below it, so that oversubscription counts only where it exceeds that number.
        """
        return min((min(1.0, c.nodes / c.oversubscription) for c in self.crossings), default=1.0)


def require_ranks(cluster: Cluster, group: str, ranks: Sequence[int]) -> None:
    """Refuse a group that has members which the target lacks.

    Raises:
        CostError: It has.
    """
    if max(ranks) >= cluster.world_size:
        raise CostError(
            f"rank {max(ranks)} of group {group} does not exist on {cluster.name}: it has "
            f"{cluster.world_size} GPUs"
        )


def placement(cluster: Cluster, ranks: Sequence[int]) -> Placement:
    """Where a group of global ranks lies, ranks filling nodes in order."""
    tiers = tuple((tier.nodes, tier.oversubscription.value) for tier in cluster.tiers)
    return _placement(cluster.scale_up_domain, cluster.gpus_per_node, tiers, tuple(ranks))


@functools.lru_cache(maxsize=4096)
def _placement(
    domain: int, gpus: int, tiers: tuple[tuple[int, float], ...], ranks: tuple[int, ...]
) -> Placement:
    counts = Counter(rank // domain for rank in ranks)
    crossings = []
    for nodes, oversubscription in tiers:
        below = Counter(rank // (gpus * nodes) for rank in ranks)
        if len(below) > 1:
            held = Counter(node // nodes for node in {rank // gpus for rank in ranks})
            crossings.append(
                Crossing(len(ranks) - min(below.values()), oversubscription, min(held.values()))
            )
    return Placement(len(ranks), len(counts), min(counts.values()), tuple(crossings))


def nic_bandwidth(cluster: Cluster) -> float:
    """Bytes/s per GPU and direction between nodes that large messages reach."""
    nics = cluster.nics_per_node.value / cluster.gpus_per_node
    return cluster.nic_bandwidth.value * nics * cluster.nic_efficiency.value


def share(cluster: Cluster, key: str, members: int) -> float:
    """Share of the scale-up bandwidth that an algorithm reaches in a group of this size.

    ``key/n`` is for groups of n members and fewer than the next n that is listed.  Two GPUs of a
    switch are a pair, whatever they do.
    """
    table = cluster.accelerator.collectives
    if members == 2 and cluster.accelerator.scale_up_topology == "switch":
        key = "message"
    sizes = sorted(int(k.split("/")[1]) for k in table if k.startswith(f"{key}/"))
    listed = [size for size in sizes if size <= members]
    return table[f"{key}/{listed[-1]}" if listed else key].value


def inside_bandwidth(cluster: Cluster, key: str, links: float, members: int) -> float:
    """Bytes/s per GPU and direction within a scale-up domain.

    Args:
        cluster: The target.
        key: Algorithm: ring, direct or message.
        links: Of a mesh, how many of a GPU's links are used; a switch offers all to anyone.
        members: Size of the group.
    """
    accelerator = cluster.accelerator
    part = 1.0
    if accelerator.scale_up_topology == "mesh":
        part = links / (accelerator.scale_up_gpus - 1)
    return accelerator.scale_up_bandwidth.value * part * share(cluster, key, members)

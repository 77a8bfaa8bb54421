"""Collectives: the fastest of the algorithms and protocols that NCCL or RCCL may choose.

Each is a start (the library's own base and hop latencies, times a measured factor), the bytes over
the bandwidth it reaches, and for pipelined protocols a square root of both: a message cut in k
chunks that pass p hops takes (k + p) chunk times, so that the best k leaves ``a + b*S +
2*sqrt(a*b*S)`` (e.g. Johnsson & Ho 1989); ``ramp`` is the measured part of that root.  Where the
optional package with NCCL's measured times is installed, these go first for groups of one node.

Sizes follow nccl-tests (see :class:`primus_ext.trace.Collective`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from primus_ext.cluster import Cluster
from primus_ext.cost import collective_tables
from primus_ext.cost.collective_tables import SWITCH_TYPES
from primus_ext.cost.libraries import Library, Protocol, library
from primus_ext.cost.placement import (
    Placement,
    inside_bandwidth,
    nic_bandwidth,
    placement,
    require_ranks,
    share,
)
from primus_ext.cost.priced import FREE, MODEL, TABLE, CostError, Priced
from primus_ext.trace import Collective, CollectiveKind

P2P_LL_BYTES = 16384
"""Largest message between two GPUs that goes in LL (NCCL ``NCCL_P2P_LL_THRESHOLD``)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """Time of one algorithm and protocol against the size of the buffer."""

    name: str
    start: float
    """Seconds."""
    rate: float
    """Seconds per byte."""
    root: float = 0.0
    """Seconds per square root of a byte."""
    largest: float = math.inf
    """Bytes up to which the library takes it."""

    def seconds(self, size: float) -> float:
        """Of a buffer of ``size`` bytes; infinite where it is not taken."""
        if size > self.largest:
            return math.inf
        return self.start + self.rate * size + self.root * math.sqrt(size)


def _line(
    cluster: Cluster, name: str, base: float, hops: float, rate: float, pipelined: bool,
    largest: float = math.inf,
) -> Line:  # fmt: skip
    """``base`` and ``hops`` in seconds, the latter what the chunks pass through."""
    ramp = cluster.accelerator.collectives["ramp"].value if pipelined else 0.0
    return Line(name, base + hops, rate, 2 * ramp * math.sqrt(hops * rate), largest)


class _Group:
    """What all algorithms of one group need."""

    def __init__(self, cluster: Cluster, where: Placement) -> None:
        self.cluster, self.where = cluster, where
        self.library: Library = library(cluster.accelerator)
        self.start = cluster.accelerator.collectives["start"].value
        self.scale = cluster.accelerator.collectives["latency"].value
        self.pcie = cluster.accelerator.scale_up_topology == "pcie"
        self.protocols = [
            p for p in self.library.protocols if not (self.pcie and p.name == "LL128")
        ]

    def hop(self, protocol: Protocol, tree: bool = False) -> float:
        """One step inside a node; what Simple waits for besides is part of the ramp."""
        scale = 1.0 if protocol.name == "Simple" else self.scale
        if self.pcie:
            return scale * (protocol.pci_tree if tree else protocol.pci_ring)
        return scale * (protocol.hop_tree if tree else protocol.hop_ring)

    def net(self, protocol: Protocol, tree: bool = False) -> float:
        """One step between nodes; a group of one GPU a node pays the tree's."""
        exposed = tree or self.where.local == 1
        step = protocol.net_tree if exposed else protocol.net_ring
        return step + protocol.net_posts * self.cluster.nic_latency_s.value

    def ring_bandwidth(self) -> float:
        """Bytes/s of all rings together: one enters a domain for each member that it holds."""
        where = self.where
        if where.domains == 1:
            return inside_bandwidth(self.cluster, "ring", where.size - 1, where.size)
        inside = math.inf
        if where.local > 1:
            inside = inside_bandwidth(self.cluster, "ring", where.local, where.local)
        return min(inside, where.local * self.nic())

    def nic(self) -> float:
        """Bytes/s of one GPU in rings and trees that span nodes."""
        return nic_bandwidth(self.cluster) * self.where.ring_share

    def capped(self, protocol: Protocol, bandwidth: float) -> float:
        """What a protocol reaches where Simple reaches ``bandwidth``."""
        reached = bandwidth * protocol.share
        if protocol.name == "LL" and self.where.domains > 1:
            reached = min(reached, self.library.ll_net_bandwidth[self.where.domains > 2])
        return reached


def _rings(group: _Group, passes: int) -> list[Line]:
    """Rings: ``passes`` times round (1: all-gather, reduce-scatter; 2: all-reduce)."""
    where, lines = group.where, []
    outer = passes * (where.domains - 1)
    inner = passes * (where.size - 1) - outer
    volume = passes * (where.size - 1) / where.size
    for protocol in group.protocols:
        hop, simple = group.hop(protocol), protocol.name == "Simple"
        if outer:
            hop = max(hop, group.library.net_overhead * (3 if simple else 1))
        base = group.start * protocol.base_ring
        hops = inner * hop + outer * group.net(protocol)
        if outer and simple and passes == 2:
            base, hops = base * group.library.ring_plateau, hops * group.library.ring_plateau
        rate = volume / group.capped(protocol, group.ring_bandwidth())
        lines.append(_line(group.cluster, f"ring {protocol.name}", base, hops, rate,
                           protocol.pipelined))  # fmt: skip
    return lines


def _tree_rate(group: _Group) -> float:
    """Seconds per byte between nodes.

    Two trees, each node inside one of them and leaf of the other, send twice the buffer; two nodes
    only exchange their sums.
    """
    where = group.where
    if where.domains == 1:
        return 0.0
    return (1 if where.domains == 2 else 2) / (where.local * group.nic())


def _trees(group: _Group) -> list[Line]:
    """All-reduce up and down a chain in each node and a binary tree over the nodes."""
    where, lines = group.where, []
    depth = math.floor(math.log2(where.domains))
    for protocol in group.protocols:
        base = group.start * protocol.base_tree
        hops = 2 * ((where.local - 1) * group.hop(protocol, True)
                    + depth * group.net(protocol, True))  # fmt: skip
        rate = _tree_rate(group)
        if where.local > 1:
            links = where.local - (where.domains == 1)
            inside = inside_bandwidth(group.cluster, "ring", links, where.local)
            rate = max(rate, 2 / (inside * group.library.tree_share))
        rate = 1 / group.capped(protocol, 1 / rate)
        lines.append(_line(group.cluster, f"tree {protocol.name}", base, hops, rate,
                           protocol.pipelined))  # fmt: skip
    return lines


def _in_switch(group: _Group, dtype: str) -> list[Line]:
    """NVLS: the switch adds.

    A GPU sends its buffer to be read and its share of the sum, S + S/n bytes each way; over several
    domains, a tree of them.
    """
    where, accelerator = group.where, group.cluster.accelerator
    if "nvls" not in accelerator.collectives or where.local <= 2 or dtype not in SWITCH_TYPES:
        return []
    bandwidth = accelerator.scale_up_bandwidth.value * share(group.cluster, "nvls", where.local)
    rate = max((1 + 1 / where.local) / bandwidth, _tree_rate(group))
    first = group.library.nvls_start  # what chunks wait for; a slower start is paid once
    base = (accelerator.collectives["nvls_start"].value - 1) * first
    hops = first
    if where.domains > 1:
        posts = 2 * group.cluster.nic_latency_s.value
        hops += 2 * math.floor(math.log2(where.domains)) * (group.library.nvls_net + posts)
    return [_line(group.cluster, "nvls", base, hops, rate, True)]


def _all_pairs(group: _Group) -> list[Line]:
    """All-reduce of a mesh in two steps, to and from every peer, in LL."""
    where = group.where
    if not group.library.all_pairs or where.domains > 1:
        return []
    protocol = group.protocols[0]
    bandwidth = inside_bandwidth(group.cluster, "ring", where.size - 1, where.size)
    rate = 2 * (where.size - 1) / where.size / (bandwidth * protocol.share)
    base = group.start * protocol.base_ring
    return [Line("all pairs LL", base + 2 * group.hop(protocol), rate)]


def _direct(group: _Group) -> list[Line]:
    """All-to-all: size/n straight to every member; what leaves the node takes this GPU's NICs."""
    where, cluster, lines = group.where, group.cluster, []
    near = (where.local - 1) / where.size
    far = (where.size - where.local) / where.size if where.domains > 1 else 0.0
    inside = inside_bandwidth(cluster, "direct", max(1, where.local - 1), where.local)
    outside = far / nic_bandwidth(cluster)
    for crossing in where.crossings:
        beyond = crossing.beyond / where.size * crossing.oversubscription
        outside = max(outside, beyond / nic_bandwidth(cluster))
    for protocol in group.protocols:
        if protocol.name == "LL128":  # point-to-point has LL and Simple only
            continue
        hops = group.net(protocol) if far else group.hop(protocol)
        rate = max(near / inside, outside) / protocol.share
        largest = math.inf if protocol.pipelined else P2P_LL_BYTES * where.size
        lines.append(_line(cluster, f"direct {protocol.name}", group.start * protocol.base_ring,
                           hops, rate, protocol.pipelined, largest))  # fmt: skip
    return lines


def _chain(group: _Group, steps: int) -> list[Line]:
    """One message, passed on ``steps`` times: send/recv, and a broadcast along a ring."""
    where, cluster, lines = group.where, group.cluster, []
    outer = where.domains - 1
    if outer:
        bandwidth = nic_bandwidth(cluster) / max(
            (c.oversubscription for c in where.crossings), default=1.0
        )
    else:
        bandwidth = inside_bandwidth(cluster, "message", 1, where.size)
    if steps > 1:
        bandwidth = group.ring_bandwidth()
    for protocol in group.protocols:
        if protocol.name == "LL128" and steps == 1:
            continue
        hops = (steps - outer) * group.hop(protocol) + outer * group.net(protocol)
        largest = math.inf if protocol.pipelined or steps > 1 else P2P_LL_BYTES
        lines.append(_line(cluster, f"chain {protocol.name}", group.start * protocol.base_ring,
                           hops, 1 / group.capped(protocol, bandwidth), protocol.pipelined,
                           largest))  # fmt: skip
    return lines


def lines(cluster: Cluster, kind: CollectiveKind, dtype: str, where: Placement) -> list[Line]:
    """All that the library may choose from.

    Args:
        cluster: The target.
        kind: The collective.
        dtype: Of its numbers; the switch adds only some.
        where: The group, of two members or more.

    Raises:
        CostError: The kind has no price.
    """
    group = _Group(cluster, where)
    if kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.BARRIER):
        return [*_rings(group, 2), *_trees(group), *_in_switch(group, dtype), *_all_pairs(group)]
    if kind in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER):
        return _rings(group, 1)
    if kind is CollectiveKind.ALL_TO_ALL:
        return _direct(group)
    if kind is CollectiveKind.BROADCAST:
        return _chain(group, where.size - 1)
    if kind is CollectiveKind.SEND_RECV:
        # between neighbours of a ring; the slowest pair decides
        domains = min(2, where.domains)
        pair = Placement(2, domains, 2 // domains, where.crossings if domains == 2 else ())
        return _chain(_Group(cluster, pair), 1)
    raise CostError(f"collective {kind} has no price")


Known = dict[tuple, tuple[Placement, list[Line]]]
"""What was found for kinds, number formats and groups of one cluster."""


def price(
    cluster: Cluster, collective: Collective, ranks: Sequence[int], known: Known | None = None
) -> Priced:
    """Seconds of one collective over a group of global ranks.

    Args:
        cluster: The target.
        collective: Kind and size.
        ranks: All members of the group.
        known: Of this cluster; filled and used again.

    Raises:
        CostError: The kind has no price, or a rank does not exist on the target.
    """
    require_ranks(cluster, collective.group, ranks)
    if len(ranks) == 1:
        return FREE
    if not cluster.accelerator.collectives:
        raise CostError(
            f"{collective.kind} over {len(ranks)} ranks of group {collective.group} has no price: "
            f"collectives on {cluster.name} have no model and are measured "
            f"(primus-ext collectives --processes {cluster.gpus_per_node} --out FILE there, then "
            "+projection.collectives=FILE)"
        )
    size = 0 if collective.kind is CollectiveKind.BARRIER else collective.bytes
    key = (collective.kind, collective.dtype, tuple(ranks))
    if known is None or (found := known.get(key)) is None:
        where = placement(cluster, ranks)
        found = where, lines(cluster, collective.kind, collective.dtype, where)
        if known is not None:
            known[key] = found
    where, choices = found

    def best(asked: float) -> Line:
        return min(choices, key=lambda line: line.seconds(asked))

    line, evidence = best(size), MODEL
    seconds = line.seconds(size)
    if where.domains == 1 and size and cluster.accelerator.measured_tables:
        curve = collective_tables.curve(
            cluster.accelerator.name, collective.kind, collective.dtype, where.size
        )
        if curve:
            seconds = collective_tables.seconds(curve, size, lambda s: best(s).seconds(s))
            evidence = TABLE
    start = min(line.start, seconds)
    return Priced(seconds, evidence, {"latency": start, "wire": seconds - start})

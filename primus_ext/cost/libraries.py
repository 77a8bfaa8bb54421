"""Start-up and hop latencies of NCCL and RCCL, as their own tuning models state them.

Sources: NVIDIA/nccl 5067397 ``src/graph/tuning.cc`` (``baseLatencies``, ``hwLatencies``,
``llMaxBws``, ``ncclTopoGetAlgoTime``) and ``src/graph/topo.h``; ROCm/rccl 0cbce2a
``src/graph/tuning.cc`` (``baseLat``, ``tuning_model_5``, the one of eight gfx94x GPUs).  RCCL's
bandwidth and correction tables steer its choice and don't describe bandwidths: not taken.
"""

from __future__ import annotations

import dataclasses

from primus_ext.cluster import Accelerator
from primus_ext.cost.priced import CostError

_US = 1e-6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """How data moves between neighbours: LL, LL128 or Simple.  Seconds."""

    name: str
    base_ring: float
    base_tree: float
    hop_ring: float
    """One step of a ring over NVLink or xGMI."""
    hop_tree: float
    pci_ring: float
    pci_tree: float
    net_ring: float
    """One step between nodes."""
    net_tree: float
    share: float
    """Of the bandwidth that Simple reaches: flags travel with the data."""
    pipelined: bool
    """A message is cut in chunks that grow with it, so that its time has a square-root term."""
    net_posts: int = 1
    """Messages that a step between nodes takes (``ncclTopoTuneModel``: Simple flushes)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """One collective library."""

    name: str
    protocols: tuple[Protocol, ...]
    nvls_start: float
    """All-reduce in the switch, one node (``hwLatencies`` of NVLS; it has no base)."""
    nvls_net: float
    """One step between nodes of NVLS trees."""
    net_overhead: float
    """Least time of any step of a ring that spans nodes (``getNetOverhead``)."""
    ring_plateau: float
    """Factor on a Simple all-reduce ring's start between nodes (``ncclTopoGetAlgoTime``)."""
    ll_net_bandwidth: tuple[float, float]
    """Bytes/s that LL reaches between two nodes and between more (``llMaxBws``)."""
    tree_share: float
    """Of the bandwidth inside a node, for trees (NCCL: 0.92 in ``ncclTopoTuneModel``; RCCL:
    ``bwRatio`` of Tree/Simple for more than two nodes)."""
    all_pairs: bool
    """Small all-reduces of a mesh go straight to every peer, in two steps."""


def _protocol(
    name: str, base: tuple[float, float], inside: tuple[float, float], pci: tuple[float, float],
    net: tuple[float, float], share: float, pipelined: bool, posts: int = 1,
) -> Protocol:  # fmt: skip
    """From the tables' order, tree before ring, in microseconds."""
    return Protocol(
        name=name, base_tree=base[0] * _US, base_ring=base[1] * _US, hop_tree=inside[0] * _US,
        hop_ring=inside[1] * _US, pci_tree=pci[0] * _US, pci_ring=pci[1] * _US,
        net_tree=net[0] * _US, net_ring=net[1] * _US, share=share, pipelined=pipelined,
        net_posts=posts,
    )  # fmt: skip


# LL's share on NVIDIA: llMaxBws over the ring's NVLink bandwidth of topo.h is 0.37 (A100), 0.38
# (H100) and 0.39 (B200); LL128 carries 120 of 128 bytes, 0.92 in the tuning model.
NCCL = Library(
    name="nccl",
    protocols=(
        _protocol("LL", (6.8, 6.6), (0.6, 0.6), (1.0, 1.0), (5.0, 2.7), 0.38, False),
        _protocol("LL128", (14.0, 14.0), (1.25, 1.9), (1.9, 2.5), (8.5, 4.0), 0.92, True),
        _protocol("Simple", (8.4, 8.4), (4.0, 3.4), (4.0, 5.7), (14.0, 14.0), 1.0, True, 2),
    ),
    nvls_start=25 * _US,
    nvls_net=20.9 * _US,
    net_overhead=1 * _US,
    ring_plateau=1.4,
    ll_net_bandwidth=(39e9, 20.4e9),
    tree_share=0.92,
    all_pairs=False,
)

# LL sends a flag with every word, which leaves half.  LL128 is off by default on gfx94x and later.
# The ring's step between nodes in Simple stands at 320 us, to keep it from being chosen: that of
# the tree is taken.  All pairs: rome_models.cc, mscclEnabled of the eight-GPU models.
RCCL = Library(
    name="rccl",
    protocols=(
        _protocol("LL", (12.0, 12.0), (0.9, 0.8), (2.2, 2.2), (10.5, 9.5), 0.5, False),
        _protocol("Simple", (17.0, 17.0), (2.3, 2.1), (5.7, 5.7), (25.0, 25.0), 1.0, True, 2),
    ),
    nvls_start=0.0,
    nvls_net=0.0,
    net_overhead=1 * _US,
    ring_plateau=1.4,
    ll_net_bandwidth=(39e9, 20.4e9),
    tree_share=0.59,
    all_pairs=True,
)


def library(accelerator: Accelerator) -> Library:
    """The one that a vendor's stack uses.

    Raises:
        CostError: There is none that has a model here.
    """
    if accelerator.vendor not in ("amd", "nvidia"):
        raise CostError(f"collectives of {accelerator.name} have no model: they must be measured")
    return RCCL if accelerator.vendor == "amd" else NCCL

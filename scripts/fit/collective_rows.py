"""Measured collectives as (cluster, kind, bytes, ranks, seconds), from all evidence.

Two kinds of sources: the evidence file of published nccl-tests and rccl-tests logs, and the NCCL
tables of the optional package ``aiconfigurator-core`` where it is installed.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from primus_ext.cluster import Cluster
from primus_ext.cluster_data import load_cluster
from primus_ext.cluster_files import FABRICS
from primus_ext.cost.collective_tables import SYSTEMS, rows
from primus_ext.trace import CollectiveKind

PRODUCTS = {
    "A100-SXM": "a100", "A100-SXM-40": "a100_40gb", "A100-SXM-80": "a100",
    "A100-PCIe-80": "a100_pcie", "H100-SXM": "h100", "H200": "h200", "B200": "b200",
    "GB200": "gb200", "GB300": "gb300", "MI300X": "mi300x", "MI325X": "mi325x",
    "MI350X": "mi350x", "MI355X": "mi355x",
}  # fmt: skip
KINDS = {
    "all_reduce": CollectiveKind.ALL_REDUCE, "all_gather": CollectiveKind.ALL_GATHER,
    "reduce_scatter": CollectiveKind.REDUCE_SCATTER, "alltoall": CollectiveKind.ALL_TO_ALL,
    "sendrecv": CollectiveKind.SEND_RECV,
}  # fmt: skip
# Not what a library measured for one call: acceptance thresholds, fits of others, recalled figures.
_REFUSED = ("threshold", "memory", "fitted")
# Kernels of serving frameworks, not of NCCL or RCCL.
_OTHER_KERNELS = ("custom all-reduce",)
_NO_SWITCH = "NCCL_NVLS_ENABLE=0"
# Scored, but not fitted: the evidence file itself calls them so.
_UNUSUAL = ("old, untuned", "setup-specific")
# What stands as ``nic`` in the evidence: fabric, bytes/s of a NIC, NICs of a host.
NICS = {
    "32x100G EFA": ("efa", 12.5e9, 32), "4x100G EFA": ("efa", 12.5e9, 4),
    "8x400G EFA": ("efa", 50e9, 8), "8x200G GPUDirect-TCPXO": ("tcpxo", 25e9, 8),
    "4xHDR200 IB": ("infiniband", 25e9, 4), "8x mlx5 RoCE 400G": ("roce", 50e9, 8),
    "not stated (8x400G class)": ("roce", 50e9, 8),
    "8x Broadcom Thor2 400G RoCE": ("roce", 50e9, 8), "400G class": ("roce", 50e9, 8),
    "8x Pollara 400 AINIC": ("roce", 50e9, 8), "8x400G AINIC": ("roce", 50e9, 8),
    "8x400G RoCE per host, 2 racks": ("roce", 50e9, 8),
    "8x400G (CX8) per host, different NVLink domains": ("roce", 50e9, 8),
}  # fmt: skip
# Hosts that share an NVLink domain, where it is not that of the accelerator's rack.
_DOMAINS = {"8x400G RoCE per host, 2 racks": 64,
            "8x400G (CX8) per host, different NVLink domains": 4}  # fmt: skip
# TransferBench, 64 MiB a transfer: kind, GPUs, bytes.
_LINKS = {
    ("p2p", "rccl_blog"): (CollectiveKind.SEND_RECV, 2, 64 * 2**20),
    ("p2p_all_pairs", "rccl_blog"): (CollectiveKind.ALL_TO_ALL, 8, 8 * 64 * 2**20),
}
SMALLEST = 1024
"""Bytes: below lie latencies alone, which no training step has."""


@dataclasses.dataclass(frozen=True, slots=True)
class Measurement:
    """One figure."""

    source: str
    accelerator: str
    fabric: str
    """The network between the nodes; '' within a scale-up domain."""
    cluster: Cluster
    kind: CollectiveKind
    dtype: str
    bytes: int
    ranks: tuple[int, ...]
    seconds: float
    usual: bool = True
    """Whether it counts in the fit."""


@functools.cache
def _cluster(accelerator: str, nodes: int, gpus: int, nic: str) -> Cluster:
    """The cluster that a row was measured on; without a network's name, the usual one."""
    network: dict[str, Any] = {}
    if nic in NICS:
        fabric, bandwidth, count = NICS[nic]
        network = {"fabric": fabric, "nic_bandwidth": bandwidth, "nics_per_node": count}
    if nic in _DOMAINS:
        network["scale_up_domain"] = _DOMAINS[nic]
    return load_cluster(accelerator, nodes, gpus, network)


def published(path: Path) -> Iterator[Measurement]:
    """The collectives of an evidence file."""
    for point in yaml.safe_load(path.read_text(encoding="utf-8"))["points"]:
        if (link := _link(point)) is not None:
            yield link
        size = re.match(r"(\d+) B$", str(point["shape"]))
        software = str(point.get("sw") or "")
        if point["op"] not in KINDS or point["gpu"] not in PRODUCTS or not size:
            continue
        if any(word in str(point.get("conf", "")) for word in _REFUSED):
            continue
        if any(word in software for word in _OTHER_KERNELS) or int(size[1]) < SMALLEST:
            continue
        gpus, nodes, nic = int(point["gpus"]), int(point["nodes"]), str(point.get("nic") or "")
        accelerator, kind = PRODUCTS[point["gpu"]], KINDS[point["op"]]
        cluster = _cluster(accelerator, nodes, gpus // nodes, nic)
        passes = {"all_reduce": 2 * (gpus - 1) / gpus, "sendrecv": 1.0}
        factor = passes.get(point["op"], (gpus - 1) / gpus)
        seconds = (
            float(point["us"]) * 1e-6
            if point.get("us")
            else int(size[1]) * factor / (float(point["value"]) * 1e9)
        )
        remarks = software + str(point.get("note", ""))
        yield Measurement(
            source=str(point["src"]), accelerator=accelerator,
            fabric=_fabric(cluster, nic), cluster=cluster, kind=kind,
            dtype="int8" if _NO_SWITCH in software else str(point["dtype"]),
            bytes=int(size[1]), ranks=tuple(range(gpus)), seconds=seconds,
            usual=not any(word in remarks for word in _UNUSUAL),
        )  # fmt: skip


def _link(point: dict[str, Any]) -> Measurement | None:
    """What kernels (not copy engines) move over one link, or over all of a mesh at once."""
    if (point["op"], point["src"]) not in _LINKS:
        return None
    kind, gpus, size = _LINKS[point["op"], point["src"]]
    near = (gpus - 1) / gpus if kind is CollectiveKind.ALL_TO_ALL else 1.0
    accelerator = PRODUCTS[point["gpu"]]
    return Measurement(
        source=str(point["src"]), accelerator=accelerator, fabric="",
        cluster=_cluster(accelerator, 1, 8, ""), kind=kind, dtype="bf16", bytes=size,
        ranks=tuple(range(gpus)), seconds=size * near / (float(point["value"]) * 1e9),
    )  # fmt: skip


def _fabric(cluster: Cluster, nic: str) -> str:
    """The network that a run over all of a cluster uses; '' inside one scale-up domain."""
    if cluster.world_size <= cluster.scale_up_domain:
        return ""
    return NICS[nic][0] if nic in NICS else FABRICS[cluster.accelerator.vendor]


def tabled() -> Iterator[Measurement]:
    """The NCCL tables of the optional package; nothing where it is not installed."""
    for accelerator in SYSTEMS:
        for (kind, dtype, gpus), curve in rows(accelerator).items():
            cluster = _cluster(accelerator, 1, gpus, "")
            for size, seconds in curve:
                if size >= SMALLEST:
                    yield Measurement(
                        source="aic", accelerator=accelerator, fabric="", cluster=cluster,
                        kind=kind, dtype=dtype, bytes=size, ranks=tuple(range(gpus)),
                        seconds=seconds,
                    )  # fmt: skip

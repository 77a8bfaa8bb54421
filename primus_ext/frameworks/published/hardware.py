"""The target of a run."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from primus_ext.frameworks.published.draft import Draft, NotProjectable

# Products in runs files, and the accelerator that stands for each.
ACCELERATORS = {
    "A100-40GB-SXM": "a100_40gb",
    "A100-80GB-SXM": "a100",
    "A100-SXM": "a100",
    "A100-80GB-PCIe": "a100_pcie",
    "H100-80GB-SXM": "h100",
    "H100-96GB-HBM2e-500W": "h100_hbm2e",
    "H200-141GB-SXM": "h200",
    "B200-180GB": "b200",
    "B300": "b300",
    "GB200": "gb200",
    "GB300": "gb300",
    "MI300X": "mi300x",
    "MI325X": "mi325x",
    "MI350X": "mi350x",
    "MI355X": "mi355x",
}


_GBIT = 1e9 / 8
"""Bytes/s."""
# What a run says of its network between nodes: NICs of a node, all of a node, one GPU's.
_NICS = re.compile(r"(\d+)x (?:[A-Z]+ )?(\d+) Gb/s [\w-]+ per node")
_NODE = re.compile(r"(\d+) Gb(?:/s|ps) (?:per node|node-node)")
_GPU = re.compile(r"(\d+) Gb/s [\w-]+ per GPU")


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """Accelerator by name, how many there were, and what is stated of their network."""

    accelerator: str
    nodes: int
    gpus_per_node: int
    network: dict[str, Any]


def target(draft: Draft) -> Target:
    """The target of a run.

    Raises:
        NotProjectable: no data for the accelerator, or nodes that are not full.
    """
    hardware = draft.run["hardware"]
    gpu, count = draft.stated(hardware, "gpu"), draft.stated(hardware, "num_gpus")
    accelerator = ACCELERATORS.get(gpu)
    if accelerator is None:
        raise NotProjectable(f"accelerator {gpu} has no data")
    per_node = min(draft.stated(hardware, "gpus_per_node"), count)
    if count % per_node:
        raise NotProjectable(f"{count} GPUs don't fill nodes of {per_node}")
    return Target(accelerator, count // per_node, per_node, network(hardware, per_node))


def network(hardware: dict[str, Any], gpus_per_node: int) -> dict[str, Any]:
    """The network that a run states, as :func:`primus_ext.cluster_data.load_cluster` takes it.

    Args:
        hardware: Of the run; ``interconnect`` is prose.
        gpus_per_node: Of the target.
    """
    words = str(hardware.get("interconnect") or "")
    if not hardware.get("interconnect_stated"):
        return {}
    if found := _NICS.search(words):
        count, speed = int(found[1]), float(found[2])
        return {"nics_per_node": count, "nic_bandwidth": speed * _GBIT}
    if found := _GPU.search(words):
        return {"nics_per_node": gpus_per_node, "nic_bandwidth": float(found[1]) * _GBIT}
    if found := _NODE.search(words):
        speed = float(found[1]) * _GBIT / gpus_per_node
        return {"nics_per_node": gpus_per_node, "nic_bandwidth": speed}
    return {}

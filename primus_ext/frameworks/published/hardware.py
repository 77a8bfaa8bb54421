"""The target of a run."""

from __future__ import annotations

import dataclasses

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


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """Accelerator by name, and how many there were."""

    accelerator: str
    nodes: int
    gpus_per_node: int


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
    return Target(accelerator, count // per_node, per_node)

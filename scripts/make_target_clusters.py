"""Write the files of the ``target_cluster`` group: every accelerator in every usual size.

    python scripts/make_target_clusters.py

A target of another size is a file of the same three keys in a ``target_cluster`` folder of the
user's own configuration.
"""

from __future__ import annotations

import sys
from pathlib import Path

ACCELERATORS = {
    "a100": 8, "a100_40gb": 8, "a100_pcie": 8, "h100": 8, "h100_hbm2e": 8, "h200": 8, "b200": 8,
    "b300": 8, "gb200": 4, "gb300": 4, "mi300x": 8, "mi325x": 8, "mi350x": 8, "mi355x": 8,
    "cpu": 8,
}  # fmt: skip
"""GPUs of a host, by accelerator."""
ONE_HOST = ("cpu",)
"""Accelerators that are the machine at hand."""
GPUS_PER_NODE = (1, 2, 4)
"""Parts of one node."""
NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Whole hosts."""
FOLDER = Path(__file__).resolve().parent.parent / "hydra_conf" / "target_cluster" / "target_cluster"
_TEXT = """\
# @package hydra.callbacks.primus_projection.target_cluster
# Written by scripts/make_target_clusters.py
accelerator: {accelerator}
nodes: {nodes}
gpus_per_node: {gpus}
"""


def shapes(host: int, nodes: tuple[int, ...] = NODES) -> list[tuple[int, int]]:
    """Nodes and GPUs per node of the usual sizes.

    Args:
        host: GPUs of a whole host.
        nodes: Numbers of whole hosts.
    """
    parts = [(1, gpus) for gpus in GPUS_PER_NODE if gpus < host]
    return parts + [(count, host) for count in nodes]


def files() -> dict[str, str]:
    """File name to content, for every target."""
    return {
        f"{accelerator}_{nodes}x{gpus}.yaml": _TEXT.format(
            accelerator=accelerator, nodes=nodes, gpus=gpus
        )
        for accelerator, host in ACCELERATORS.items()
        for nodes, gpus in shapes(host, (1,) if accelerator in ONE_HOST else NODES)
    }


def main() -> None:
    """Write all files and remove those that are no target any more."""
    wanted = files()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in FOLDER.glob("*.yaml"):
        if path.name not in wanted:
            path.unlink()
    for name, text in wanted.items():
        (FOLDER / name).write_text(text)
    sys.stdout.write(f"{len(wanted)} files in {FOLDER}\n")


if __name__ == "__main__":
    main()

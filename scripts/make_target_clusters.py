"""Write the files of the ``target_cluster`` group: every accelerator in every usual size.

    python scripts/make_target_clusters.py

A target of another size is a file of the same three keys in a ``target_cluster`` folder of the
user's own configuration.
"""

from __future__ import annotations

import sys
from pathlib import Path

ACCELERATORS = ("a100", "h100", "h200", "b200", "mi300x", "mi325x", "mi355x")
GPUS_PER_NODE = (1, 2, 4)
"""Parts of one node."""
NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Whole nodes of 8."""
SHAPES = (*((1, gpus) for gpus in GPUS_PER_NODE), *((nodes, 8) for nodes in NODES))
FOLDER = Path(__file__).resolve().parent.parent / "hydra_conf" / "target_cluster" / "target_cluster"
_TEXT = """\
# @package hydra.callbacks.primus_projection.target_cluster
# Written by scripts/make_target_clusters.py
accelerator: {accelerator}
nodes: {nodes}
gpus_per_node: {gpus}
"""


def files() -> dict[str, str]:
    """File name to content, for every target."""
    return {
        f"{accelerator}_{nodes}x{gpus}.yaml": _TEXT.format(
            accelerator=accelerator, nodes=nodes, gpus=gpus
        )
        for accelerator in ACCELERATORS
        for nodes, gpus in SHAPES
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

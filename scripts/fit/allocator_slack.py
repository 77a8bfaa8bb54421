"""Recompute the allocator slack of ``primus_ext/project/memory.py`` from published runs.

    python scripts/fit/allocator_slack.py RUNS.yaml

RUNS.yaml: a list of runs; those with ``measured.per_rank`` give torch's highest allocated and
reserved bytes of each rank.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import yaml


def main() -> None:
    """Print the quantiles of reserved / allocated - 1 over all ranks."""
    parser = argparse.ArgumentParser(description="Recompute the allocator slack")
    parser.add_argument("runs", type=Path)
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    runs = yaml.load(parser.parse_args().runs.read_text(encoding="utf-8"), Loader=loader)
    slack, used = [], set()
    for run in runs:
        for rank in ((run.get("measured") or {}).get("per_rank") or {}).values():
            allocated, reserved = rank.get("max_allocated_gib"), rank.get("max_reserved_gib")
            if allocated and reserved:
                slack.append(reserved / allocated - 1)
                used.add(run["id"])
    low, middle, high = np.quantile(slack, [0.1, 0.5, 0.9])
    print(f"{len(slack)} ranks of {len(used)} runs: 10 % {low:.3f}, median {middle:.3f}, "
          f"90 % {high:.3f}, largest {max(slack):.3f}")  # fmt: skip


if __name__ == "__main__":
    main()

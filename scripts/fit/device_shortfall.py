"""Recompute the missing shares of ``primus_ext/project/shortfall.py`` from published runs.

    python scripts/fit/device_shortfall.py RUNS.yaml [RUNS.yaml ...]

Projects every run of a mixture of experts on an AMD GPU that states the memory of its device.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from primus_ext.cluster_data import load_accelerator
from primus_ext.runner import peaks, runs, validate

DISPATCHER = "--moe-token-dispatcher-type"


def chosen(paths: list[Path]) -> dict[str, dict[str, Any]]:
    """Runs by id that state what is needed; of equal ids the one of the last file."""
    found = {}
    for run in (run for path in paths for run in runs.load(path)):
        if peaks.DEVICE not in peaks.published(run) or run.get("workload") != "pretrain":
            continue
        try:
            nearest = validate.nearest_program(run)
        except validate.Skipped:
            continue
        amd = load_accelerator(nearest.accelerator).vendor == "amd"
        if amd and "--num-experts" in nearest.argv:
            found[run["id"]] = run
    return found


def main() -> None:
    """Print the share of every run that is missing, and the largest by dispatcher."""
    parser = argparse.ArgumentParser(description="Recompute what device memory is missing")
    parser.add_argument("runs", type=Path, nargs="+")
    wanted = chosen(parser.parse_args().runs)
    projected = validate.project_runs(list(wanted.values()), lambda *_: None)
    largest: dict[str, float] = defaultdict(float)
    for name, one in projected.items():
        if isinstance(one, str):
            sys.stdout.write(f"{name}: skipped: {one}\n")
            continue
        measured = peaks.published(wanted[name])[peaks.DEVICE]
        missing = 1 - one.peaks[peaks.DEVICE] / measured
        argv = one.nearest.argv
        dispatcher = argv[argv.index(DISPATCHER) + 1]
        largest[dispatcher] = max(largest[dispatcher], missing)
        sys.stdout.write(f"{name}: {dispatcher}, {missing:.3f} of {measured / 2**30:.1f} GiB\n")
    sys.stdout.write(f"largest: {', '.join(f'{k} {v:.3f}' for k, v in largest.items())}\n")


if __name__ == "__main__":
    main()

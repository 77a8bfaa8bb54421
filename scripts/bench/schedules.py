"""CPU time of pipeline schedules, in milliseconds and units.

    python scripts/bench/schedules.py

Llama-3.1-70B on 64 GPUs (tp 4, pp 4, 32 microbatches) from a trace made by arithmetic: one step's
schedule alone, warm; the whole projection; all schedules compared; its timeline.json.  Then the
largest schedule: 16 stages x 8 chunks x 256 microbatches.  A unit is the CPU time of the fixed
pure-Python loop of ``cold_projection.py``.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from cold_projection import unit_s

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from primus_ext.cluster_data import load_cluster
from primus_ext.project import compose
from primus_ext.project.programs import Shape
from primus_ext.project.schedule import simulate_repeating
from primus_ext.report import step_timeline
from tests.synthetic import Job, plan, traces

REPEATS = 7


def best(work: Callable[[], object]) -> float:
    """Least CPU seconds of a few runs; the first is not counted."""
    work()
    found = []
    for _ in range(REPEATS):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return min(found)


def alone(pp: int, vpp: int, microbatches: int) -> Callable[[], object]:
    """One step's schedule with durations that differ by rank."""
    shape = Shape(pp=pp, vpp=vpp, microbatches=microbatches, overlap_p2p=vpp > 1)
    forward = [[1.0 + 0.01 * rank] * vpp for rank in range(pp)]
    backward = [[2.0 + 0.01 * rank] * vpp for rank in range(pp)]
    boundary = [0.01] * (shape.stages - 1)
    return lambda: simulate_repeating(shape, forward, backward, boundary)


def main() -> int:
    """Print a line for each case."""
    job = Job(tp=4, pp=4, dp=4, layers=80, hidden=8192, ffn=28672, heads=64, microbatches=32,
              seq=8192)  # fmt: skip
    what, recorded, cluster = plan(job), traces(job), load_cluster("h100", 8, 8)
    with tempfile.TemporaryDirectory() as folder:
        cases = {
            "schedule alone, pp 4 x 32 microbatches": alone(4, 1, 32),
            "schedule alone, pp 4 x vpp 5 x 32 microbatches": alone(4, 5, 32),
            "schedule alone, pp 16 x vpp 8 x 256 microbatches": alone(16, 8, 256),
            "schedule alone, pp 8 x a billion microbatches": alone(8, 1, 10**9),
            "projection of Llama-3.1-70B on 64 GPUs": lambda: compose.project(
                what, recorded, cluster, mode="simulate"
            ),
            "the same, all schedules compared": lambda: compose.project(
                what, recorded, cluster, mode="simulate", schedule="all"
            ),
            "its timeline.json": lambda: step_timeline.write(
                compose.timeline(what, recorded, cluster), Path(folder)
            ),
        }
        for name, work in cases.items():
            before = unit_s()
            seconds = best(work)
            unit = (before + unit_s()) / 2
            print(f"{name}: {seconds * 1e3:.3f} ms, {seconds / unit:.2f} units")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Busiest-rank correction against real skewed runs: two processes, experts on CPUs, gloo.

    python scripts/bench/expert_skew.py [--cycles 6]

For each shape one run goes through an even step and one of every skew, again and again
(``expert_skew_worker.py``), so that their ratio is free of what else the machine does.  The same
command is then projected, even and with ``+projection.expert_skew``, on a core whose rates the run
measured between its steps; what a call costs beside its work is measured in a run of the same model
that has next to nothing to compute.  Nothing is taken from a step itself.

Two measured ratios skewed/even stand beside each other: of the cores' time on the critical path (of
every stretch between two exchanges of tokens the slower rank's), which does not know of other
programs and holds no communication, and by the clock.  Each is compared with the projection of the
same: without communication, and of the whole step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import expert_skew_core as core
import yaml

from primus_ext import trace_io
from primus_ext.cluster import Cluster
from primus_ext.plan import Plan
from primus_ext.runner import emulation
from primus_ext.trace import RankTrace

REPO = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("expert_skew_worker.py")
RANKS = 2
LOCAL = yaml.safe_load((REPO / "hydra_conf" / "trainer" / "config.yaml").read_text())["local"]
COMMON = ["model=tiny_moe", f"parallel.ep={RANKS}",
          *(f"+megatron.{name}={value}" for name, value in LOCAL.items())]  # fmt: skip
"""What a core runs (Megatron's own layers) is what is projected for it, too."""
SKEWS = (1.3, 1.6, 1.9)
"""Tokens of each layer's busiest rank over the mean; two ranks allow up to 2."""
SHAPES = {
    "wide experts": [
        "model.hidden_size=256", "model.ffn_hidden_size=512", "model.moe_ffn_hidden_size=2048",
        "train.seq=128", "train.mbs=8", "train.gbs=32",
    ],
    "many narrow experts": [
        "model.hidden_size=192", "model.ffn_hidden_size=512", "model.moe_ffn_hidden_size=512",
        "model.num_experts=16", "train.seq=128", "train.mbs=8", "train.gbs=32",
    ],
}  # fmt: skip
"""Changes to the model ``tiny_moe``.  Skews and shapes were settled before the first run."""
IDLE = [
    "model.hidden_size=16", "model.ffn_hidden_size=16", "model.moe_ffn_hidden_size=16",
    "train.seq=8", "train.mbs=1", "train.gbs=4",
]  # fmt: skip
"""Further changes, to a step with as many calls and next to nothing to compute."""

@dataclasses.dataclass(frozen=True, kw_only=True)
class Ratios:
    """Skewed over even steps of one shape and one skew."""

    shape: str
    skew: float
    cores: float
    """Measured, core time on the critical path."""
    clock: float
    """Measured, by the clock."""
    projected: float
    """The cores' time, with the busiest rank of each layer."""
    alone: float
    """The same with each rank's own layers: nobody waits."""
    step: float
    """The whole step, with the busiest rank of each layer."""
    per_layer: float
    """Imbalance in a layer."""
    pooled: float
    """Imbalance over a step."""

    @property
    def error(self) -> float:
        """Of the corrected projection, against core time."""
        return self.projected / self.cores - 1

    @property
    def uncorrected(self) -> float:
        """Of a projection in which nobody waits for a busier rank, against core time."""
        return self.alone / self.cores - 1

    @property
    def by_clock(self) -> float:
        """Error of the corrected projection of the whole step."""
        return self.step / self.clock - 1


KEEPING = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**34)}
"""glibc keeps freed memory, as a device's allocator does: else every tensor above 32 MiB is mapped
anew, and a page at a time, which makes a token dearer where there are more of them."""


def measured(
    folder: Path, overrides: Sequence[str], skews: Sequence[float], cycles: int
) -> list[dict[str, Any]]:
    """What the worker of every rank wrote."""
    out, steps = folder / "run.json", (cycles + 1) * (1 + len(skews))
    environment = {**os.environ, **KEEPING, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone",
         f"--nproc-per-node={RANKS}", str(WORKER), str(out), json.dumps([1.0, *skews]),
         "hydra.run.dir=hydra", *COMMON, *overrides, f"train.steps={steps}"],
        cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(RANKS)]


def core_seconds(ranks: list[dict[str, Any]], skew: float) -> float:
    """Of a step's critical path: of each stretch between two exchanges the slower rank's median."""
    stretches = [
        map(statistics.median,
            zip(*(step["sections"] for step in rank["steps"] if step["skew"] == skew), strict=True))
        for rank in ranks
    ]  # fmt: skip
    return sum(map(max, zip(*stretches, strict=True)))


def clock_ratio(ranks: list[dict[str, Any]], skew: float) -> float:
    """Median over all cycles of a skewed step over the even one."""
    of = {k: [s["seconds"] for s in ranks[0]["steps"] if s["skew"] == k] for k in (1.0, skew)}
    return statistics.median(s / e for s, e in zip(of[skew], of[1.0], strict=True))


def emulated(
    folder: Path, cluster: Cluster, shape: str, **asked: float
) -> tuple[Plan, list[RankTrace]]:
    """Plan and traces of the run; ``asked``: further keys of the request."""
    result, path = folder / "answer.json", folder / "request.json"
    path.write_text(json.dumps({
        **emulation.question(cluster), "script": str(REPO / "scripts" / "train.py"),
        "args": [*COMMON, *SHAPES[shape]], "cwd": str(folder), "overrides_removed": [],
        "result": str(result), **asked,
    }))  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    subprocess.run([sys.executable, "-m", "primus_ext.emulate.bootstrap", str(path)],
                   env=environment, stdout=subprocess.DEVNULL, check=True)  # fmt: skip
    answer = json.loads(result.read_text())
    if answer["status"] != "ok":
        raise RuntimeError(answer["message"])
    return trace_io.plan_from_plain(answer["plan"]), trace_io.traces_from_plain(answer["traces"])


def compare(shape: str, cycles: int) -> list[Ratios]:
    """Run, project, and lay the ratios beside each other."""
    with tempfile.TemporaryDirectory() as name:
        folder, changes = Path(name), SHAPES[shape]
        idle = core_seconds(measured(folder, [*changes, *IDLE], (), cycles), 1.0)
        ranks = measured(folder, changes, SKEWS, cycles)
        rates = {k: statistics.mean(r["rates"][k] for r in ranks) for k in ranks[0]["rates"]}
        cluster = core.cluster_of(folder, rates, RANKS)
        plan, traces = emulated(folder, cluster, shape)
        call_s = idle / core.calls(plan, traces[0])
        even, rows = core.project(plan, traces, cluster, call_s), []
        for skew in SKEWS:
            plan, traces = emulated(folder, cluster, shape, expert_skew=skew)
            skewed = core.project(plan, traces, cluster, call_s)
            alone = core.project(plan, core.alone(traces), cluster, call_s)
            imbalance = skewed.expert_imbalance
            assert imbalance is not None
            rows.append(Ratios(
                shape=shape, skew=skew,
                cores=core_seconds(ranks, skew) / core_seconds(ranks, 1.0),
                clock=clock_ratio(ranks, skew),
                projected=core.computing(skewed) / core.computing(even),
                alone=core.computing(alone) / core.computing(even),
                step=skewed.throughput.step_s / even.throughput.step_s,
                per_layer=imbalance.gating, pooled=imbalance.pooled,
            ))  # fmt: skip
        print(f"{shape}: an even step {core_seconds(ranks, 1.0):.2f} s of core time, projected "
              f"{core.computing(even):.2f} s; {rates['flops'] / 1e9:.0f} GFLOP/s, "
              f"{rates['stream'] / 1e9:.0f} GB/s, {call_s * 1e6:.0f} us a call")  # fmt: skip
    return rows


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cycles", type=int, default=6)
    cycles = parser.parse_args().cycles
    rows = [row for shape in SHAPES for row in compare(shape, cycles)]
    print("skewed/even steps              core time on the critical path           by the clock")
    print("shape               skew pooled   measured  projected       not waiting     measured"
          "  projected")  # fmt: skip
    for r in rows:
        print(f"{r.shape:19} {r.skew:4.1f} {r.pooled:6.3f}   {r.cores:8.3f}  {r.projected:5.3f} "
              f"{r.error:+6.1%}   {r.alone:5.3f} {r.uncorrected:+6.1%}   {r.clock:8.3f}  "
              f"{r.step:5.3f} {r.by_clock:+6.1%}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())

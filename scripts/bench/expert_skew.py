"""Busiest-rank correction against a real skewed run: two processes, experts on CPUs, gloo.

    python scripts/bench/expert_skew.py [--factor 1.6] [--steps 24]

One run alternates even and skewed steps (``expert_skew_worker.py``), so that their ratio is free of
what else the machine does.  The same command is then projected twice, even and with
``+projection.expert_skew``, on an accelerator file whose rates are those that the run measured
first.  Printed: the ratio skewed/even of the step, measured and projected, with and without the
correction, and the imbalance in a layer and pooled.

Two measured ratios stand beside each other: by the clock, and of the cores' time on the critical
path (of every stretch between two exchanges of tokens the slower rank's); the latter does not know
of other programs.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

REPO = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("expert_skew_worker.py")
RANKS = 2
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

@dataclasses.dataclass(frozen=True, kw_only=True)
class Ratios:
    """Skewed over even steps."""

    clock: float
    """Measured, by the clock."""
    cores: float
    """Measured, core time on the critical path."""
    projected: float
    """With the busiest rank of each layer."""
    pooled: float
    """Projected with each rank's own layers: nobody waits."""
    per_layer: float
    """Imbalance in a layer."""
    pooled_imbalance: float

    @property
    def error(self) -> float:
        """Of the corrected projection."""
        return self.projected / self.cores - 1

    @property
    def uncorrected(self) -> float:
        """Of a projection in which nobody waits for a busier rank."""
        return self.pooled / self.cores - 1


def measured(folder: Path, factor: float, steps: int) -> list[dict[str, Any]]:
    """What the worker of every rank wrote."""
    out = folder / "run.json"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone",
         f"--nproc-per-node={RANKS}", str(WORKER), str(out), str(factor), "hydra.run.dir=hydra",
         *OVERRIDES, f"train.steps={steps}"],
        cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(RANKS)]


def ratio(
    ranks: list[dict[str, Any]], value: Callable[[tuple[dict[str, Any], ...]], float]
) -> float:
    """Median of the skewed steps over that of the even ones; ``value`` of a step on all ranks."""
    found: dict[bool, list[float]] = {False: [], True: []}
    for step in zip(*(rank["steps"] for rank in ranks), strict=True):
        found[step[0]["skewed"]].append(value(step))
    return statistics.median(found[True]) / statistics.median(found[False])


def critical_path(step: tuple[dict[str, Any], ...]) -> float:
    """Core seconds: of each stretch between two exchanges the slower rank's."""
    return sum(map(max, zip(*(rank["sections"] for rank in step), strict=True)))


def accelerator(folder: Path, ranks: list[dict[str, Any]]) -> str:
    """A file of this machine's core, with the rates that the run measured."""
    from primus_ext.cost import sustained

    rates = {
        name: statistics.mean(rank["rates"][name] for rank in ranks) for name in ranks[0]["rates"]
    }

    def stated(value: float) -> dict[str, Any]:
        return {"value": value, "source": "measured at the beginning of the run"}

    content = {
        "name": "core", "vendor": "nvidia", "arch": "cpu", "compute_capability": [8, 0],
        "multi_processors": 1, "scale_up_topology": "switch", "scale_up_gpus": RANKS,
        "peak_flops": {name: stated(rates["flops"]) for name in ("fp32", "tf32", "bf16")},
        "gemm_efficiency": {name: stated(1.0) for name in ("fp32", "tf32", "bf16")},
        "hbm_bytes": stated(64e9), "hbm_bandwidth": stated(rates["copy"]),
        # a core has neither tiles that multiprocessors share out nor waves of them
        "kernel_model": {
            name: {"value": 0.0, "source": "one core"}
            for name in ("gemm_prologue_k", "gemm_wave_share", "gemm_tile_loss")
        },
        # the rates are those of training, and what issues the work is what does it
        "sustained": {
            **{name: {"value": 1.0, "source": "as measured"} for name in sustained.KINDS},
            "host_call_s": {"value": 0.0, "source": "one core"},
        },
        "kernel_launch_s": {"value": 0.0, "source": "one core"},
        "hbm_efficiency": stated(1.0), "scale_up_bandwidth": stated(rates["exchange"]),
        "network": {"nic_bandwidth": stated(rates["exchange"])},
    }  # fmt: skip
    path = folder / "core.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def projected(folder: Path, file: str, factor: float) -> tuple[float, float, float, Any]:
    """Step seconds even, skewed, skewed without waiting; and the imbalance."""
    from primus_ext import trace_io
    from primus_ext.cluster_data import load_cluster
    from primus_ext.project import compose
    from primus_ext.runner import emulation

    cluster = load_cluster(file, 1, RANKS)
    question = emulation.question(cluster)
    question["device"]["compute_capability"] = [8, 0]

    def of(**asked: float) -> tuple[Any, Any]:
        result = folder / "answer.json"
        request = {
            **question, "script": str(REPO / "scripts" / "train.py"), "args": OVERRIDES,
            "cwd": str(folder), "overrides_removed": [], "result": str(result), **asked,
        }  # fmt: skip
        path = folder / "request.json"
        path.write_text(json.dumps(request))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
        subprocess.run([sys.executable, "-m", "primus_ext.emulate.bootstrap", str(path)],
                       env=environment, stdout=subprocess.DEVNULL, check=True)  # fmt: skip
        answer = json.loads(result.read_text())
        if answer["status"] != "ok":
            raise RuntimeError(answer["message"])
        return (trace_io.plan_from_plain(answer["plan"]),
                trace_io.traces_from_plain(answer["traces"]))  # fmt: skip

    def step(plan: Any, traces: Any) -> Any:
        return compose.project(plan, traces, cluster, mode="simulate")

    even, (plan, traces) = step(*of()), of(expert_skew=factor)
    skewed = step(plan, traces)
    alone = step(plan, [dataclasses.replace(trace, experts=None) for trace in traces])
    times = (found.throughput.step_s for found in (even, skewed, alone))
    return (*times, skewed.expert_imbalance)


def compare(factor: float, steps: int) -> Ratios:
    """Run, project, and lay the ratios beside each other."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = measured(folder, factor, steps)
        even, skewed, alone, imbalance = projected(folder, accelerator(folder, ranks), factor)
    return Ratios(
        clock=ratio(ranks, lambda step: step[0]["seconds"]), cores=ratio(ranks, critical_path),
        projected=skewed / even, pooled=alone / even, per_layer=imbalance.gating,
        pooled_imbalance=imbalance.pooled,
    )  # fmt: skip


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--factor", type=float, default=1.6)
    parser.add_argument("--steps", type=int, default=24)
    asked = parser.parse_args()
    found = compare(asked.factor, asked.steps)
    rows = {
        "imbalance in a layer / pooled over a step":
            f"{found.per_layer:.3f} / {found.pooled_imbalance:.3f}",
        "skewed/even, measured, core time on the critical path": f"{found.cores:.3f}",
        "skewed/even, measured, by the clock": f"{found.clock:.3f}",
        "skewed/even, projected with each layer's busiest rank":
            f"{found.projected:.3f} ({found.error:+.1%})",
        "skewed/even, projected without": f"{found.pooled:.3f} ({found.uncorrected:+.1%})",
    }  # fmt: skip
    for title, text in rows.items():
        print(f"{title:56} {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

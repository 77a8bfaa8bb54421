#!/usr/bin/env python
"""A deep model's step on one device against its projection from a shallow one.

``python scripts/bench/measured_gpu.py --out DIR [--device cpu]`` runs local-spec layers of
Llama-3-8B and of a Mixtral-like model in BF16, four of each as they are, and one of each as
``+projection=measure`` would; steps of both take turns.  The projection from one layer to four goes
through the trace of the four, and its memory beside the device's own counters.  ``DIR`` gets raw
samples, kernels and versions of both.  ``--device cpu`` runs the same with small layers: what is
tested where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from measured_cpu import ROOT, TRAINER, WARM_UP, Virtual, ask

from primus_ext import trace_io
from primus_ext.cluster_data import load_cluster
from primus_ext.measurement import RankMeasurement, merged
from primus_ext.project import compose
from primus_ext.project.observed import Measured
from primus_ext.runner import emulation, local_device
from primus_ext.trace import to_plain

DEEP, SHALLOW = 4, 1
STEPS = 25
MODELS = {
    "llama3_8b layers": "model=llama3.1_8b train.seq=4096 train.mbs=1 train.gbs=2 precision=bf16",
    "mixtral layers": (
        "model=mixtral_8x7b train.seq=4096 train.mbs=1 train.gbs=2 precision=bf16 "
        "model.hidden_size=2048 model.ffn_hidden_size=7168 model.moe_ffn_hidden_size=7168 "
        "model.num_attention_heads=16"
    ),
}
SMALL = {
    "llama3_8b layers": "model=tiny_gpt train.seq=128 model.max_position_embeddings=128 "
    "model.hidden_size=256 model.ffn_hidden_size=768 train.mbs=1 train.gbs=4",
    "mixtral layers": "model=tiny_moe train.seq=128 model.max_position_embeddings=128 "
    "model.hidden_size=128 model.moe_ffn_hidden_size=256 train.mbs=1 train.gbs=4",
}
"""Models for a CPU."""


def question(accelerator: str, overrides: str, depth: int, folder: Path) -> dict[str, Any]:
    """What the bootstrap is asked about so many layers on one device."""
    cluster = load_cluster(accelerator, 1, 1)
    local = [] if accelerator == "cpu" else ["+megatron.transformer_impl=local"]
    return {
        "script": str(TRAINER),
        "args": [*overrides.split(), *local, f"model.num_layers={depth}",
                 f"hydra.run.dir={folder}/child", "hydra.output_subdir=null"],
        "cwd": str(ROOT),
        **emulation.question(cluster),
    }  # fmt: skip


def run(accelerator: str, overrides: str, folder: Path) -> dict[str, Any]:
    """Measure both depths and project one from the other.

    Returns:
        ``real`` and ``projected`` seconds of a step, and what they come from.
    """
    deep = question(accelerator, overrides, DEEP, folder)
    shallow = question(accelerator, overrides, SHALLOW, folder)
    answer = ask(deep, folder, "trace")
    sides = [
        Virtual(name, asked, [0], folder, STEPS, 1)
        for name, asked in (("deep", deep), ("shallow", shallow))
    ]
    for _ in range(WARM_UP + STEPS):
        for virtual in sides:
            virtual.side.step()
    (whole,), (one,) = (_measured(virtual) for virtual in sides)
    traces = trace_io.traces_from_plain(answer["traces"])
    projection = compose.project(
        trace_io.plan_from_plain(answer["plan"]), traces, load_cluster(accelerator, 1, 1),
        mode="measure", measured=Measured(ranks=(one,), accelerator=accelerator),
    )  # fmt: skip
    (role,) = projection.memory.per_role
    return {
        "real": whole.own.median, "projected": projection.throughput.step_s,
        "spread": [whole.spread, one.spread], "peak_bytes": role.peak_bytes,
        "allocated_bytes": role.allocated_bytes, "measured_allocated_bytes": whole.allocated_bytes,
        "reserved_bytes": role.allocator_bytes, "measured_reserved_bytes": whole.reserved_bytes,
        "deep": to_plain(whole), "shallow": to_plain(one),
    }  # fmt: skip


def _measured(virtual: Virtual) -> tuple[RankMeasurement, ...]:
    return merged([trace_io.from_plain(RankMeasurement, one) for one in virtual.finish()])


def main() -> None:
    """Run both models and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    accelerator, models = "cpu", SMALL
    if options.device == "gpu":
        found = local_device.find(os.environ)
        if found is None or found.accelerator is None:
            sys.exit("no accelerator is here that primus_ext has figures of; legal: --device cpu")
        accelerator, models = found.accelerator, MODELS
    for name, overrides in models.items():
        with tempfile.TemporaryDirectory(prefix="primus_ext_bench_") as folder:
            result = run(accelerator, overrides, Path(folder))
        path = options.out / f"{name.replace(' ', '_')}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        error = result["projected"] / result["real"] - 1.0
        sys.stdout.write(
            f"{name}: real step {result['real'] * 1e3:.1f} ms, projected "
            f"{result['projected'] * 1e3:.1f} ms ({error:+.1%}), spread "
            f"{statistics.mean(result['spread']):.1%}\n"
        )


if __name__ == "__main__":
    main()

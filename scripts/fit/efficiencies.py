"""Recompute the efficiencies of ``hydra_conf/accelerator/*.yaml`` from operator measurements.

    python scripts/fit/efficiencies.py EVIDENCE.yaml            # print what the rows say
    python scripts/fit/efficiencies.py EVIDENCE.yaml --check    # fail if a file says otherwise

EVIDENCE.yaml holds ``points``: gpu, op, shape, dtype, dir, value, unit, src, conf.  Rows that were
looked up beside it stand in ``extra_evidence.yaml``.  An efficiency is the median over sources of
the median over that source's large shapes, so that a source with many rows does not decide alone.
Nothing here looks at the step time of any training run.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from rows import Row, read

from primus_ext.cluster import Accelerator
from primus_ext.cluster_data import load_accelerator
from primus_ext.cost import attention, gemm

HERE = Path(__file__).resolve().parent
LARGE = 2.0**37
"""FLOPs from which a matrix product counts as large (0.14 ms at 1 PFLOP/s)."""
SHORTEST = 4096
"""Tokens from which attention counts."""
TOLERANCE = 0.005

# accelerator -> products whose rows count, by kind of work; a product that stands in for another
# is named in the file's source text
GEMM_ROWS = {
    "a100": {"bf16": (("A100-SXM-80",), ("bf16", "fp16"))},
    "h100": {"bf16": (("H100-SXM",), ("bf16", "fp16")), "fp8": (("H100-SXM",), ("fp8",)),
             "fp8_block": (("H100-SXM",), ("fp8_block",))},
    "h200": {"bf16": (("H200",), ("bf16", "fp16")), "fp8": (("H200",), ("fp8",)),
             "fp8_block": (("H200",), ("fp8_block",))},
    "b200": {"bf16": (("B200",), ("bf16", "fp16")), "fp8": (("B200",), ("fp8",)),
             "fp8_block": (("B200",), ("fp8_block",)), "nvfp4": (("GB200", "B200"), ("fp4",)),
             "mxfp8": (("GB200",), ("mxfp8",))},
    "mi300x": {"bf16": (("MI300X",), ("bf16",)), "fp16": (("MI300X",), ("fp16",)),
               "fp8": (("MI300X",), ("fp8",)),
               "fp8_block": (("MI300X|MI325X",), ("fp8_blockscale_1x128_128x128",))},
    "mi325x": {"bf16": (("MI325X",), ("bf16",)), "fp16": (("MI325X",), ("fp16",)),
               "fp8": (("MI325X",), ("fp8",)),
               "fp8_block": (("MI300X|MI325X",), ("fp8_blockscale_1x128_128x128",))},
    "mi355x": {"bf16": (("MI355X", "MI350X|MI355X"), ("bf16",)), "fp8": (("MI355X",), ("fp8",)),
               "fp8_block": (("MI350X|MI355X",), ("fp8_blockscale_1x128_128x128",)),
               "mxfp8": (("MI355X",), ("mxfp8",))},
}  # fmt: skip
# Rows of these count with the quantisation of both operands; without it the format can't be
# faster than per-tensor FP8.  The efficiency is the geometric mean of the two bounds.
WITH_QUANTIZATION = "mxfp8"
# Peaks of products that stand in for an accelerator here, TFLOP/s (NVIDIA GB200 datasheet).
OTHER_PEAKS = {("GB200", "nvfp4"): 10000.0, ("GB200", "mxfp8"): 5000.0}
ATTENTION_ROWS = {
    "a100": (("A100-PCIe-80", "A100-SXM-80"), ("A100-PCIe-80",)),
    "h100": (("H100-SXM",), ("H100-SXM", "H100")),
    "h200": (("H200",), ("H100-SXM", "H100")),
    "b200": (("B200", "Blackwell SM100 (B200 class)"), ("B200", "Blackwell SM100 (B200 class)")),
    "mi300x": (("MI300X",), ("MI300X",)),
    "mi325x": (("MI300X",), ("MI300X",)),
    "mi355x": (("MI355X",), ("MI355X",)),
}
HBM_ROWS = {
    "a100": ("A100-SXM-80", "a100"), "h100": ("H100-SXM", "h100"), "h200": ("H200", "h200"),
    "b200": ("B200", "b200"), "mi300x": ("MI300X", "mi300x"), "mi325x": ("MI300X", "mi300x"),
    "mi355x": ("MI300X", "mi300x"),
}  # fmt: skip
# Attention kernels that Transformer Engine does not call.
OTHER_ATTENTION = ("SDPA", "HipKittens")

Samples = dict[str, list[float]]


def middle(samples: Samples) -> float:
    """Median over sources of each source's median."""
    return statistics.median(statistics.median(values) for values in samples.values())


def spread(samples: Samples) -> float:
    """Half width of the central 80 % of ln(sample / middle), every source weighing the same."""
    centre = middle(samples)
    values, weights = [], []
    for source in samples.values():
        values += [abs(math.log(v / centre)) for v in source]
        weights += [1 / len(source)] * len(source)
    order = np.argsort(values)
    cumulative = np.cumsum(np.array(weights)[order]) / sum(weights)
    return float(np.array(values)[order][min(np.searchsorted(cumulative, 0.8), len(order) - 1)])


def gemm_samples(rows: list[Row], name: str, number_format: str) -> Samples:
    """Implied efficiency of every large product, by source."""
    accelerator = load_accelerator(name)
    gpus, dtypes = GEMM_ROWS[name][number_format]
    samples: Samples = defaultdict(list)
    for row in rows:
        if row.gpu not in gpus or row.dtype not in dtypes or row.unit != "TFLOP/s":
            continue
        if row.op != ("gemm_set" if number_format == WITH_QUANTIZATION else "gemm"):
            continue
        peak = OTHER_PEAKS.get((row.gpu, number_format)) or (
            accelerator.peak_flops[number_format].value / 1e12
        )
        factor = _gemm_factor(accelerator, row)
        if factor:
            samples[row.source].append(row.value / peak * factor)
    return dict(samples)


def _gemm_factor(accelerator: Accelerator, row: Row) -> float:
    """Device FLOPs for one useful one; 0 if the product is too small to count."""
    shape = row.shape
    if row.op == "gemm_set":
        return 1.0
    if "median" in row.text:
        return 1 + gemm.PROLOGUE_K / shape["k"]
    if not {"m", "n", "k"} <= shape.keys():
        return 0.0
    m, n, k = shape["m"], shape["n"], shape["k"]
    flops = 2.0 * m * n * k
    if flops < LARGE or min(m, n, k) < 512:
        return 0.0
    return gemm.compute_flops(accelerator, flops, m, n, k) / flops


def attention_samples(rows: list[Row], name: str, direction: str) -> Samples:
    """Implied efficiency of fused attention against the bf16 peak, by source."""
    accelerator = load_accelerator(name)
    gpus = ATTENTION_ROWS[name][direction == "bwd"]
    peak = accelerator.peak_flops["bf16"].value / 1e12
    samples: Samples = defaultdict(list)
    for row in rows:
        if any(word in row.software for word in OTHER_ATTENTION):
            continue
        if row.op == "attention" and row.gpu in gpus and row.direction == direction:
            factor = _attention_factor(accelerator, row)
            if factor:
                samples[row.source].append(row.value / peak * factor)
    return dict(samples)


def _attention_factor(accelerator: Accelerator, row: Row) -> float:
    shape = row.shape
    if "tail" in row.text:
        return 1.0
    if not {"s", "hq"} <= shape.keys() or shape["s"] < SHORTEST or not shape.get("causal", 1):
        return 0.0
    qk, v = shape.get("d_qk", shape.get("d", 0)), shape.get("d_v", shape.get("d", 0))
    if qk < 128:
        return 0.0
    direction = "backward" if row.direction == "bwd" else "forward"
    dims = 3 * qk + 2 * v if direction == "backward" else qk + v
    flops = shape["b"] * shape["hq"] * shape["s"] ** 2 * dims
    tail = attention.tail_flops(accelerator, shape["s"], qk, v, direction)
    return (flops + tail) / flops


def hbm_samples(rows: list[Row], name: str) -> Samples:
    """Share of the memory bandwidth that streaming kernels reach, by source."""
    product, peak_of = HBM_ROWS[name]
    peak = load_accelerator(peak_of).hbm_bandwidth.value / 1e12
    samples: Samples = defaultdict(list)
    for row in rows:
        if row.gpu == product and row.op in ("hbm_copy", "hbm_triad", "hbm_quantize"):
            samples[row.source].append(row.value / peak)
    return dict(samples)


GROUPED = {"fwd": "tn", "dgrad": "nn", "wgrad": "nt"}
# product -> sources whose grouped rows and dense rows were measured alike
GROUPED_ROWS = {
    "B200": (("simumax_b200",), ("simumax_b200",)),
    "A100-PCIe-80": (("simumax_a100",), ("simumax_a100",)),
    "MI355X": (("turbo_pr284", "turbo_megamoe"), ("hipkittens", "primus_gptoss")),
}
ENOUGH_ROWS = 512
"""Rows of a group from which a grouped product is compared with a dense one."""


def grouped_shares(rows: list[Row], direction: str) -> Samples:
    """Rate of grouped products over the median rate of large dense ones, by product."""
    samples: Samples = {}
    for gpu, (grouped, dense) in GROUPED_ROWS.items():
        plain = [
            row.value
            for row in rows
            if row.gpu == gpu and row.source in dense and row.op == "gemm" and row.dtype == "bf16"
            and {"m", "n", "k"} <= row.shape.keys() and row.unit == "TFLOP/s"
            and 2.0 * row.shape["m"] * row.shape["n"] * row.shape["k"] >= LARGE
        ]  # fmt: skip
        samples[gpu] = [
            row.value / statistics.median(plain)
            for row in rows
            if row.gpu == gpu and row.source in grouped and row.op == "grouped_gemm"
            and row.direction == direction and row.dtype == "bf16"
            and row.shape.get("m_per_group", ENOUGH_ROWS) >= ENOUGH_ROWS
        ]  # fmt: skip
    return samples


def report(label: str, samples: Samples, stated: float, spreads: list[float]) -> bool:
    """Print one efficiency; tell whether the file agrees."""
    if not samples:
        print(f"  {label:24s} no rows; the file says {stated:.3f}")
        return True
    value = middle(samples)
    spreads.append(spread(samples))
    detail = ", ".join(
        f"{source} {statistics.median(values):.3f} ({len(values)})"
        for source, values in sorted(samples.items())
    )
    agrees = abs(value - stated) <= TOLERANCE
    print(f"  {label:24s} {value:.3f}  file {stated:.3f}{'' if agrees else '  DIFFERS'}  "
          f"spread {spread(samples):.2f}  from {detail}")  # fmt: skip
    return agrees


def main() -> int:
    """Print all efficiencies; with ``--check`` return 1 where a file differs."""
    parser = argparse.ArgumentParser(description="Recompute published efficiencies")
    parser.add_argument("evidence", type=Path)
    parser.add_argument("--check", action="store_true", help="fail where a file differs")
    options = parser.parse_args()
    paths = [options.evidence, HERE / "extra_evidence.yaml"]
    rows, bounds = read(paths), read(paths, also=("threshold",))
    agree = True
    print("grouped over dense products")
    for direction, layout in GROUPED.items():
        stated = gemm.GROUPED_SHARE[layout]
        agree &= report(direction, grouped_shares(rows, direction), stated, [])
    for name in GEMM_ROWS:
        print(name)
        accelerator = load_accelerator(name)
        found: dict[str, list[float]] = {"gemm": [], "attention": [], "memory": []}
        for number_format in GEMM_ROWS[name]:
            figure = accelerator.gemm_efficiency[number_format]
            samples = gemm_samples(rows, name, number_format)
            if number_format == WITH_QUANTIZATION:
                bound = middle(gemm_samples(rows, name, "fp8"))
                samples = {"bounds": [math.sqrt(bound * middle(samples))]}
            agree &= report(f"gemm {number_format}", samples, figure.value, found["gemm"])
        for direction, key in (("fwd", "forward"), ("bwd", "backward")):
            figure = accelerator.attention_efficiency[key]
            samples = attention_samples(rows, name, direction)
            agree &= report(f"attention {key}", samples, figure.value, found["attention"])
        samples = hbm_samples(bounds if name.startswith("mi") else rows, name)
        agree &= report("memory", samples, accelerator.hbm_efficiency.value, found["memory"])
        for kind, values in found.items():
            stated = accelerator.residuals[kind].value
            print(f"  spread of {kind:14s} {max(values, default=0):.2f}  file {stated:.2f}")
    return 1 if options.check and not agree else 0


if __name__ == "__main__":
    sys.exit(main())

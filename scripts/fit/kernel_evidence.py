"""Operator measurements as the ops that a trace would hold, each with its source and its time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from rows import Row, read

from primus_ext.cluster_data import load_accelerator
from primus_ext.cost import attention_table, measured, tables
from primus_ext.trace import Family, Op

PRODUCTS = {
    "A100-SXM-80": "a100", "A100-PCIe-80": "a100_pcie", "H100-SXM": "h100", "H200": "h200",
    "B200": "b200", "GB200": "gb200", "MI300X": "mi300x", "MI325X": "mi325x", "MI355X": "mi355x",
    "MI300X|MI325X": "mi300x", "MI350X|MI355X": "mi355x", "Blackwell SM100 (B200 class)": "b200",
}  # fmt: skip
"""Accelerator of a product name; ``A|B`` stands for two that the source can't tell apart, of equal
peaks."""
FORMATS = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8_e4m3/tensor", "fp4": "fp4_e2m1/nvfp4",
           "fp8_blockscale_1x128_128x128": "fp8_e4m3/block2d"}  # fmt: skip
LAYOUTS = {"fwd": "tn", "dgrad": "nn", "wgrad": "nt"}
PER_TABLE = 160
"""Rows taken of each table (product, framework, kind), evenly over those that count."""
SMALLEST = 2.0**33
"""FLOPs from which a kernel counts (9 us at 1 PFLOP/s): below, launches are much of it."""

# Why rows of the evidence are neither fitted nor scored: (test, reason).
EXCLUDED = [
    (lambda r: r.gpu not in PRODUCTS, "the product is not named, or there is no file for it"),
    (lambda r: r.software.startswith("HipKittens"), "kernels that no training framework calls"),
    (lambda r: "SDPA" in r.software or "Triton" in r.software and r.op == "attention",
     "attention that Transformer Engine does not call"),
    (lambda r: r.software.startswith("CK-tile"),
     "compiled CK kernels; Transformer Engine takes the hand-written ones where they exist"),
    (lambda r: r.op == "attention" and r.direction == "bwd" and r.software == "AITER"
     and r.shape.get("hq") != r.shape.get("hkv"),
     "a dispatch that later versions replaced (rows 'other dispatch', twice as fast)"),
    (lambda r: r.op == "gemm" and r.source == "hipkittens" and r.software != "hipBLASLt Oct 2025"
     and "MI" in r.gpu and r.shape.get("m", 0) < 4096,
     "timed with the host's launches: hipBLASLt alone takes a third on the same shape"),
    (lambda r: r.op in ("gemm", "batched_gemm") and r.dtype not in FORMATS,
     "a number format that no training recipe has"),
    (lambda r: r.source == "stas", "best of a search over shapes"),
    (lambda r: r.op == "grouped_gemm" and not {"groups", "m_per_group"} <= r.shape.keys(),
     "an average over shapes that are not listed"),
    (lambda r: r.op == "attention" and not {"b", "s", "hq"} <= r.shape.keys(),
     "the shape is not complete"),
    (lambda r: r.op == "attention" and r.dtype != "bf16",
     "details are not stated (FlashAttention-2)"),
    (lambda r: r.op == "batched_gemm", "AITER's own batched kernels; training calls hipBLASLt"),
]  # fmt: skip
KINDS = ("gemm", "batched_gemm", "grouped_gemm", "attention")


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One measured kernel, or one fused kernel as the ops that it replaces."""

    accelerator: str
    source: str
    family: str
    """gemm, grouped_gemm, attention_forward, attention_backward."""
    number_format: str
    """Of matrix products, e.g. ``bf16``."""
    ops: tuple[Op, ...]
    seconds: float


def from_rows(paths: list[Path]) -> tuple[list[Sample], dict[str, int]]:
    """Samples of the evidence files, and how many rows were left out for which reason."""
    samples, left, seen = [], {}, set()
    for row in read(paths):
        if row.op not in KINDS or row.unit != "TFLOP/s" or "median" in row.text:
            continue
        if row.op == "gemm" and row.dtype == "fp16" and not row.gpu.startswith("MI"):
            row = dataclasses.replace(row, dtype="bf16")  # the same units, the same rate
        reason = next((why for test, why in EXCLUDED if test(row)), None)
        again = (row.source, row.direction, row.text) in seen
        seen.add((row.source, row.direction, row.text))
        made = None if reason else _sample(row, again)
        if made is None:
            reason = reason or "the shape is not complete, or too small to count"
            left[reason] = left.get(reason, 0) + 1
        else:
            samples.append(made)
    return samples, left


def _sample(row: Row, again: bool) -> Sample | None:
    if row.op == "attention":
        op = _attention(row)
        family = "attention_backward" if row.direction == "bwd" else "attention_forward"
        number_format = "bf16"
    else:
        op = _grouped(row, again) if row.op == "grouped_gemm" else _product(row)
        family = "grouped_gemm" if row.op == "grouped_gemm" else "gemm"
        number_format = {"fp4": "nvfp4", "fp8_blockscale_1x128_128x128": "fp8_block"}.get(
            row.dtype, row.dtype)  # fmt: skip
    if op is None or op.flops < SMALLEST:
        return None
    product = PRODUCTS[row.gpu]
    if number_format not in load_accelerator(product).peak_flops:
        return None
    return Sample(product, row.source, family, number_format, (op,), op.flops / row.value / 1e12)


def matrix(
    m: int, n: int, k: int, dtype: str, layout: str, *, groups: int = 1, batch: int = 1,
    accumulate: bool = False, out: str = "bf16", grouped: bool = False,
) -> Op:  # fmt: skip
    """A dense, batched or grouped product; in a grouped one m (in layout nt: k) is a group's."""
    size = {"bf16": 2.0, "fp16": 2.0, "fp8_e4m3/tensor": 1.0, "fp8_e4m3/block2d": 1.0,
            "fp4_e2m1/nvfp4": 0.5625}[dtype]  # fmt: skip
    count = groups * batch
    written = {"bf16": 2, "fp32": 4}[out] * m * n * (1 + accumulate)
    attrs = {"m": m, "n": n, "k": k, "layout": layout, "dtype": dtype, "out_dtype": out,
             "accumulate": accumulate}  # fmt: skip
    if grouped:
        attrs |= {"groups": groups, "m": m if layout == "nt" else m * groups}
    else:
        attrs |= {"batch": count}
    return Op(
        "evidence.gemm", Family.GROUPED_GEMM if grouped else Family.GEMM, (), (),
        2 * count * m * n * k, int(count * (size * (m * k + n * k) + written)),
        tuple(sorted(attrs.items())),
    )  # fmt: skip


def _product(row: Row) -> Op | None:
    if not {"m", "n", "k"} <= row.shape.keys():
        return None
    s = row.shape
    layout = next((name for name in ("nn", "nt") if f"layout={name.upper()}" in row.text), "tn")
    return matrix(
        s["m"], s["n"], s["k"], FORMATS[row.dtype], layout, batch=s.get("b", 1),
        accumulate=bool(s.get("accumulate", s.get("beta", 0))),
        out="fp32" if "out=fp32" in row.text or "d=f32" in row.text else "bf16",
    )  # fmt: skip


def _grouped(row: Row, again: bool) -> Op:
    """A grouped product; all directions of a source are stated by the shape of the forward.

    SimuMax's files have each weight gradient accumulated in fp32 first, then (``again``) in bf16.
    """
    s = row.shape
    groups, rows, n, k = s["groups"], s["m_per_group"], s["n"], s["k"]
    if row.direction == "wgrad":
        simumax = row.source.startswith("simumax")
        return matrix(n, k, rows, "bf16", "nt", groups=groups, grouped=True, accumulate=simumax,
                      out="fp32" if simumax and not again else "bf16")  # fmt: skip
    if row.direction == "dgrad":
        n, k = k, n
    return matrix(rows, n, k, "bf16", LAYOUTS[row.direction], groups=groups, grouped=True)


def _attention(row: Row) -> Op | None:
    s = row.shape
    qk, v = s.get("d_qk", s.get("d", 0)), s.get("d_v", s.get("d", 0))
    causal = bool(s.get("causal", 1))
    return fused(s["b"], s["s"], s["hq"], s["hkv"], qk, v, causal,
                 "backward" if row.direction == "bwd" else "forward")  # fmt: skip


def fused(
    batch: int, seq: int, heads: int, kv_heads: int, dim_qk: int, dim_v: int, causal: bool,
    direction: str,
) -> Op:  # fmt: skip
    """Fused attention as a trace holds it; a backward counts 2.5 forwards, as the evidence does."""
    pairs = seq * (seq + 1) // 2 if causal else seq * seq
    backward = direction == "backward"
    dims = dim_qk + dim_v
    dims = 3 * dim_qk + 2 * dim_v if backward else dims
    once = 2 * batch * seq * (heads + kv_heads) * (dim_qk + dim_v)
    attrs = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "seq_q": seq, "seq_kv": seq,
             "dim_qk": dim_qk, "dim_v": dim_v, "causal": causal, "window": (-1, -1),
             "direction": direction, "dtype": "bf16", "fused": True}  # fmt: skip
    return Op("evidence.attention", Family.ATTENTION, (), (), 2 * batch * heads * pairs * dims,
              once * (2 if backward else 1), tuple(sorted(attrs.items())))  # fmt: skip


def evenly(rows: list, count: int) -> list:
    """``count`` of the rows, evenly spread over their order."""
    return [rows[i * len(rows) // count] for i in range(min(count, len(rows)))] \
        if len(rows) > count else rows  # fmt: skip


def from_tables() -> Iterator[Sample]:
    """Samples of the optional tables: bf16 products and causal forwards, framework by framework."""
    for name in ("a100", "h100", "h200", "b200", "b300", "gb200", "gb300"):
        system = load_accelerator(name).measured_tables
        for framework, path in tables.files(system, "gemm", "gemm_perf").items():
            for m, n, k, seconds in _products(path, "bfloat16"):
                op = measured.product(m, n, k, "bf16")
                yield Sample(name, f"aic/{framework}", "gemm", "bf16", (op,), seconds)
        for dims in ((128, 128), (64, 64), (256, 256), (192, 128)):
            for framework, found in attention_table.rows_of(system, *dims).items():
                keys = sorted(
                    key for key in found
                    if key[1] >= 2048 and key[0] * key[1] ** 2 * key[2] * sum(dims) >= SMALLEST
                )  # fmt: skip
                for key in evenly(keys, PER_TABLE // (1 if dims == (128, 128) else 4)):
                    batch, seq, heads, kv_heads = key
                    ops = (fused(batch, seq, heads, kv_heads, *dims, True, "forward"),
                           measured.cache_write(batch, seq, kv_heads, *dims))  # fmt: skip
                    yield Sample(name, f"aic/{framework}", "attention_forward", "bf16", ops,
                                 found[key])  # fmt: skip


def scaled_tables() -> Iterator[Sample]:
    """Block-scaled and four-bit products, the fastest framework of each shape (one source)."""
    for name in ("h100", "h200", "b200", "b300", "gb200", "gb300"):
        accelerator = load_accelerator(name)
        for dtype, number_format in (("fp8_block", "fp8_block"), ("nvfp4", "nvfp4")):
            best: dict[tuple[int, int, int], float] = {}
            for path in tables.files(accelerator.measured_tables, "gemm", "gemm_perf").values():
                for m, n, k, seconds in _products(path, dtype, everything=True):
                    best[m, n, k] = min(seconds, best.get((m, n, k), seconds))
            for (m, n, k), seconds in evenly(sorted(best.items()), PER_TABLE):
                op = measured.product(m, n, k, number_format)
                yield Sample(name, "aic/fastest", "gemm", number_format, (op,), seconds)


def _products(
    path: Path, dtype: str, everything: bool = False
) -> list[tuple[int, int, int, float]]:
    columns = tables.read(path, ["m", "n", "k", "latency"],
                          [("gemm_dtype", "=", dtype), ("m", ">=", 512), ("n", ">=", 256),
                           ("k", ">=", 256), ("latency", ">", 0.0)])  # fmt: skip
    rows = sorted(
        (int(m), int(n), int(k), float(t) * 1e-3)
        for m, n, k, t in zip(*(columns[c] for c in ("m", "n", "k", "latency")), strict=True)
        if 2.0 * m * n * k >= SMALLEST
    )
    return rows if everything else evenly(rows, PER_TABLE)

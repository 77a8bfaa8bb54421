"""Rows from a file of operator figures: YAML with ``sources`` and ``points``.

A point names a product (``gpu``), ``op``, ``shape`` (``m=..,n=..,k=..``), ``dtype``, ``dir``,
``value`` in ``unit``, its source (``src``), software (``sw``), how sure it is (``conf``) and, where
known, microseconds (``us``).  What is no single measured kernel of a known shape is left out, and
counted by reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from primus_ext.cost.latency_db import work
from primus_ext.cost.latency_db.rows import Clock, Device, Origin, Row, Source, Versions
from primus_ext.cost.latency_db.store import DatabaseError
from primus_ext.trace import Op

_FORMATS = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8_e4m3/tensor", "fp4": "fp4_e2m1/nvfp4",
            "fp8_blockscale_1x128_128x128": "fp8_e4m3/block2d"}  # fmt: skip
_LAYOUTS = {"fwd": "tn", "dgrad": "nn", "wgrad": "nt"}
_PRODUCTS = {"A100-SXM-80": "a100", "A100-PCIe-80": "a100_pcie", "H100-SXM": "h100", "H200": "h200",
             "B200": "b200", "B300": "b300", "GB200": "gb200", "GB300": "gb300", "MI300X": "mi300x",
             "MI325X": "mi325x", "MI350X": "mi350x", "MI355X": "mi355x"}  # fmt: skip
"""Ours of a product's name; what names two products or a class of them is none of ours."""
_NOT_MEASURED = ("memory", "threshold", "fitted", "average", "best of search", "low-toggle")
_STABLE = ("thermally stable", "30 s per shape")
"""Words by which a source says that the device had reached its sustained clock."""
_PAIR, _CUBE = re.compile(r"([a-z_]+)=(\d+)"), re.compile(r"m=n=k=(\d+)")
CAVEAT = "isolated runs at boost clock: training is slower"


def is_one(path: Path) -> bool:
    """Whether a file's name says that it may be one."""
    return path.suffix in (".yaml", ".yml")


def read(path: Path, left: dict[str, int]) -> Iterator[Row]:
    """Rows of a file.

    Args:
        path: The file.
        left: Gets how many points were left out, by reason.

    Raises:
        DatabaseError: It has no list ``points``.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    with path.open(encoding="utf-8") as file:
        content = yaml.load(file, loader)  # noqa: S506  a safe loader
    if not isinstance(content, dict) or not isinstance(content.get("points"), list):
        raise DatabaseError(f"{path} has no list named points, as operator figures have")
    sources, seen = content.get("sources") or {}, set()
    for point in content["points"]:
        again = (point["src"], point["dir"], str(point["shape"])) in seen
        seen.add((point["src"], point["dir"], str(point["shape"])))
        found = _row(path, point, sources.get(point["src"]) or {}, again)
        if isinstance(found, Row):
            yield found
        else:
            left[found] = left.get(found, 0) + 1


def _row(path: Path, point: Mapping[str, Any], source: Mapping[str, Any], again: bool) -> Row | str:
    """The row of a point, or why there is none."""
    confidence = str(point.get("conf", ""))
    if any(word in confidence for word in _NOT_MEASURED):
        return "not one measured kernel (recalled, fitted, a threshold, an average or a best)"
    if point["unit"] != "TFLOP/s" or point["op"] not in _OPS:
        return "no work of one device that traces hold"
    op = _OPS[point["op"]](point, _sizes(str(point["shape"])), again)
    if op is None:
        return "the shape is not complete, or no training recipe has the number format"
    seconds = float(point["us"]) * 1e-6 if point.get("us") else op.flops / point["value"] / 1e12
    return Row(
        op=op,
        device=Device(product=str(point["gpu"]), kind="gpu",
                      accelerator=_PRODUCTS.get(str(point["gpu"]), "")),
        versions=Versions(framework=str(point.get("sw") or point.get("lib") or "")),
        source=_source(path, point, source),
        samples=(seconds,),
        clock=_clock(source),
        kernel=f"{point['op']} {point['dir']}",
        clock_hz=float(point.get("clock_mhz") or 0.0) * 1e6,
    )  # fmt: skip


def _clock(source: Mapping[str, Any]) -> Clock:
    stable = any(word in str(source.get("note", "")) for word in _STABLE)
    return Clock.SUSTAINED if stable else Clock.BOOST


def _source(path: Path, point: Mapping[str, Any], source: Mapping[str, Any]) -> Source:
    place = source.get("repo") or source.get("url") or source.get("package") or point["src"]
    commit = str(source.get("commit", ""))[:7]
    notes = [str(point.get("conf", "")), str(source.get("note", "")), str(point.get("note", ""))]
    if _clock(source) is Clock.BOOST:
        notes.append(CAVEAT)
    name = f"{path.name}: {place} {commit} {source.get('path', '')}"
    return Source(
        origin=Origin.IMPORTED,
        name=" ".join(name.split()),
        license=str(source.get("licence") or source.get("license") or ""),
        note="; ".join(note for note in notes if note),
    )


def _sizes(text: str) -> dict[str, int]:
    cube = _CUBE.match(text)
    if cube:
        return dict.fromkeys("mnk", int(cube[1]))
    return {name: int(value) for name, value in _PAIR.findall(text)}


def _product(point: Mapping[str, Any], sizes: dict[str, int], _again: bool) -> Op | None:
    dtype, text = _FORMATS.get(point["dtype"]), str(point["shape"])
    if dtype is None or not {"m", "n", "k"} <= sizes.keys() or point["dir"] not in _LAYOUTS:
        return None
    layout = next((name for name in ("nn", "nt") if f"layout={name.upper()}" in text), "tn")
    return work.product(
        sizes["m"], sizes["n"], sizes["k"], dtype, layout=layout, batch=sizes.get("b", 1),
        accumulate=bool(sizes.get("accumulate", sizes.get("beta", 0))),
        out="fp32" if "out=fp32" in text or "d=f32" in text else "bf16",
    )  # fmt: skip


def _grouped(point: Mapping[str, Any], sizes: dict[str, int], again: bool) -> Op | None:
    """All directions of a source are stated by the shape of the forward.

    SimuMax's files have each weight gradient accumulated in fp32 first, then (``again``) in bf16.
    """
    if not {"groups", "m_per_group", "n", "k"} <= sizes.keys() or point["dir"] not in _LAYOUTS:
        return None
    dtype = _FORMATS.get(point["dtype"])
    if dtype is None:
        return None
    rows, n, k = sizes["m_per_group"], sizes["n"], sizes["k"]
    layout = _LAYOUTS[point["dir"]]
    m, n, k = {"tn": (rows, n, k), "nn": (rows, k, n), "nt": (n, k, rows)}[layout]
    accumulated = layout == "nt" and str(point["src"]).startswith("simumax")
    return work.product(
        m, n, k, dtype, layout=layout, groups=sizes["groups"], accumulate=accumulated,
        out="fp32" if accumulated and not again else "bf16",
    )  # fmt: skip


def _attention(point: Mapping[str, Any], sizes: dict[str, int], _again: bool) -> Op | None:
    dims = sizes.get("d_qk", sizes.get("d", 0)), sizes.get("d_v", sizes.get("d", 0))
    if not {"b", "s", "hq", "hkv", "causal"} <= sizes.keys() or not all(dims):
        return None
    if point["dtype"] != "bf16" or point["dir"] not in ("fwd", "bwd"):
        return None
    return work.attention(
        sizes["b"], sizes["s"], sizes["hq"], sizes["hkv"], *dims, causal=bool(sizes["causal"]),
        backward=point["dir"] == "bwd",
    )  # fmt: skip


_OPS = {"gemm": _product, "batched_gemm": _product, "grouped_gemm": _grouped,
        "attention": _attention}  # fmt: skip

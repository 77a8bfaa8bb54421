"""Fit the kernel models to operator measurements and write them into the accelerator files.

    python scripts/fit/kernels.py EVIDENCE.yaml            # print what the rows say
    python scripts/fit/kernels.py EVIDENCE.yaml --write    # put it into hydra_conf/accelerator
    python scripts/fit/kernels.py EVIDENCE.yaml --check    # fail if a file differs by one character

Needs the optional tables (``pip install primus_ext[tables]``).  EVIDENCE.yaml holds ``points``:
gpu, op, shape, dtype, dir, value, unit, src, conf; rows that were looked up beside it stand in
``extra_evidence.yaml``.  Every source counts the same, however many rows it has.  Nothing here
looks at the step time of any training run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from pathlib import Path

from kernel_evidence import Sample, from_rows, from_tables, scaled_tables
from kernel_world import Fitter, Found, World, attention_shares, constants_of, gemm_shares
from rows import Row, read

from primus_ext.cluster_data import load_accelerator
from primus_ext.conf_dir import hydra_conf_dir
from primus_ext.cost import tables

HERE = Path(__file__).resolve().parent
EXTRA = HERE / "extra_evidence.yaml"
MARK = "# ---- below: written by scripts/fit/kernels.py; change the evidence, not this ----\n"
OWN = ("a100", "a100_pcie", "h100", "h200", "b200", "b300", "gb200", "gb300", "mi300x", "mi325x",
       "mi355x")  # fmt: skip
"""Accelerators with rows of their own; the others inherit (``like``)."""
TOLERANCE = 0.005
HBM_ROWS = {
    "a100": ("A100-SXM-80", "a100"), "h100": ("H100-SXM", "h100"), "h200": ("H200", "h200"),
    "b200": ("B200", "b200"), "mi300x": ("MI300X", "mi300x"), "mi325x": ("MI300X", "mi300x"),
    "mi355x": ("MI300X", "mi300x"),
}  # fmt: skip
MEMORY_ROWS = {
    "nvidia": {"permute": ("B200", "permute_", ""), "cross_entropy": ("B200", "fused_cross", "")},
    "amd": {"norm": ("MI355X", "layernorm", "torch.compile"), "rope": ("MI355X", "rope", "AITER")},
}
"""By vendor, kind: product, start of the op's name, software."""
LARGE = 2**28
"""Elements from which a quantisation shows the bandwidth."""
MXFP8_SETS = {"gb200": ("GB200",), "mi355x": ("MI355X",)}
"""Averages over model shapes that count the quantisation of both operands: a lower bound."""


def samples_of(evidence: Path) -> tuple[list[Sample], dict[str, int]]:
    """All samples, and how many rows were left out for which reason.

    Raises:
        SystemExit: The optional tables are not installed.
    """
    if tables.source() is None:
        raise SystemExit("the tables are not installed: pip install aiconfigurator-core pyarrow")
    samples, left = from_rows([evidence, EXTRA])
    return [*samples, *from_tables()], left


def hbm_share(rows: list[Row], name: str) -> float | None:
    """Share of the memory bandwidth that streams reach: median over sources of the median."""
    product, peak_of = HBM_ROWS[name]
    peak = load_accelerator(peak_of).hbm_bandwidth.value / 1e12
    by_source: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.gpu == product and row.op in ("hbm_copy", "hbm_triad", "hbm_quantize"):
            by_source[row.source].append(row.value / peak)
    middles = [statistics.median(values) for values in by_source.values()]
    return statistics.median(middles) if middles else None


def memory_shares(rows: list[Row], name: str) -> Found:
    """Shares of the memory bandwidth of kinds of kernels that do not stream."""
    accelerator = load_accelerator(name)
    found: Found = {}
    for kind, (product, op, software) in MEMORY_ROWS[accelerator.vendor].items():
        peak = load_accelerator({"B200": "b200", "MI355X": "mi355x"}[product]).hbm_bandwidth.value
        values = [
            r.value * 1e12 / peak for r in rows
            if r.gpu == product and r.op.startswith(op) and software in r.software
        ]  # fmt: skip
        if values:
            what = f"{len(values)} rows of {product}, {software or 'Transformer Engine'}"
            found[kind] = (round(statistics.median(values), 3), what)
    rates = list(_quantisation_rates(accelerator.measured_tables))
    if rates:
        share = statistics.median(rates) / accelerator.hbm_bandwidth.value
        found["quantize"] = (round(min(share, 0.95), 3),
                             f"{tables.source()}, scale_matrix, {len(rates)} rows")  # fmt: skip
    return found


def _quantisation_rates(system: str) -> list[float]:
    rates = []
    for framework, path in tables.files(system, "quantize", "scale_matrix_perf").items():
        if system and framework != "sglang":  # ten times slower there: another kernel
            columns = tables.read(path, ["m", "k", "latency"], [("latency", ">", 0.0)])
            rates += [3 * m * k / (t * 1e-3) for m, k, t in zip(
                *(columns[c].tolist() for c in ("m", "k", "latency")), strict=True)
                if m * k >= LARGE]  # fmt: skip
    return rates


def with_sets(rows: list[Row], name: str, shares: Found) -> Found:
    """MXFP8 between a bound with quantisation and the share of per-tensor FP8."""
    peaks = load_accelerator(name).peak_flops
    products = MXFP8_SETS.get(name, ("GB200",) if "mxfp8" in peaks and "nvfp4" in peaks else ())
    source = "gb200" if products == ("GB200",) else name
    values = [r.value * 1e12 / load_accelerator(source).peak_flops["mxfp8"].value for r in rows
              if r.gpu in products and r.op == "gemm_set" and r.dtype == "mxfp8"]  # fmt: skip
    if "mxfp8" in peaks and values:
        low, high = statistics.median(values), shares["fp8"][0]
        said = f"geometric mean of {low:.3f} with quantisation (Primus-Turbo PR 274) and of fp8"
        return shares | {"mxfp8": (round((low * high) ** 0.5, 3), said)}
    return shares


def block(world: World, rows: list[Row], name: str) -> str:
    """The part of an accelerator's file that is written here."""
    shares = with_sets(rows, name, gemm_shares(world, name))
    parts = {
        "gemm_efficiency": shares,
        "attention_efficiency": attention_shares(world, name),
        "memory_efficiency": memory_shares(rows, name),
        "kernel_model": constants_of(world, name),
    }
    lines = [MARK]
    for part, found in parts.items():
        lines.append(f"{part}:\n")
        for key in sorted(found):
            value, said = found[key]
            text = f"{value:.3g}" if value < 1e-3 else f"{round(value, 4):g}"
            text = text.replace("e-0", "e-") if "." in text.partition("e")[0] else text.replace(
                "e-0", ".0e-")  # fmt: skip
            lines.append(f'  {key}: {{value: {text}, source: "{said}; scripts/fit/kernels.py"}}\n')
    return "".join(lines)


def main() -> int:
    """Print, write or check the fitted parts of the accelerator files."""
    parser = argparse.ArgumentParser(description="Fit the kernel models")
    parser.add_argument("evidence", type=Path)
    parser.add_argument("--write", action="store_true", help="change the accelerator files")
    parser.add_argument("--check", action="store_true", help="fail where a file differs")
    asked = parser.parse_args()
    samples, _ = samples_of(asked.evidence)
    world = Fitter([*samples, *scaled_tables()]).world()
    rows = read([asked.evidence, EXTRA])
    bounds = read([asked.evidence, EXTRA], also=("threshold",))
    differing = []
    for name in OWN:
        text = block(world, rows, name)
        path = hydra_conf_dir() / "accelerator" / f"{name}.yaml"
        own, _, stated = path.read_text(encoding="utf-8").partition(MARK)
        if asked.write:
            path.write_text(own + text, encoding="utf-8")
        elif MARK + stated != text:
            differing.append(path.name)
        share = hbm_share(bounds if name.startswith("mi") else rows, name) \
            if name in HBM_ROWS else None  # fmt: skip
        if share and abs(share - load_accelerator(name).hbm_efficiency.value) > TOLERANCE:
            differing.append(f"{path.name} (hbm_efficiency: the rows say {share:.3f})")
        if not asked.check:
            sys.stdout.write(f"{name}\n{text.removeprefix(MARK)}")
    for name in differing:
        sys.stdout.write(f"differs: {name}\n")
    return 1 if asked.check and differing else 0


if __name__ == "__main__":
    sys.exit(main())

"""Fit what expert dispatch and combine reach: ``hydra_conf/exchange/*.yaml``.

    python scripts/fit/exchange.py EVIDENCE.yaml            # write the files
    python scripts/fit/exchange.py EVIDENCE.yaml --check    # fail if a file says otherwise
    python scripts/fit/exchange.py EVIDENCE.yaml --errors validation/exchange_errors.md

Needs the optional package ``aiconfigurator-core``: its ``wideep_deepep_normal_perf`` tables hold
DeepEP within one node for 4 to 24 SMs.  The share of the links comes from published figures with
more SMs, the pace of HybridEP from DeepEP's own comparison of both.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import yaml
from exchange_rows import Kernel, published, tabled

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "hydra_conf" / "exchange"
GENERATIONS = {"hopper": ("h100", "h200"), "blackwell": ("b200", "b300", "gb200", "gb300"),
               "cdna": ("mi300x", "mi355x")}  # fmt: skip
GRIDS = {
    "dispatch_start_s": (15e-6, 60e-6, 1e-6), "combine_start_s": (15e-6, 80e-6, 1e-6),
    "row_s": (0.0, 0.6e-6, 0.01e-6), "sm_bandwidth": (15e9, 80e9, 0.5e9),
}  # fmt: skip
WORTH = 2e-4
SWEEPS = 6
START = {"dispatch_start_s": 30e-6, "combine_start_s": 45e-6, "row_s": 0.2e-6,
         "sm_bandwidth": 35e9}  # fmt: skip

Constants = dict[str, float]


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """Kernels as arrays."""

    rows: np.ndarray
    row_bytes: np.ndarray
    sms: np.ndarray
    links: np.ndarray
    combine: np.ndarray
    seconds: np.ndarray

    @classmethod
    def of(cls, kernels: list[Kernel]) -> Table:
        """The kernels of one product list."""
        return cls(
            rows=np.array([k.rows for k in kernels]),
            row_bytes=np.array([k.row_bytes for k in kernels]),
            sms=np.array([float(k.sms) for k in kernels]),
            links=np.array([k.links for k in kernels]),
            combine=np.array([k.direction == "combine" for k in kernels]),
            seconds=np.array([k.seconds for k in kernels]),
        )

    def ratios(self, at: Constants) -> np.ndarray:
        """ln(modelled / measured), as :mod:`primus_ext.cost.exchange` has it in one node."""
        start = np.where(self.combine, at["combine_start_s"], at["dispatch_start_s"])
        wire = self.rows * self.row_bytes / (self.links * at["share"])
        each = at["row_s"] + self.row_bytes / at["sm_bandwidth"]
        times = start + np.maximum(wire, self.rows * each / self.sms)
        return np.log(times / self.seconds)


def _grid(key: str) -> Iterator[float]:
    first, last, step = GRIDS[key]
    return (round(first + i * step, 12) for i in range(round((last - first) / step) + 1))


def search(start: Constants, measure: Callable[[Constants], float]) -> Constants:
    """Move one constant at a time to the best place on its grid until none moves."""
    best, at = measure(start), dict(start)
    for _ in range(SWEEPS):
        moved = False
        for key in GRIDS:
            losses = {value: measure({**at, key: value}) for value in _grid(key)}
            value = min(losses, key=lambda v: (losses[v], v))
            if losses[value] < best - WORTH:
                best, moved, at[key] = losses[value], True, value
        if not moved:
            break
    return at


def share(kernels: list[Kernel]) -> float:
    """Highest share of the links that each source reports, their median."""
    by_source: dict[str, float] = {}
    for kernel in kernels:
        reached = kernel.rows * kernel.row_bytes / kernel.seconds / kernel.links
        by_source[kernel.source] = max(by_source.get(kernel.source, 0.0), reached)
    return round(statistics.median(by_source.values()), 3)


def hybrid_pace(kernels: list[Kernel]) -> float:
    """How much faster HybridEP is than DeepEP on as many SMs, in the same comparison."""
    pairs = [
        a.rate / b.rate
        for a in kernels for b in kernels
        if (a.backend, b.backend) == ("hybridep", "deepep") and a.source == b.source
        and (a.accelerator, a.direction, a.row_bytes, a.sms, a.ranks)
        == (b.accelerator, b.direction, b.row_bytes, b.sms, b.ranks)
        and b.sms <= 24
    ]  # fmt: skip
    return round(statistics.median(pairs), 2)


def fit(name: str, kernels: list[Kernel]) -> Constants:
    """The constants of one generation, from the kernels of one node that are given."""
    mine = [k for k in kernels if k.accelerator in GENERATIONS[name]]
    top = share([k for k in mine if k.source != "aic"])
    if name == "cdna":
        return {"share": top}
    table = Table.of([k for k in mine if k.source == "aic"])
    start = {"share": top, **START}
    return search(start, lambda at: float(np.mean(np.abs(table.ratios(at)))))


def _text(name: str, at: Constants, pace: float, sources: str) -> str:
    entries: dict[str, tuple[float, str]] = {
        "share": (at["share"], f"highest that {sources} report, their median")
    }
    if name == "cdna":
        entries["dispatch_start_s"] = (35e-6, "ROCm/mori 624002c, 128 tokens a rank on 8 MI300X")
        entries["combine_start_s"] = (47e-6, "ROCm/mori 624002c, 128 tokens a rank on 8 MI300X")
    else:
        origin = ("fitted by scripts/fit/exchange.py to wideep_deepep_normal_perf of "
                  "aiconfigurator-core 0.12.0, one node, 4 to 24 SMs")  # fmt: skip
        entries |= {key: (at[key], origin) for key in GRIDS}
        entries["hybridep_speed"] = (
            pace, "DeepEP 94a9f8f docs/README_Hybrid-EP.md: HybridEP over DeepEP on as many SMs"
        )  # fmt: skip
    table = {key: {"value": value, "source": source} for key, (value, source) in entries.items()}
    head = f"# Expert dispatch and combine, {name}.  Written by scripts/fit/exchange.py.\n"
    return head + yaml.safe_dump(table, sort_keys=False, width=96)


def files(kernels: list[Kernel]) -> dict[Path, str]:
    """Every file that the fit writes, with its content."""
    pace = hybrid_pace(kernels)
    inside = [k for k in kernels if k.nodes == 1]
    written = {}
    for name, members in GENERATIONS.items():
        found = {k.source for k in inside if k.accelerator in members and k.source != "aic"}
        at = fit(name, inside)
        written[FOLDER / f"{name}.yaml"] = _text(name, at, pace, ", ".join(sorted(found)))
    return written


def errors(kernels: list[Kernel]) -> str:
    """Each source against the product's own files."""
    lines = [
        "# Errors of expert dispatch and combine", "",
        "Written by `python scripts/fit/exchange.py EVIDENCE --errors FILE`, with the product's",
        "own constants.  Starts and SMs were fitted to the tables `aic` alone: published figures",
        "test them; of these only the highest rate in one node went into the share of the links,",
        "and one comparison into HybridEP's pace.  What crosses nodes was fitted to nothing.",
        "DeepEP V2 is another library than the one that Megatron calls.",
        "", "| source | accelerator | backend | nodes | points | median error |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    groups = sorted({(k.source, k.accelerator, k.backend, k.nodes) for k in kernels})
    for source, accelerator, backend, nodes in groups:
        mine = [
            k for k in kernels
            if (k.source, k.accelerator, k.backend, k.nodes)
            == (source, accelerator, backend, nodes)
        ]  # fmt: skip
        found = statistics.median(abs(k.predicted() / k.seconds - 1) for k in mine)
        lines.append(
            f"| {source} | {accelerator} | {backend} | {nodes} | {len(mine)} | {found:.1%} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the files, or the table of errors; with ``--check`` return 1 where a file differs."""
    parser = argparse.ArgumentParser(description="Fit expert dispatch and combine")
    parser.add_argument("evidence", type=Path)
    parser.add_argument("--check", action="store_true", help="fail where a file differs")
    parser.add_argument("--errors", type=Path, help="write the table of errors")
    options = parser.parse_args()
    kernels = [*published(options.evidence), *tabled()]
    if not any(kernel.source == "aic" for kernel in kernels):
        print("aiconfigurator-core is not installed: pip install 'primus_ext[tables]'")
        return 2
    if options.errors:
        options.errors.write_text(errors(kernels))
        return 0
    differing = False
    for path, text in files(kernels).items():
        if not path.is_file() or path.read_text() != text:
            differing = True
            print(f"{path.relative_to(ROOT)} {'differs' if options.check else 'written'}")
            if not options.check:
                path.write_text(text)
    return int(options.check and differing)


if __name__ == "__main__":
    sys.exit(main())

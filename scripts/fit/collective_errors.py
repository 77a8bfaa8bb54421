"""The table of errors with each source left out of the fit."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collectives import Curve, Ratios

LARGE = 2**20
"""Bytes from which a message counts as large."""
BAR = 0.15

_HEAD = """\
# Errors of the collectives

Written by `python scripts/fit/collectives.py EVIDENCE --errors validation/collective_errors.md`.

Every source (a published log, or `aic`: the NCCL tables of aiconfigurator-core 0.12.0, all seven
products at once) is predicted with constants that were fitted without it.  `formula` is the product
without the extra `tables`; `with tables` reads the measured tables for groups of 2, 4 and 8 GPUs of
one NVIDIA node (never to predict themselves).  An entry is the median of |modelled / measured - 1|
over the sizes, 1 KiB and more (`large`: 1 MiB and more).  A row for a vendor or kind is the median
over its sources of each source's median, so that the tables do not decide alone; `points` pools
all.  Not scored: acceptance thresholds, other tools' fits, kernels of serving frameworks.
"""


class _Scores:
    """Errors of every point, by source and what was measured."""

    def __init__(self) -> None:
        self.formula: defaultdict[tuple, list[np.ndarray]] = defaultdict(list)
        self.tables: defaultdict[tuple, list[np.ndarray]] = defaultdict(list)
        self.large: defaultdict[tuple, list[np.ndarray]] = defaultdict(list)

    def add(self, key: tuple, curve: Curve, formula: np.ndarray, tables: np.ndarray) -> None:
        """Note one sweep; both arrays are ln(modelled / measured)."""
        self.formula[key].append(np.abs(np.expm1(formula)))
        self.tables[key].append(np.abs(np.expm1(tables)))
        self.large[key].append(np.abs(np.expm1(tables))[curve.bytes >= LARGE])


def _median(parts: list[np.ndarray]) -> float:
    values = np.concatenate(parts)
    return float(np.median(values)) if len(values) else float("nan")


def _percent(value: float) -> str:
    return "-" if value != value else f"{value:.1%}"


def _summary(scores: _Scores, keep: Callable[[tuple], bool], label: str) -> str:
    """One line over the sources that ``keep`` lets in."""
    cells = []
    for table in (scores.formula, scores.tables, scores.large):
        by_source: defaultdict[str, list[np.ndarray]] = defaultdict(list)
        for key, parts in table.items():
            if keep(key):
                by_source[key[2]] += parts
        medians = [m for parts in by_source.values() if (m := _median(parts)) == m]
        cells.append(statistics.median(medians) if medians else float("nan"))
    pooled = [part for key, parts in scores.tables.items() if keep(key) for part in parts]
    points = sum(len(part) for part in pooled)
    sources = len({key[2] for key in scores.formula if keep(key)})
    middle = " | ".join(_percent(cell) for cell in cells)
    return f"| {label} | {sources} | {points} | {middle} | {_percent(_median(pooled))} |"


def write(scores: _Scores) -> str:
    """The page."""
    lines = [_HEAD, "| | sources | points | formula | with tables | large, with tables | pooled |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for vendor in ("nvidia", "amd"):
        lines.append(_summary(scores, lambda k, v=vendor: k[0] == v, f"**{vendor}**"))
        for kind in sorted({key[1] for key in scores.formula if key[0] == vendor}):
            lines.append(
                _summary(scores, lambda k, v=vendor, n=kind: k[:2] == (v, n), f"{vendor} {kind}")
            )
    lines += ["", "| source | vendor | kind | accelerator | GPUs | network | points | formula | "
              "with tables | large |", "|---|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for key in sorted(scores.formula, key=lambda k: (k[2], k[3], k[1], k[4], k[5])):
        vendor, kind, source, accelerator, gpus, fabric = key
        points = sum(len(part) for part in scores.formula[key])
        cells = " | ".join(
            _percent(_median(table[key])) for table in (scores.formula, scores.tables, scores.large)
        )
        lines.append(
            f"| {source} | {vendor} | {kind} | {accelerator} | {gpus} | {fabric or '-'} | "
            f"{points} | {cells} |"
        )
    return "\n".join(lines) + "\n"


def collect(
    found: list[Curve],
    without: Callable[[str], Ratios],
    tabled: Callable[[Curve, Ratios], np.ndarray],
) -> _Scores:
    """Score every source with what was fitted without it.

    Args:
        found: All sweeps.
        without: For a source, the function that gives ln(modelled / measured) of a sweep.
        tabled: The same with measured tables, from the formula's.
    """
    scores = _Scores()
    for source in sorted({curve.of.source for curve in found}):
        ratios = without(source)
        for curve in found:
            if curve.of.source != source:
                continue
            of, formula = curve.of, ratios(curve)
            key = (of.cluster.accelerator.vendor, str(of.kind), source, of.accelerator,
                   len(of.ranks), of.fabric)  # fmt: skip
            scores.add(key, curve, formula, tabled(curve, ratios))
    return scores

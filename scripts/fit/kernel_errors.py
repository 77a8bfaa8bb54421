"""How far the kernel models are from measurements of sources that they were not fitted to.

    python scripts/fit/kernel_errors.py EVIDENCE.yaml [--no-tables] > validation/kernel_errors.md

Each source in turn is left out of the fit (``kernels.py``) and out of the tables (a framework of
aiconfigurator-core is a source of its own), and then predicted.  Without ``--no-tables`` the page
has both variants.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from kernel_evidence import Sample
from kernel_fit import GENERATIONS, SUSTAINED
from kernel_world import Fitter, accelerator, is_amd
from kernels import samples_of

from primus_ext.cluster import Figure
from primus_ext.cluster_data import load_accelerator, load_cluster
from primus_ext.cost import gemm, tables
from primus_ext.cost.measured import Measured
from primus_ext.cost.model import CostModel

LARGE = 2.0**36
FAMILIES = ("gemm", "grouped_gemm", "attention_forward", "attention_backward")
_BOOST = Figure(value=1.0, source="short runs at boost clock")


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """Errors of one source on one product, ln(predicted / measured)."""

    family: str
    name: str
    source: str
    kind: str
    """Number format of a product, head dimensions of attention."""
    alone: bool
    """No other source has rows of the same kind on the same generation."""
    errors: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median of the absolute errors."""
        return statistics.median(abs(e) for e in self.errors)


class Scorer:
    """Prices of samples by models that have not seen their source."""

    def __init__(self, samples: list[Sample], with_tables: bool) -> None:
        """Score ``samples``, with or without measured neighbours."""
        self._samples, self._with_tables = samples, with_tables
        self._fitter = Fitter(samples)
        self._models: dict[tuple[str, str], CostModel] = {}

    def lines(self) -> list[Line]:
        """One line for each family, product, source and number format."""
        found: dict[tuple[str, str, str, str], list[float]] = defaultdict(list)
        for s in self._samples:
            model = self._model(s.source, s.accelerator)
            predicted = sum(model.op_seconds(op).seconds for op in s.ops)
            found[s.family, s.accelerator, s.source, _kind(s)].append(
                math.log(predicted / s.seconds))
        return [Line(*key, self._alone(key), tuple(e)) for key, e in sorted(found.items())]

    def _model(self, source: str, name: str) -> CostModel:
        if (source, name) not in self._models:
            fitted = accelerator(self._fitter.world(source), name)
            cluster = dataclasses.replace(load_cluster(name, 1, 1), accelerator=fitted)
            left = (source.partition("/")[2],) if source.startswith("aic/") else ()
            corrected = Measured(fitted, left) if self._with_tables else False
            self._models[source, name] = CostModel(
                cluster, tables=corrected, alone=source not in SUSTAINED
            )
        return self._models[source, name]

    def _alone(self, key: tuple[str, str, str, str]) -> bool:
        family, name, source, kind = key
        if family == "grouped_gemm":  # nothing is fitted to them but the overlap
            return False
        near = next(names for names in GENERATIONS.values() if name in names)
        return not any(s.family == family and s.accelerator in near and s.source != source
                       and _kind(s) == kind for s in self._samples)  # fmt: skip


def _kind(s: Sample) -> str:
    """Number format of a product, head dimensions of attention."""
    if s.family.startswith("attention"):
        return f"{s.ops[0].attr('dim_qk')}/{s.ops[0].attr('dim_v')}"
    return s.number_format


def summary(lines: list[Line]) -> list[str]:
    """Medians by family and vendor: over sources, over rows, and of those that are not alone."""
    out = ["| kind | vendor | sources | rows | median of lines' medians | median of rows | "
           "of lines that are not alone |", "|---|---|---|---|---|---|---|"]  # fmt: skip
    groups = [*[(f,) for f in FAMILIES], ("attention_forward", "attention_backward")]
    for families in groups:
        for vendor in ("NVIDIA", "AMD"):
            chosen = [x for x in lines if x.family in families
                      and is_amd(x.name) == (vendor == "AMD")]  # fmt: skip
            near = [x for x in chosen if not x.alone]
            rows = [abs(e) for x in chosen for e in x.errors]
            kind = families[0] if len(families) == 1 else "attention, both"
            middle = statistics.median(x.median for x in chosen)
            out.append(
                f"| {kind} | {vendor} | {len({x.source for x in chosen})} | {len(rows)} | "
                f"{middle:.1%} | {statistics.median(rows):.1%} | "
                f"{statistics.median(x.median for x in near):.1%} |")  # fmt: skip
    return out


def details(lines: list[Line]) -> list[str]:
    """One row for each line."""
    out = ["| kind | product | source left out | format or dims | rows | median | p90 | bias | |",
           "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for x in lines:
        absolute = np.abs(x.errors)
        out.append(
            f"| {x.family} | {x.name} | {x.source} | {x.kind} | {len(absolute)} | "
            f"{np.median(absolute):.1%} | {np.quantile(absolute, 0.9):.1%} | "
            f"{np.median(x.errors):+.1%} | {'alone' if x.alone else ''} |")  # fmt: skip
    return out


def own_clock(samples: list[Sample], source: str) -> str:
    """What a source at the power limit says of its clock, and its grouped products at that clock.

    The clock is the median of modelled over measured seconds of its large dense products.
    """
    own = [s for s in samples if s.source == source]
    name = own[0].accelerator
    boost = accelerator(Fitter(samples).world(source), name)
    dense = [s for s in own if s.family == "gemm" and s.ops[0].flops >= LARGE]
    clock = statistics.median(gemm.price(boost, s.ops[0]).seconds / s.seconds for s in dense)
    families = []
    for family in ("gemm", "grouped_gemm"):
        errors = [math.log(gemm.price(boost, s.ops[0]).seconds / clock / s.seconds)
                  for s in own if s.family == family]  # fmt: skip
        families.append(f"{family} {statistics.median(map(abs, errors)):.1%} "
                        f"(bias {statistics.median(errors):+.1%}, {len(errors)} rows)")  # fmt: skip
    return (
        f"{source}: {len(dense)} dense products of 2^36 FLOPs and more ran at {clock:.2f} of what "
        f"the boost clock gives.  At that one factor of its own: {', '.join(families)}."
    )


def page(samples: list[Sample], left: dict[str, int], variants: list[bool]) -> str:
    """The whole page in Markdown."""
    clocks = ", ".join(
        f"{source}: {load_accelerator('b200').sustained['gemm/bf16'].value:g} times as long"
        for source in SUSTAINED
    )
    parts = [
        "# Kernel models against sources left out of the fit", "",
        "`python scripts/fit/kernel_errors.py EVIDENCE.yaml`.  Errors: |ln(predicted/measured)|; "
        "bias is the median with its sign (+: predicted too slow).  *alone*: no other source has "
        "rows of the kind on that generation of hardware, so the prediction comes from other "
        f"generations or formats.  Sources that ran at the power limit are predicted with the "
        f"accelerator's `sustained` factors ({clocks}), all others without.", "",
    ]  # fmt: skip
    for with_tables in variants:
        lines = Scorer(samples, with_tables).lines()
        title = f"With {tables.source()}" if with_tables else "Formulas alone (no optional tables)"
        parts += [f"## {title}", "", *summary(lines), "", *details(lines), ""]
    parts += ["## Sources at the power limit", "",
              *(own_clock(samples, source) for source in SUSTAINED), ""]  # fmt: skip
    parts += ["## Rows left out", "", "Recalled figures, acceptance thresholds and the best of a "
              "search are not read at all (`rows.py`).", "", "| rows | reason |", "|---|---|"]
    parts += [f"| {count} | {reason} |" for reason, count in sorted(left.items())]
    return "\n".join(parts) + "\n"


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description="Errors of kernel models by source")
    parser.add_argument("evidence", type=Path)
    parser.add_argument("--no-tables", action="store_true", help="formulas alone")
    asked = parser.parse_args()
    samples, left = samples_of(asked.evidence)
    sys.stdout.write(page(samples, left, [False] if asked.no_tables else [True, False]))


if __name__ == "__main__":
    main()

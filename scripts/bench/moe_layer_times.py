"""Times of Megatron-LM's benchmark of one mixture-of-experts layer, projected and measured.

    python scripts/bench/moe_layer_times.py CASES.yaml [WORD ...] > validation/moe_layer_times.md

CASES.yaml: a list of cases with ``model``, ``parallelism``, ``precision``, ``dispatcher`` and
``measured.forward_ms``, ``measured.backward_ms``, on one host of 8 H100.  Words: only cases whose
id has one.  Ops run one after the other, as the benchmark's layer does.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import yaml
from moe_layer_memory import recorded

from primus_ext.cluster_data import load_cluster
from primus_ext.cost.model import CostModel
from primus_ext.trace import Family, Op
from primus_ext.trace_io import from_plain

PHASES = ("forward", "backward")
_REMOTE = (Family.COLLECTIVE, Family.P2P)


@dataclasses.dataclass(frozen=True, slots=True)
class Times:
    """Projected seconds of one phase, by family of work."""

    families: dict[str, float]

    @property
    def total(self) -> float:
        """Seconds of all ops."""
        return math.fsum(self.families.values())


def times(did: dict[str, Any], model: CostModel) -> dict[str, Times]:
    """Projected seconds by phase and family."""
    ops = [from_plain(Op, op) for op in did["ops"]]
    found: dict[str, Times] = {}
    for phase in PHASES:
        families: dict[str, float] = defaultdict(float)
        for index in did[phase]:
            op = ops[index]
            if op.family in _REMOTE and op.collective is not None:
                ranks = did["groups"][op.collective.group]
                families["communication"] += model.collective_seconds(op.collective, ranks).seconds
            else:
                families[str(op.family)] += model.op_seconds(op).seconds
        found[phase] = Times(dict(families))
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Times of one mixture-of-experts layer")
    parser.add_argument("cases", type=Path)
    parser.add_argument("words", nargs="*")
    asked = parser.parse_args()
    cluster = load_cluster("h100", 1, 8)
    models = [CostModel(cluster, tables=tables, alone=True) for tables in (True, False)]
    sys.stdout.write(
        "# One mixture-of-experts layer on 8 H100, projected and measured\n\n"
        "`python scripts/bench/moe_layer_times.py CASES.yaml`.  Measured: Megatron-LM d98e8a6, "
        "tests/functional_tests/test_cases/common/moe_perf/baseline.json.  Milliseconds; none of "
        "these times was fitted.  `alone`: without the optional tables.\n\n"
        "| case | phase | measured | projected | error | alone | parts |\n"
        "|---|---|---|---|---|---|---|\n"
    )
    errors: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for row in yaml.safe_load(asked.cases.read_text(encoding="utf-8")):
        if asked.words and not any(word in row["id"] for word in asked.words):
            continue
        did = recorded(row)
        projected, alone = (times(did, model) for model in models)
        for phase in PHASES:
            measured = row["measured"][f"{phase}_ms"] * 1e-3
            error = projected[phase].total / measured - 1
            errors[phase].append(error)
            parts = ", ".join(f"{name} {seconds * 1e3:.2f}" for name, seconds in
                              sorted(projected[phase].families.items(), key=lambda x: -x[1])
                              if seconds > 0)  # fmt: skip
            sys.stdout.write(
                f"| {row['id'].removeprefix('moelayer-h100-')} | {phase} | {measured * 1e3:.2f} | "
                f"{projected[phase].total * 1e3:.2f} | {error:+.1%} | "
                f"{alone[phase].total / measured - 1:+.1%} | {parts} |\n")  # fmt: skip
            sys.stdout.flush()
    for phase, found in errors.items():
        sys.stdout.write(
            f"\n{phase}: mean absolute error {statistics.fmean(map(abs, found)):.1%}, "
            f"bias {statistics.fmean(found):+.1%}\n")  # fmt: skip


if __name__ == "__main__":
    main()

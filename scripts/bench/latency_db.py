"""What the latency database saves in measuring, and how well it prices what it never saw.

    python scripts/bench/latency_db.py --db /tmp/bench.sqlite --out validation/latency_db.md

Every op of a list of models is measured once on the device at hand (rows that the database holds
already are not measured again).  Then the same times answer two questions:

- how much device time takes the plan of ``primus-ext db measure``, which interpolates the rest,
  against profiling each configuration's unique signatures, at the same repetitions;
- with all measurements of eleven models, how far off are the ops of the twelfth.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from primus_ext.cost.latency_db import Device, LatencyDatabase, Versions
from primus_ext.cost.latency_db.planning import TOLERANCE, Planner
from primus_ext.cost.latency_db.prices import Prices
from primus_ext.cost.latency_db.regression import Regression
from primus_ext.runner import configurations, database_fill
from primus_ext.runner.configurations import Needs
from primus_ext.runner.microbench import Microbench
from primus_ext.trace import Op

REPETITIONS, WARMUP = 7, 2
TOLERANCES = (0.06, 0.08, TOLERANCE)
"""What may stay unknown; the last one decides what is priced below."""
PUBLISHED = 0.564
"""Saving of measuring time that a published database states for its own list of models."""
Seconds = dict[Op, float]


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """How well one configuration is priced."""

    name: str
    signatures: int
    unseen: int
    """Of them, those that were not measured."""
    share: float
    """Of the configuration's time that they take."""
    total: float
    """Priced over measured time of the configuration, less 1."""
    median: float
    """Error of the unseen ops."""
    weighted: float
    """The same, weighted by their time."""
    inside: float
    """Share of the unseen that lie in their interval."""


def score(name: str, ops: Mapping[Op, int], truth: Seconds, known: Seconds) -> Score:
    """Price a configuration from what is known and compare."""
    regression = Regression(known.items())
    whole = sum(truth[op] * count for op, count in ops.items())
    priced, errors, inside, weights = 0.0, [], [], []
    for op, count in ops.items():
        if op in known:
            priced += known[op] * count
            continue
        found = regression.estimate(op)
        if found is None:
            raise SystemExit(f"{op.name} has no price")
        priced += found.seconds * count
        errors.append(abs(found.seconds / truth[op] - 1))
        inside.append(found.low <= truth[op] <= found.high)
        weights.append(truth[op] * count)
    weighted = sum(e * w for e, w in zip(errors, weights, strict=True)) / max(sum(weights), 1e-12)
    return Score(
        name, len(ops), len(errors), sum(weights) / whole, priced / whole - 1,
        statistics.median(errors) if errors else 0.0, weighted,
        sum(inside) / len(inside) if inside else 1.0,
    )  # fmt: skip


def measured(bench: Microbench, database: LatencyDatabase, ops: Iterable[Op]) -> Seconds:
    """Times of ops, from the database or measured now."""
    have = database_fill.known(database, bench.device)
    found: Seconds = {}
    for op in ops:
        if op not in have:
            answer = bench.answer(op)
            if answer["status"] != "ok":
                sys.stderr.write(f"{answer['status']}: {answer['message']}\n")
                continue
            row = bench.row(op, answer)
            database.add([row])
            have[op] = row.median
        found[op] = have[op]
    return found


def planned(bench: Microbench, database: LatencyDatabase, planner: Planner) -> Seconds:
    """What ``primus-ext db measure`` would measure, starting from nothing."""
    known: Seconds = {}
    refused: list[Op] = []
    while chosen := planner.next(known, refused):
        found = measured(bench, database, chosen)
        known |= found
        refused += [op for op in chosen if op not in found]
    return known


def device_s(ops: Iterable[Op], times: Seconds) -> float:
    """Device time of profiling ops, each with the same warm-up and repetitions."""
    return sum(times[op] for op in ops) * (REPETITIONS + WARMUP)


def left_out(configs: Mapping[str, Mapping[Op, int]], truth: Seconds) -> list[Score]:
    """Each model priced from the measurements of the others alone."""
    found = []
    for name, ops in configs.items():
        others = {op for other, some in configs.items() if other != name for op in some}
        found.append(score(name, ops, truth, {op: truth[op] for op in others}))
    return found


def table(scores: Iterable[Score]) -> list[str]:
    """Markdown rows."""
    lines = [
        "| configuration | signatures | not measured | their share of the time | error of the "
        "configuration's time | median error of an op not measured | the same, weighted by time | "
        "in their 90 % interval |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {s.name} | {s.signatures} | {s.unseen} | {100 * s.share:.0f} % | {100 * s.total:+.1f} "
        f"% | {100 * s.median:.1f} % | {100 * s.weighted:.1f} % | {100 * s.inside:.0f} % |"
        for s in scores
    ]
    return lines


def summary(scores: list[Score]) -> str:
    """One sentence on a list of scores."""
    errors = [abs(s.total) for s in scores]
    unseen = sum(s.unseen for s in scores)
    inside = sum(s.inside * s.unseen for s in scores) / unseen
    return (
        f"A configuration's time is off by {100 * statistics.fmean(errors):.1f} % on average, "
        f"{100 * max(errors):.1f} % at most; an op that was not measured by "
        f"{100 * statistics.median(s.median for s in scores):.1f} % at the median of models, "
        f"{100 * statistics.fmean(s.weighted for s in scores):.1f} % weighted by time; "
        f"{100 * inside:.0f} % of them lie in their 90 % interval."
    )


def _plan_row(tolerance: float, plan: Seconds, each: float) -> str:
    mine = device_s(plan, plan)
    return (
        f"| a plan by which {100 * tolerance:.0f} % of a configuration's time may stay unknown | "
        f"{len(plan):,} | {mine:.1f} | {100 * (1 - mine / each):.1f} % |"
    )


def report(
    needs: Needs, truth: Seconds, plans: Mapping[float, Seconds], device: Device, versions: Versions
) -> str:
    """The results as Markdown; ``plans`` by tolerance."""
    plan = plans[TOLERANCE]
    configs = {
        name: {op: count for op, count in ops.items() if op in truth}
        for name, ops in needs.configurations.items()
    }
    wanted = {op for ops in configs.values() for op in ops}
    each = sum(device_s(ops, truth) for ops in configs.values())
    union = device_s(wanted, truth)
    planned_scores = [score(name, ops, truth, plan) for name, ops in configs.items()]
    refused = sorted({op.name for ops in needs.configurations.values() for op in ops} - {
        op.name for op in wanted})  # fmt: skip
    lines = [
        "# Measuring time that the latency database saves, and errors of its prices",
        "",
        f"`scripts/bench/latency_db.py` on {device.product}, {device.threads} thread(s), torch "
        f"{versions.torch}: {len(configs)} models of `validation/latency_db_models.yaml`, "
        f"{len(wanted):,} different signatures ({sum(map(len, configs.values())):,} counted by "
        f"configuration), each with {WARMUP} executions before and {REPETITIONS} samples.",
        "",
        "| what is measured | signatures | device seconds | saved |",
        "|---|---|---|---|",
        f"| every configuration's unique signatures | {sum(map(len, configs.values())):,} | "
        f"{each:.1f} | |",
        f"| every signature once | {len(wanted):,} | {union:.1f} | {100 * (1 - union / each):.1f} "
        "% |",
        *(_plan_row(tolerance, some, each) for tolerance, some in plans.items()),
        "",
        f"Published figure of another database for its own models: {100 * PUBLISHED:.1f} %.  What "
        "may stay unknown adds up intervals as if all errors in one kind of work had one sign; the "
        "default was chosen with these models in view.  Every op was measured once, and the plans "
        "are replayed with those samples.",
        *([f"Not runnable alone, and left out: {', '.join(refused)}."] if refused else []),
        "",
        "## Priced from the plan's measurements",
        "",
        summary(planned_scores),
        "",
        *table(planned_scores),
        "",
        "## Leave one model out",
        "",
        "Each model priced from all measurements of the eleven others.",
        "",
    ]
    out = left_out(configs, truth)
    return "\n".join([*lines, summary(out), "", *table(out), ""])


def main() -> int:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    root = Path(__file__).resolve().parents[2]
    parser.add_argument(
        "--models", type=Path, default=root / "validation" / "latency_db_models.yaml"
    )
    parser.add_argument("--db", type=Path, required=True, help="rows are kept there")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sweep", action="store_true", help="as primus-ext db measure has it")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    needs = configurations.needs(configurations.read(options.models), "h100", lambda *_: None)
    wanted = sorted({op for ops in needs.configurations.values() for op in ops},
                    key=lambda op: (op.flops + op.bytes, repr(op)))  # fmt: skip
    with (
        LatencyDatabase(options.db) as database,
        Microbench(options.device, REPETITIONS, WARMUP) as bench,
    ):
        truth = measured(bench, database, wanted)
        configs = {
            name: {op: count for op, count in ops.items() if op in truth}
            for name, ops in needs.configurations.items()
        }
        sweep = frozenset[Op]().union(*needs.sweep.values()) if options.sweep else ()
        plans = {
            tolerance: planned(bench, database, Planner(configs, sweep, tolerance=tolerance))
            for tolerance in TOLERANCES
        }
        prices = Prices.of(database, device=bench.device)
        truth = {row.op: row.median for row in prices.rows if row.op in truth}
        text = report(needs, truth, plans, bench.device, bench.versions)
    if options.out:
        options.out.write_text(text)
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

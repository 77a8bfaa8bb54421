"""``primus-ext fit``: what training reaches of short runs, fitted to measured step times.

It writes ``sustained/GENERATION.yaml`` from nothing but the runs: the rounds start from the prior,
never from the files that are there, so that the same runs give the same files.
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from primus_ext.cluster import Accelerator, Cluster, Figure
from primus_ext.cluster_data import load_accelerator
from primus_ext.cluster_files import accelerator_names, sustained_name
from primus_ext.conf_dir import hydra_conf_dir
from primus_ext.cost.sustained import HOST, KINDS, REFERENCE
from primus_ext.runner import fitting, pricing, runs, validate
from primus_ext.runner.fitting import Parameter, Sample
from primus_ext.runner.outcome import Exit, UsageError, write_asked

ROUNDS = 4
LEVEL = 0.9
"""Of the interval around a step time."""
_REFERENCES = {"ampere": "a100", "hopper": "h100", "blackwell": "b200", "cdna3": "mi300x",
               "cdna4": "mi355x"}  # fmt: skip
"""Product whose board power the factors of a generation hold at."""
_OWN = ("gemm/", "attention")
"""Kinds that each generation has of its own; the others are shared by a vendor's."""
_PRIOR_HOST = {"nvidia": 30e-6, "amd": 50e-6}
"""Seconds a call: a judgement, no published figure was found; the prior is wide (a factor of two)
and the runs decide."""


def parameter(generation: str, vendor: str, kind: str) -> Parameter:
    """Who shares a factor."""
    return (generation if kind.startswith(_OWN) else vendor, kind)


def with_factors(cluster: Cluster, factors: Mapping[str, float]) -> Cluster:
    """A target whose accelerator has these factors, by kind, and no others."""
    accelerator = cluster.accelerator
    kept = {k: v for k, v in accelerator.sustained.items() if k == REFERENCE}
    table = kept | {k: Figure(value=v, source="fit") for k, v in factors.items()}
    return dataclasses.replace(
        cluster, accelerator=dataclasses.replace(accelerator, sustained=table)
    )


def _samples(
    gathered: validate.Gathered, chosen: Mapping[str, dict[str, Any]],
    factors: Mapping[Parameter, float], workers: int,
) -> list[Sample]:  # fmt: skip
    """Every run, priced at ``factors``."""
    found: dict[str, Sample] = {}

    def told(prices: pricing.Prices) -> None:
        for name, one in prices.items():
            if isinstance(one, pricing.Slopes):
                found[name] = _sample(chosen[name], gathered.jobs[name].cluster.accelerator, one)

    served = {
        program: [dataclasses.replace(one, cluster=_at(one.cluster, factors)) for one in wanted]
        for program, wanted in gathered.served.items()
    }
    pricing.run(gathered.programs, served, told, workers, pricing.slopes)
    return [found[name] for name in sorted(found)]


def _at(cluster: Cluster, factors: Mapping[Parameter, float]) -> Cluster:
    accelerator = cluster.accelerator
    generation = sustained_name(accelerator.name)
    return with_factors(cluster, {
        kind: factors[parameter(generation, accelerator.vendor, kind)] for kind in (*KINDS, HOST)
    })  # fmt: skip


def _sample(run: dict[str, Any], accelerator: Accelerator, priced: pricing.Slopes) -> Sample:
    generation = sustained_name(accelerator.name)
    slopes: dict[Parameter, float] = defaultdict(float)
    for kind, slope in priced.slopes.items():
        slopes[parameter(generation, accelerator.vendor, kind)] += slope
    return Sample(
        id=run["id"], source=runs.source(run), group=runs.group(run),
        measured_s=runs.measured_seconds(run), priced_s=priced.seconds, slopes=dict(slopes),
        stratum="experts" if run["model"].get("num_experts") else "dense",
    )  # fmt: skip


def start() -> dict[Parameter, float]:
    """The prior of every factor."""
    found: dict[Parameter, float] = {}
    for name in accelerator_names():
        accelerator = load_accelerator(name)
        if accelerator.vendor not in _PRIOR_HOST:  # no published run is of it
            continue
        generation = sustained_name(name)
        for kind in KINDS:
            found[parameter(generation, accelerator.vendor, kind)] = 1.0
        found[parameter(generation, accelerator.vendor, HOST)] = _PRIOR_HOST[accelerator.vendor]
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class Fit:
    """What was fitted, and how far held-out rows are off."""

    factors: Mapping[Parameter, float]
    samples: Sequence[Sample]
    off: Sequence[float]
    """ln(priced/measured) of every sample, fitted without its group."""
    within: Mapping[str, float]
    """By stratum, the quantile of its size at :data:`LEVEL`."""


def fitted(chosen: Sequence[dict[str, Any]], progress: validate.Progress, workers: int) -> Fit:
    """Fit the factors to runs.

    Args:
        chosen: Runs with different ids; those that can't be projected are left out.
        progress: Told how many rounds are done.
        workers: Processes at a time.

    Raises:
        UsageError: No run can be projected.
    """
    known = {run["id"]: run for run in chosen}
    gathered = validate.gather(chosen, lambda run: False)
    prior = factors = start()
    samples: list[Sample] = []
    for done in range(ROUNDS):
        samples = _samples(gathered, known, factors, workers)
        if not samples:
            raise UsageError("RUNS holds no run that can be projected and scored")
        if done + 1 < ROUNDS:
            factors, _ = fitting.solve(samples, factors, prior)
        progress(done + 1, ROUNDS, f"{len(samples)} runs")
    off = fitting.left_out(samples, factors, prior)
    last, _ = fitting.solve(samples, factors, prior)
    return Fit(last, samples, [float(e) for e in off],
               fitting.quantile_of_errors(samples, off, LEVEL))  # fmt: skip


def table(fit: Fit, generation: str) -> str:
    """The file of one generation, in YAML."""
    product = _REFERENCES[generation]
    accelerator = load_accelerator(product)
    power = accelerator.board_power_w.value
    lines = [
        f"# What training reaches of the rates of short runs, {generation}: factors on seconds.",
        "# Written by primus-ext fit; what is absent has no rows and is 1.",
        f"{REFERENCE}:", f"  value: {power:g}", f"  source: the board power of {product}",
    ]  # fmt: skip
    for kind in (HOST, *KINDS):
        name = parameter(generation, accelerator.vendor, kind)
        value, mine = fit.factors[name], _rows(fit, name)
        if not mine and kind != HOST:
            continue
        lines += [f"{kind}:", f"  value: {value:.3g}", f"  source: {_source(mine)}"]
    for stratum, width in fit.within.items():
        count = sum(s.stratum == stratum for s in fit.samples)
        lines += [
            f"step_error/{stratum}:", f"  value: {width:.3g}",
            f"  source: {LEVEL:.0%} of {count} held-out runs are within, groups weighted by the "
            "root of their rows",
        ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _rows(fit: Fit, name: Parameter) -> list[tuple[Sample, float]]:
    """Samples that a factor matters to by 2 % of the step and more, and how far they are off."""
    return [(s, e) for s, e in zip(fit.samples, fit.off, strict=True)
            if abs(s.slopes.get(name, 0.0)) >= 0.02]  # fmt: skip


def _source(mine: Sequence[tuple[Sample, float]]) -> str:
    if not mine:
        return "no rows; the prior"
    error = statistics.mean(abs(math.expm1(e)) for _, e in mine)
    groups = len({s.group for s, _ in mine})
    return f"{len(mine)} runs of {groups} groups, held out {error:.1%} off on average"


def command(runs_path: Path, out: Path, report: Path | None) -> int:
    """``primus-ext fit``: fit, write the tables, print the errors of held-out runs.

    Args:
        runs_path: The runs file.
        out: Folder for ``GENERATION.yaml``.
        report: File for the errors in Markdown; None for none.

    Raises:
        UsageError: A file is wrong, or there is nothing to fit to.
    """
    from rich.console import Console

    from primus_ext.report import fit_errors
    from primus_ext.report.progress import ProgressBar

    every = runs.load(runs_path)
    newer = runs.superseded(every)
    chosen = [run for run in every if usable(run) and run["id"] not in newer]
    _folder(out)  # before the work, not after it
    with ProgressBar() as bar:
        fit = fitted(chosen, bar.update, os.cpu_count() or 1)
    text = fit_errors.markdown([(s.source, s.group, s.id, e)
                                for s, e in zip(fit.samples, fit.off, strict=True)])  # fmt: skip
    for name in _REFERENCES:
        write_asked("--out", out / f"{name}.yaml", table(fit, name))
    if report is not None:
        write_asked("--report", report, text)
    fit_errors.render(text, Console())
    return Exit.DONE


def usable(run: dict[str, Any]) -> bool:
    """Whether a run is fitted to: complete, of pretraining, not of low confidence."""
    return (
        run.get("completeness") == "complete"
        and run.get("workload") == "pretrain"
        and run.get("confidence") != "low"
        and runs.defect(run) is None
    )


def _folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out={out} can't be made: {error.strerror}") from error


def default_out() -> Path:
    """Where the tables of this installation are."""
    return hydra_conf_dir() / "sustained"

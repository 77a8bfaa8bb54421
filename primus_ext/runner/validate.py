"""Project published, measured runs and compare; nothing is fitted to them."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from primus_ext.frameworks import published
from primus_ext.project.result import Projection
from primus_ext.runner import child, emulation, peaks, tracing
from primus_ext.runner.outcome import UsageError

GPT_PROGRAM = "primus_ext.frameworks.megatron.gpt_program"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run, measured and projected; times in seconds, memory in bytes."""

    id: str
    group: str
    measured_s: float
    predicted_s: float | None = None
    interval: dict[str, float] | None = None
    peak_measured: float | None = None
    """The first of ``memory``, where a peak was published."""
    peak_predicted: int | None = None
    memory_kind: str | None = None
    """Unit of the two, see :mod:`primus_ext.runner.peaks`."""
    memory: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    """By unit, ``measured`` and ``predicted`` bytes of every peak that was published."""
    verdict: str | None = None
    approximations: tuple[str, ...] = ()
    skipped: str | None = None
    """Why there is no prediction."""

    @property
    def ratio(self) -> float | None:
        """Projected over measured step time."""
        return None if self.predicted_s is None else self.predicted_s / self.measured_s


def load_runs(path: Path, wanted: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Runs of a runs file, all or those named.

    Raises:
        UsageError: the file can't be read, or an id is not in it.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        runs = yaml.load(path.read_text(), Loader=loader)
    except OSError as error:
        raise UsageError(f"RUNS={path} can't be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"RUNS={path} is not YAML: {error}") from error
    if not isinstance(runs, list) or not all(isinstance(r, dict) and "id" in r for r in runs):
        raise UsageError(f"RUNS={path} must be a list of runs, each with an id")
    known = {run["id"]: run for run in runs}
    missing = [name for name in wanted if name not in known]
    if missing:
        raise UsageError(f"run {missing[0]} is not in {path}")
    return [known[name] for name in wanted] if wanted else runs


def subset(runs_path: Path, name: str) -> list[str]:
    """Ids of a named subset, from the subsets file beside a runs file.

    Raises:
        UsageError: there is no such file or subset.
    """
    path = runs_path.with_name(runs_path.name.replace("_runs", "_subsets"))
    if path == runs_path or not path.exists():
        raise UsageError(f"--subset={name} needs a subsets file beside {runs_path}: {path} is none")
    subsets = yaml.safe_load(path.read_text())
    if name not in subsets:
        raise UsageError(f"--subset={name} is unknown; legal: {', '.join(sorted(subsets))}")
    return list(subsets[name])


class Skipped(Exception):
    """A run that can't be projected; the message says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Projected:
    """A run and its projection."""

    nearest: published.PublishedProgram
    projection: Projection
    peaks: dict[str, int]
    """Projected peak bytes by unit, see :mod:`primus_ext.runner.peaks`."""


def nearest_program(run: dict[str, Any]) -> published.PublishedProgram:
    """The Megatron program that stands for a run.

    Raises:
        Skipped: there is none.
    """
    try:
        return published.program(run)
    except published.NotProjectable as error:
        raise Skipped(str(error)) from error


def projected(run: dict[str, Any], progress: Callable[[int, int, str], None]) -> Projected:
    """Project one run in simulate mode.

    Raises:
        Skipped: it has no program or no target, or the framework refuses it.
    """
    nearest = nearest_program(run)
    try:
        cluster = emulation.load_cluster(
            nearest.accelerator, nearest.nodes, nearest.gpus_per_node
        )
        with tempfile.TemporaryDirectory(prefix="primus_ext_") as name:
            folder = Path(name)
            question = {
                "module": GPT_PROGRAM,
                "args": list(nearest.argv),
                "cwd": name,
                **emulation.question(cluster),
            }
            question["frameworks"] += nearest.emulations
            answer = tracing.answer(question, (), folder, folder / "child.log", progress)
        projection = emulation.priced(answer, "simulate", cluster, [])
    except (child.ChildError, ValueError) as error:
        raise Skipped(str(error)) from error
    return Projected(nearest, projection, peaks.projected(projection.memory))


def project_run(run: dict[str, Any], progress: Callable[[int, int, str], None]) -> Row:
    """Project one run in simulate mode and set it beside what was measured."""
    hardware = run["hardware"]
    base = Row(
        id=run["id"],
        group=f"{run['source']['name'].split(' (')[0]}, {hardware['gpu']}",
        measured_s=run["normalized"]["iteration_time_s"],
    )
    try:
        found = projected(run, progress)
    except Skipped as reason:
        return dataclasses.replace(base, skipped=str(reason))
    memory = peaks.beside(run, found.peaks)
    kind = next(iter(memory), None)
    return dataclasses.replace(
        base,
        predicted_s=found.projection.throughput.step_s,
        interval=dict(found.projection.throughput.interval),
        peak_measured=None if kind is None else memory[kind]["measured"],
        peak_predicted=found.peaks[kind or peaks.ALLOCATED],
        memory_kind=kind,
        memory=memory,
        verdict=found.projection.memory.verdict,
        approximations=found.nearest.approximations,
    )


def summary(rows: Iterable[Row]) -> dict[str, Any]:
    """Errors of the projected rows: MAPE and bias in percent, worst factor, rank correlation.

    ``spearman`` is null for fewer than three rows.
    """
    scored = [row for row in rows if row.ratio is not None]
    if not scored:
        return {"rows": 0}
    ratios = np.array([row.ratio for row in scored])
    measured = np.array([row.measured_s for row in scored])
    predicted = ratios * measured
    return {
        "rows": len(scored),
        "mape": float(np.mean(np.abs(ratios - 1)) * 100),
        "bias": float(np.mean(ratios - 1) * 100),
        "worst_factor": float(np.max(np.maximum(ratios, 1 / ratios))),
        "spearman": _spearman(predicted, measured) if len(scored) > 2 else None,
        "memory": peaks.errors(row.memory for row in scored),
        "inside_interval": float(
            np.mean(
                [
                    row.interval["low"] <= row.measured_s <= row.interval["high"]
                    for row in scored
                    if row.interval
                ]
            )
        ),
    }


def _spearman(a: np.ndarray, b: np.ndarray) -> float:
    first, second = (np.argsort(np.argsort(values)) for values in (a, b))
    return float(np.corrcoef(first, second)[0, 1])


def to_json(rows: list[Row]) -> str:
    """The result as DESIGN's contract has it: rows, groups, summary."""
    groups = {row.group for row in rows}
    return json.dumps(
        {
            "rows": [{**dataclasses.asdict(row), "ratio": row.ratio} for row in rows],
            "groups": {g: summary(r for r in rows if r.group == g) for g in sorted(groups)},
            "summary": summary(rows),
        },
        indent=1,
    )


def command(runs_path: Path, subset_name: str | None, ids: list[str], out: Path | None) -> int:
    """``primus-ext validate``: project, print, write.

    Args:
        runs_path: The runs file.
        subset_name: Subset of it, from the subsets file beside it.
        ids: Run ids; all runs (of the subset) where empty.
        out: File for the JSON result.

    Returns:
        0; skipped rows are reported, not an error.

    Raises:
        UsageError: a file or a name is wrong.
    """
    from rich.console import Console

    from primus_ext.report import validation
    from primus_ext.report.progress import ProgressBar

    wanted = ids or (subset(runs_path, subset_name) if subset_name else [])
    runs = load_runs(runs_path, wanted)
    rows = []
    with ProgressBar() as bar:
        for number, run in enumerate(runs):

            def tell(done: int, total: int, text: str, number: int = number) -> None:
                share = (number + done / max(total, 1)) / len(runs)
                bar.update(round(share * 1000), 1000, f"{runs[number]['id']}: {text}")

            rows.append(project_run(run, tell))
    text = to_json(rows)
    if out is not None:
        partial = out.with_name(out.name + ".part")
        try:
            partial.write_text(text)
            partial.replace(out)
        except OSError as error:
            raise UsageError(f"--json={out} can't be written: {error.strerror}") from error
    validation.render(json.loads(text), Console())
    return 0

"""Project published, measured runs and compare; nothing is fitted to them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from primus_ext.frameworks import published
from primus_ext.project.result import Memory, Term, Throughput
from primus_ext.runner import emulation, peaks, pricing, runs, scores, sharing
from primus_ext.runner.outcome import Exit, write_asked

GPT_PROGRAM = "primus_ext.frameworks.megatron.gpt_program"
NEWEST = "newest"
PUBLISHED = "published"

Progress = Callable[[int, int, str], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run, measured and projected; times in seconds, memory in bytes."""

    id: str
    source: str = ""
    group: str = ""
    """Source, model and GPU."""
    cell: str = ""
    """Rows that are alternatives for the same work: see :func:`primus_ext.runner.runs.cell`."""
    confidence: str = ""
    measured_s: float | None = None
    predicted_s: float | None = None
    interval: dict[str, float] | None = None
    breakdown: dict[str, float] = dataclasses.field(default_factory=dict)
    """Exposed seconds by term."""
    peak_measured: float | None = None
    """The first of ``memory``, where a peak was published."""
    peak_predicted: int | None = None
    memory_kind: str | None = None
    """Unit of the two, see :mod:`primus_ext.runner.peaks`."""
    memory: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    """By unit, ``measured`` and ``predicted`` bytes of every peak that was published."""
    verdict: str | None = None
    approximations: tuple[str, ...] = ()
    superseded_by: str | None = None
    """A newer row of the same configuration, which is scored in place of this one."""
    skipped: str | None = None
    """Why there is no prediction."""

    @property
    def ratio(self) -> float | None:
        """Projected over measured step time."""
        if self.predicted_s is None or self.measured_s is None:
            return None
        return self.predicted_s / self.measured_s

    @property
    def is_scored(self) -> bool:
        """Whether it counts in the summaries."""
        return self.ratio is not None and self.superseded_by is None and self.confidence != "low"


class Skipped(Exception):
    """A run that can't be projected; the message says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Projected:
    """A run and its projection."""

    nearest: published.PublishedProgram
    throughput: Throughput
    breakdown: tuple[Term, ...]
    memory: Memory | None
    """None where it was not asked for."""
    peaks: dict[str, int]
    """Projected peak bytes by unit, see :mod:`primus_ext.runner.peaks`; empty without memory."""


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """The nearest program of a run on its target."""

    nearest: published.PublishedProgram
    cluster: Any
    request: dict[str, Any]


def nearest_program(run: dict[str, Any]) -> published.PublishedProgram:
    """The Megatron program that stands for a run.

    Raises:
        Skipped: there is none.
    """
    try:
        return published.program(run)
    except published.NotProjectable as error:
        raise Skipped(str(error)) from error
    except (KeyError, TypeError, AttributeError) as error:
        raise Skipped(f"its description is not complete: {error!r}") from error


def _job(run: dict[str, Any]) -> Job:
    defect = runs.defect(run)
    if defect is not None:
        raise Skipped(defect)
    nearest = nearest_program(run)
    impossible = runs.impossible(run)
    if impossible is not None:
        raise Skipped(impossible)
    try:
        cluster = emulation.load_cluster(
            nearest.accelerator, nearest.nodes, nearest.gpus_per_node, nearest.network
        )
    except ValueError as error:
        raise Skipped(str(error)) from error
    request = {
        "module": GPT_PROGRAM,
        "args": list(nearest.argv),
        "origins": False,  # of no use here, half of the time
        **emulation.question(cluster),
    }
    request["frameworks"] += nearest.emulations
    return Job(nearest, cluster, request)


@dataclasses.dataclass(frozen=True, slots=True)
class Gathered:
    """Runs, the programs that stand for them, and what is wanted of each program."""

    jobs: dict[str, Job] = dataclasses.field(default_factory=dict)
    programs: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """Requests by name; several runs may share one."""
    served: dict[str, list[pricing.Wanted]] = dataclasses.field(default_factory=dict)
    """By the name of a program."""
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)
    """Runs that no program stands for, and why."""


def gather(
    wanted: Sequence[dict[str, Any]], memory: Callable[[dict[str, Any]], bool]
) -> Gathered:
    """The programs to trace for runs.

    Args:
        wanted: Runs with different ids.
        memory: Of which runs the memory is projected too.
    """
    found = Gathered()
    for run in wanted:
        try:
            found.jobs[run["id"]] = job = _job(run)
        except Skipped as reason:
            found.skipped[run["id"]] = str(reason)
            continue
        one = sharing.shared(job.request)
        name = hashlib.sha256(json.dumps(one.request, sort_keys=True).encode()).hexdigest()
        found.programs.setdefault(name, {**one.request, "memory": False})
        if memory(run):
            found.programs[name]["memory"] = True
        found.served.setdefault(name, []).append(
            pricing.Wanted(run["id"], job.cluster, job.nearest.conditions, one.sizes, memory(run))
        )
    return found


def project_runs(
    wanted: Sequence[dict[str, Any]], progress: Progress, workers: int | None = None,
    memory: Callable[[dict[str, Any]], bool] = lambda run: True,
) -> dict[str, Projected | str]:  # fmt: skip
    """Project runs in simulate mode.

    Args:
        wanted: Runs with different ids.
        progress: Told how many are done.
        workers: Processes at a time; by default the cores of this machine.
        memory: Of which runs the memory is projected too.

    Returns:
        By id, the projection, or why there is none.
    """
    gathered = gather(wanted, memory)
    found: dict[str, Projected | str] = dict(gathered.skipped)

    def priced(prices: pricing.Prices) -> None:
        for name, one in prices.items():
            timed = isinstance(one, pricing.Timed)
            found[name] = _projected(gathered.jobs[name], one) if timed else str(one)
            progress(len(found), len(wanted), name)

    pricing.run(gathered.programs, gathered.served, priced, workers)
    return found


def _projected(job: Job, found: pricing.Timed) -> Projected:
    held = {} if found.memory is None else peaks.projected(found.memory)
    return Projected(job.nearest, found.throughput, found.breakdown, found.memory, held)


def project_run(run: dict[str, Any], progress: Progress) -> Row:
    """Project one run in simulate mode and set it beside what was measured."""
    return row(run, project_runs([run], progress, 1)[run["id"]])


def row(run: dict[str, Any], found: Projected | str, newer: str | None = None) -> Row:
    """A run beside its projection.

    Args:
        run: As in the runs file.
        found: Its projection, or why there is none.
        newer: Id of a newer run of the same configuration.
    """
    defect = runs.defect(run)
    if defect is not None:
        return Row(id=run["id"], skipped=defect)
    base = Row(
        id=run["id"],
        source=runs.source(run),
        group=runs.group(run),
        cell=runs.cell(run),
        confidence=str(run.get("confidence") or ""),
        measured_s=runs.measured_seconds(run),
        superseded_by=newer,
    )
    if isinstance(found, str):
        return dataclasses.replace(base, skipped=found)
    memory = peaks.beside(run, found.peaks) if found.peaks else {}
    kind = next(iter(memory), None)
    throughput = found.throughput
    return dataclasses.replace(
        base,
        predicted_s=throughput.step_s,
        interval=dict(throughput.interval),
        breakdown={t.term: t.exposed_seconds for t in found.breakdown},
        peak_measured=None if kind is None else memory[kind]["measured"],
        peak_predicted=found.peaks.get(kind or peaks.ALLOCATED),
        memory_kind=kind,
        memory=memory,
        verdict=None if found.memory is None else found.memory.verdict,
        approximations=found.nearest.approximations,
    )


def summary(rows: Iterable[Row]) -> dict[str, Any]:
    """Figures of the scored rows (:func:`primus_ext.runner.scores.summary`), and of their peaks."""
    scored = [row for row in rows if row.is_scored]
    if not scored:
        return {"rows": 0}
    found = scores.summary(
        [
            scores.Scored(
                measured_s=row.measured_s,
                predicted_s=row.predicted_s,
                cell=row.cell,
                low=None if row.interval is None else row.interval["low"],
                high=None if row.interval is None else row.interval["high"],
            )
            for row in scored
            if row.measured_s is not None and row.predicted_s is not None
        ]
    )
    return {**found, "memory": peaks.errors(row.memory for row in scored)}


def to_json(rows: list[Row]) -> str:
    """The result as DESIGN's contract has it: rows, groups, summary; also sources."""

    def by(key: str) -> dict[str, Any]:
        names = sorted({getattr(row, key) for row in rows} - {""})
        return {n: summary(row for row in rows if getattr(row, key) == n) for n in names}

    return json.dumps(
        {
            "rows": [{**dataclasses.asdict(row), "ratio": row.ratio} for row in rows],
            "groups": by("group"),
            "sources": by("source"),
            "summary": summary(rows),
        },
        indent=1,
    )


def command(
    runs_path: Path, subset_name: str | None, ids: list[str], out: Path | None, which: str = NEWEST,
    memory: str = PUBLISHED,
) -> int:  # fmt: skip
    """``primus-ext validate``: project, print, write.

    Args:
        runs_path: The runs file.
        subset_name: Subset of it, from the subsets file beside it.
        ids: Run ids; all runs (of the subset) where empty.
        out: File for the JSON result.
        which: ``newest`` to score only the newest row of each configuration, ``all``.
        memory: Of which runs the memory is projected: ``published``, those with a measured peak,
            or ``all``.

    Returns:
        0; 2 if no row could be projected.  Skipped rows are reported, not an error.

    Raises:
        UsageError: a file or a name is wrong.
    """
    from rich.console import Console

    from primus_ext.report import validation
    from primus_ext.report.progress import ProgressBar

    wanted = ids or (runs.subset(runs_path, subset_name) if subset_name else [])
    chosen = runs.load(runs_path, wanted)
    newer = runs.superseded(chosen) if which == NEWEST else {}
    with ProgressBar() as bar:
        found = project_runs(
            chosen, bar.update,
            memory=lambda run: memory != PUBLISHED or bool(peaks.published(run)),
        )  # fmt: skip
    rows = [row(run, found[run["id"]], newer.get(run["id"])) for run in chosen]
    text = to_json(rows)
    if out is not None:
        write_asked("--json", out, text)
    validation.render(json.loads(text), Console())
    return Exit.DONE if any(row.ratio is not None for row in rows) else Exit.USAGE

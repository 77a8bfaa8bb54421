"""``run(request)``: everything between the composed configuration and the exit code."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primus_ext.runner import child, folder, local_device, measured, target, tracing
from primus_ext.runner.command import Command
from primus_ext.runner.outcome import Exit, Outcome, UsageError, close, say
from primus_ext.runner.uneven import Uneven

if TYPE_CHECKING:
    from primus_ext.cluster import Cluster
    from primus_ext.cost.measured_collectives import MeasuredCollectives
    from primus_ext.project.observed import Measured
    from primus_ext.project.rescheduled import StepTimeline
    from primus_ext.project.result import Projection

MODES = ("on", "simulate", "measure", "both", "tune", "check")
OFFERED = ("on", "simulate", "measure", "both")
CACHE = ("on", "off")
FAIL_ON = {"oom": ("oom",), "at_risk": ("at_risk", "oom")}
"""Value of ``+projection.fail_on`` to the verdicts that it gates."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One projection that was asked for."""

    mode: str
    """One of :data:`MODES`."""
    command: Command
    """The user's command without our overrides, its outputs pinned to ``scratch``."""
    cwd: str
    """Where the user started it."""
    out: Path
    """Folder for ``projection.json``, ``verdict.json`` and ``child.log``."""
    scratch: Path
    """Existing folder for the child's messages and its own run folder; removed at the end."""
    target_cluster: Mapping[str, Any] | None
    """Content of the ``target_cluster`` file, None where none was named."""
    fail_on: str | None = None
    routing: str | None = None
    """Absolute path of recorded token counts of experts, None for balanced ones."""
    expert_skew: str | None = None
    """Tokens of each layer's busiest expert-parallel rank over the mean, as typed; None: 1."""
    rank_cv: str | None = None
    """Standard deviation of one rank's step time over its mean, as typed; None: nothing is said of
    stragglers."""
    schedule: str | None = None
    """Pipeline schedule to price the step with, or ``all`` to compare them; None: the program's."""
    shrink: int | None = None
    """Processes of the smaller world to measure in the place of the job's; None: single ranks of
    the job, the others virtual."""
    measured: str | None = None
    """Absolute path of measurements of an earlier run, to be used again; None: none are."""
    collectives: str | None = None
    """Absolute path of measured collectives (:mod:`primus_ext.collective_samples`), None for the
    model's."""
    cache: str = "on"
    """Whether traces are kept and used again: one of :data:`CACHE`."""
    removed: tuple[str, ...] = ()
    """Our overrides, as they were typed."""
    name: str = ""
    """What the user's program calls its model, as far as its configuration tells."""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """``os.environ`` of the user's process."""


def run(request: Request) -> int:
    """Project one job and write what was found.

    Returns:
        The exit code (:class:`~primus_ext.runner.outcome.Exit`); every way out but that of an
        output folder which can't be used leaves ``verdict.json`` in it.
    """
    directory: Path | None = None
    try:
        folder.prepare(request.out)
        directory = request.out
        outcome = _project(request)
    except UsageError as error:
        outcome = Outcome(exit_code=Exit.USAGE, message=str(error))
    except child.ChildError as error:
        outcome = Outcome(exit_code=error.exit_code, message=str(error))
        for line in error.tail:
            say(f"| {line}")
    except KeyboardInterrupt:
        outcome = Outcome(exit_code=Exit.INTERRUPTED, message="interrupted; nothing was projected")
    except Exception as error:
        traceback.print_exc()
        outcome = Outcome(
            exit_code=Exit.INTERNAL,
            message=f"primus_ext itself failed, nothing was projected or trained: {error!r}",
        )
    finally:
        shutil.rmtree(request.scratch, ignore_errors=True)
    return close(outcome, directory)


def _project(request: Request) -> Outcome:
    mode, notes = _mode(request)
    if request.fail_on is not None and request.fail_on not in FAIL_ON:
        raise UsageError(
            f"+projection.fail_on={request.fail_on} is unknown; legal: {', '.join(FAIL_ON)}"
        )
    if request.cache not in CACHE:
        raise UsageError(
            f"+projection.cache={request.cache} is unknown; legal: {', '.join(CACHE)}"
        )
    _check_schedule(request.schedule)
    uneven = Uneven.of(request.expert_skew, request.rank_cv, request.routing, mode)
    cluster = _cluster(request)
    collectives = _collectives(request, cluster)
    basis = _basis(request, mode, cluster)
    projection, drawing = _composed(request, mode, cluster, notes, collectives, basis, uneven)
    projection = uneven.with_stragglers(projection)
    path = _write(projection, drawing, request.out)
    _show(projection)
    return _judged(projection.memory.verdict, request.fail_on, path)


def _check_schedule(name: str | None) -> None:
    """Refuse an unknown schedule before the program is run."""
    from primus_ext.project.comparison import ALL
    from primus_ext.project.schedules import named

    try:
        if name is not None and name != ALL:
            named(name)
    except ValueError as error:
        raise UsageError(f"+projection.{error}") from error


def _mode(request: Request) -> tuple[str, list[str]]:
    """The mode that runs, and what the report must say about the choice."""
    if request.mode not in MODES:
        raise UsageError(f"+projection={request.mode} is unknown; legal: {', '.join(MODES)}")
    if request.mode not in OFFERED:
        raise UsageError(
            f"+projection={request.mode} is not part of this version, which offers "
            f"{', '.join(OFFERED)}"
        )
    if request.mode != "on":
        return request.mode, []
    device = local_device.find(request.environment)
    if device is None:
        return "simulate", ["+projection=on: no accelerator here, so the job was simulated"]
    if device.accelerator is None:
        return "simulate", [
            f"+projection=on: simulated although {device.product} is here, of which primus_ext has "
            "no figures"
        ]
    return "measure", [f"+projection=on: measured on the {device.product} that is here"]


def _cluster(request: Request) -> Cluster:
    from primus_ext.cluster_data import load_cluster

    if request.target_cluster is None:
        asked = target.from_surroundings(request.environment)
    else:
        asked = target.from_config(request.target_cluster)
    try:
        return load_cluster(
            asked.accelerator, asked.nodes, asked.gpus_per_node, asked.network
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


def _collectives(request: Request, cluster: Cluster) -> MeasuredCollectives | None:
    """Measured collectives that were named, refused before the program is run."""
    from primus_ext.collective_samples import SamplesError
    from primus_ext.cost.measured_collectives import MeasuredCollectives
    from primus_ext.cost.priced import CostError

    if request.collectives is None:
        return None
    try:
        found = MeasuredCollectives.of_files([Path(request.collectives)])
        found.require(cluster)
    except (SamplesError, CostError) as error:
        raise UsageError(f"+projection.collectives={request.collectives}: {error}") from error
    return found


def _composed(
    request: Request, mode: str, cluster: Cluster, notes: list[str],
    collectives: MeasuredCollectives | None, basis: Measured | str | None,
    uneven: Uneven,
) -> tuple[Projection, StepTimeline]:
    from primus_ext.report.progress import ProgressBar
    from primus_ext.runner import emulation

    with ProgressBar() as bar:
        question = _question(request, cluster, uneven)
        answer = tracing.answer(
            question,
            request.command.options,
            request.scratch,
            request.out / "child.log",
            bar.update,
            cached=request.cache == "on",
        )
        bar.update(1, 1, "composing")
        try:
            simulated, drawing = emulation.priced_and_drawn(
                answer, "simulate" if basis else mode, cluster, notes, request.schedule, None,
                collectives,
            )  # fmt: skip
            if basis is None:
                return simulated, drawing
            found, problems = _measured(
                request, basis, cluster, question, answer, simulated, bar.update
            )
            if found is None:
                return dataclasses.replace(
                    simulated, warnings=(*problems, *simulated.warnings)
                ), drawing
            projection, drawing = emulation.priced_and_drawn(
                answer, mode, cluster, [*notes, *measured.notes(found)], request.schedule, found,
                collectives,
            )  # fmt: skip
            if mode == "both":
                projection = dataclasses.replace(projection, simulated=simulated.breakdown)
            return projection, drawing
        except ValueError as error:  # the target can't run this plan
            raise UsageError(str(error)) from error


def _basis(request: Request, mode: str, cluster: Cluster) -> Measured | str | None:
    """What the step's own work stands on: measurements, a device to make them on, or the model.

    Raises:
        UsageError: They were asked for and can't be had; nothing was run by then.
    """
    measures = mode in ("measure", "both")
    for key, value in (("measured", request.measured), ("shrink", request.shrink)):
        if value is not None and not measures:
            raise UsageError(
                f"+projection.{key}={value} is not legal with +projection={mode}; legal: "
                "measure, both"
            )
    if not measures:
        return None
    if request.measured is None:
        return measured.device_for(cluster, request.environment)
    if request.shrink is not None:
        raise UsageError(
            f"+projection.shrink={request.shrink} is not legal with +projection.measured: an "
            "earlier measurement is of the world it was made in"
        )
    return measured.read(request.measured, cluster)


def _measured(
    request: Request, basis: Measured | str, cluster: Cluster, question: dict[str, Any],
    answer: Mapping[str, Any], simulated: Projection, progress: child.Progress,
) -> tuple[Measured | None, list[str]]:  # fmt: skip
    """What was measured of the job, now or in an earlier run; None and why where it can't be."""
    if not isinstance(basis, str):
        return basis, []
    if request.shrink is None:
        problem = measured.too_large(simulated.memory, basis, cluster)
        if problem:
            return None, [problem]
        found, problems = measured.make(
            question, request, answer["traces"], progress, cluster, basis
        )
    else:
        found, problems = measured.shrunk(
            question, request, answer["plan"], progress, cluster, basis
        )
    if found is not None:
        measured.write(found, request.out)
    return found, problems


def _table(path: str) -> Any:
    """Recorded token counts; their content, not their place, is part of what is asked."""
    try:
        return json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise UsageError(
            f"+projection.routing={path} can't be read: {error}; name a JSON file of token counts"
        ) from error


def _question(request: Request, cluster: Cluster, uneven: Uneven) -> dict[str, Any]:
    """What the bootstrap is asked; see :mod:`primus_ext.emulate.bootstrap`."""
    from primus_ext.runner import emulation

    return {
        "script": request.command.script,
        "module": request.command.module,
        "args": list(request.command.arguments),
        "cwd": request.cwd,
        "overrides_removed": list(request.removed),
        "name": request.name,
        **({} if request.routing is None else {"routing": _table(request.routing)}),
        **({} if uneven.skew is None else {"expert_skew": uneven.skew}),
        **emulation.question(cluster),
    }


def _write(projection: Projection, drawing: StepTimeline, directory: Path) -> Path:
    from primus_ext.report import files, memory_page, step_timeline

    try:
        files.write(projection, directory)
        memory_page.write(projection, directory)
        step_timeline.write(drawing, directory)
    except OSError as error:
        raise UsageError(
            f"+projection.out={directory} could not be written: {error.strerror or error}; name a "
            "folder with room"
        ) from error
    return directory / "projection.json"


def _show(projection: Projection) -> None:
    from rich.console import Console

    from primus_ext.report import terminal

    # A reader that has seen enough (`| head`) is no error; rich turns it into a SystemExit.
    with contextlib.suppress(BrokenPipeError, SystemExit):
        terminal.render(projection, Console())


def _judged(verdict: str, fail_on: str | None, path: Path) -> Outcome:
    gated = fail_on is not None and verdict in FAIL_ON[fail_on]
    return Outcome(
        exit_code=Exit.FAIL_ON if gated else Exit.DONE,
        message=f"the verdict is {verdict}" + (f": +projection.fail_on={fail_on}" if gated else ""),
        verdict=verdict,
        projection=str(path),
    )

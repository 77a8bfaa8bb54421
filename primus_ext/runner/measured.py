"""Measurements of the ranks of a job: made here, or read from an earlier run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primus_ext import trace_io, whole_file
from primus_ext.cluster import Cluster
from primus_ext.measurement import NOISY, RankMeasurement, merged
from primus_ext.project.observed import Measured
from primus_ext.project.result import Memory
from primus_ext.runner import child, emulation, local_device, shrink, tracing
from primus_ext.runner.outcome import UsageError
from primus_ext.this_machine import NAME as HOST
from primus_ext.trace import to_plain

if TYPE_CHECKING:
    from primus_ext.runner.job import Request

FILE = "measurement.json"
LOG = "measure.log"
VERSION = 1


def device_for(target: Cluster, environment: Mapping[str, str]) -> str:
    """Accelerator to measure on for a target.

    Args:
        target: Where the job will run.
        environment: ``os.environ``.

    Raises:
        UsageError: There is none.
    """
    if target.accelerator.name == HOST:
        return HOST
    device = local_device.find(environment)
    if device is None:
        raise UsageError(
            f"+projection=measure needs an accelerator, and none is here; legal without one: "
            f"+projection=simulate, or a target of this machine's processors such as "
            f"+target_cluster={HOST}_1x2"
        )
    if device.accelerator is None:
        raise UsageError(
            f"+projection=measure: the local device {device.product!r} is none that primus_ext has "
            "figures for; legal: +projection=simulate"
        )
    return device.accelerator


def make(
    question: dict[str, Any], request: Request, traces: Sequence[Mapping[str, Any]],
    progress: child.Progress, target: Cluster, accelerator: str,
) -> tuple[Measured | None, list[str]]:  # fmt: skip
    """Measure one rank of every kind on the device at hand.

    A device that runs out of memory gives nothing, and a sentence that says so.

    Ranks of a machine's processors are measured together, in forks of one process; those of a GPU
    one after the other, each in a process of its own (a fork can't use a device that its parent
    has looked at).

    Args:
        question: What the bootstrap is asked about the job.
        request: What was asked for; its folders get what the program prints and leaves.
        traces: Of the job, plain: one of each kind of rank.
        progress: Told how far it is.
        target: Where the job will run.
        accelerator: The device at hand (:func:`device_for`).

    Raises:
        ChildError: the child answered with an error, or not at all.
    """
    here = _elsewhere(accelerator, target)
    if here is not None:
        question = {**question, "device": emulation.question(here)["device"]}
    members: list[list[int]] = [[int(trace["rank"])] for trace in traces]
    if accelerator == HOST:
        members = [[rank for one in members for rank in one]]
    found: list[RankMeasurement] = []
    for number, ranks in enumerate(members):
        progress(number, len(members), "measuring")
        answer = child.run(
            {**question, "measure": {}, "ranks": ranks}, request.command.options, request.scratch,
            request.out / LOG, lambda *_: None,
        )  # fmt: skip
        if not answer["traces"]:
            return None, list(answer["warnings"])
        found += _ranks(answer["traces"])
    ranks_found = merged(_whole(found, traces))
    return Measured(ranks=ranks_found, accelerator=accelerator, device=here), []


def too_large(memory: Memory, accelerator: str, target: Cluster) -> str | None:
    """Why a job's ranks can't be measured on the device at hand; None if they can.

    Args:
        memory: Of the job, projected.
        accelerator: The device at hand.
        target: Where the job will run.
    """
    here = _elsewhere(accelerator, target)
    capacity = memory.capacity_bytes if here is None else int(here.accelerator.hbm_bytes.value)
    role = max(memory.per_role, key=lambda role: role.least_bytes)
    if role.least_bytes <= capacity:
        return None
    return (
        f"nothing was measured: {role.role} needs {role.least_bytes:,} bytes and the {accelerator} "
        f"here has {capacity:,}; the times are simulated (+projection.shrink=1 measures a smaller "
        "world)"
    )


def shrunk(
    question: dict[str, Any], request: Request, plan: Mapping[str, Any],
    progress: child.Progress, target: Cluster, accelerator: str,
) -> tuple[Measured | None, list[str]]:  # fmt: skip
    """Measure a smaller world in the place of the job's, as :func:`make`.

    Args:
        question: As for :func:`make`.
        request: As there.
        plan: Of the job, plain.
        progress: As there.
        target: As there.
        accelerator: As there.

    Raises:
        UsageError: There is no such world.
        ChildError: As :func:`make`.
    """
    try:
        smaller = shrink.changes(trace_io.plan_from_plain(plan), request.shrink or 1)
    except shrink.ShrinkError as error:
        raise UsageError(f"+projection.{error}") from error
    if smaller["world_size"] > 1 and accelerator != HOST:
        raise UsageError(
            f"+projection.shrink={request.shrink} is not legal on {accelerator}: this version "
            "measures smaller worlds of several processes on a machine's processors only; legal: 1"
        )
    asked = {**question, "shrunk": smaller}
    traced = tracing.answer(
        asked, request.command.options, request.scratch, request.out / "shrunk.log", progress,
        cached=request.cache == "on",
    )  # fmt: skip
    found, problems = make(asked, request, traced["traces"], progress, target, accelerator)
    if found is None:
        return None, problems
    traces = tuple(trace_io.traces_from_plain(traced["traces"]))
    return dataclasses.replace(found, small=traces), []


def _whole(
    found: Sequence[RankMeasurement], traces: Sequence[Mapping[str, Any]]
) -> list[RankMeasurement]:
    """Measurements with all pipeline ranks that do the same."""
    alike = {int(trace["rank"]): tuple(trace["pp_ranks"]) for trace in traces}
    return [dataclasses.replace(one, pp_ranks=alike[one.rank]) for one in found]


def _ranks(values: Any) -> list[RankMeasurement]:
    return [trace_io.from_plain(RankMeasurement, value) for value in values]


def notes(measured: Measured) -> list[str]:
    """What a report must say of measurements."""
    return [
        f"rank {one.rank} was measured with a spread of {one.spread:.0%} (distance of the "
        "quartiles over the median): the device throttles, or is shared"
        for one in measured.ranks
        if one.spread > NOISY
    ]


def write(measured: Measured, directory: Path) -> Path:
    """Keep measurements for other projections; whole or not at all.

    Raises:
        OSError: The directory can't be written to.
    """
    content = {
        "schema_version": VERSION,
        "accelerator": measured.accelerator,
        "ranks": to_plain(measured.ranks),
        "small": to_plain(measured.small),
    }
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    return whole_file.write(directory / FILE, text)


def read(path: str, target: Cluster) -> Measured:
    """Measurements that an earlier run kept.

    Args:
        path: The file, or the folder that has one.
        target: Where the job will run.

    Raises:
        UsageError: There is no such file, or it is of another version or shape.
    """
    file = Path(path)
    file = file / FILE if file.is_dir() else file
    try:
        content = json.loads(file.read_text())
        if content["schema_version"] != VERSION:
            found = content["schema_version"]
            raise ValueError(f"schema_version {found}, this version reads {VERSION}")
        ranks = tuple(_ranks(content["ranks"]))
        small = tuple(trace_io.traces_from_plain(content["small"]))
        accelerator = str(content["accelerator"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"+projection.measured={path} can't be read: {error}; name the {FILE} of a run with "
            "+projection=measure"
        ) from error
    device = _elsewhere(accelerator, target)
    return Measured(ranks=ranks, accelerator=accelerator, device=device, small=small)


def _elsewhere(accelerator: str, target: Cluster) -> Cluster | None:
    """The machine that was measured, where the target's accelerator is another one.

    Raises:
        UsageError: What was measured on processors says nothing of accelerators.
    """
    name = target.accelerator.name
    if accelerator == name:
        return None
    if HOST in (accelerator, name):
        raise UsageError(
            f"what was measured on {accelerator} can't be carried to {name}: a measurement goes "
            "from one accelerator to another, or stays on this machine's processors"
        )
    return emulation.load_cluster(accelerator, 1, 1)

"""The job under one schedule beside its own, or under all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from primus_ext.plan import Plan
from primus_ext.project import estimated, imbalance, stage
from primus_ext.project.kept import Kept
from primus_ext.project.parts import of_rank
from primus_ext.project.programs import ScheduleError, Shape
from primus_ext.project.rescheduled import Job, Rescheduled
from primus_ext.project.result import Memory, ScheduleRow
from primus_ext.project.schedule import Timeline, programs
from primus_ext.project.schedules import SCHEDULES, Schedule, named, own
from primus_ext.trace import RankTrace

ALL = "all"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """The step under the program's own schedule."""

    schedule: Schedule
    step_s: float
    timeline: Timeline


def own_schedule(plan: Plan, shape: Shape) -> Schedule:
    """What the program runs."""
    if plan.flags.get("overlap_moe_expert_parallel_comm"):
        return SCHEDULES["combined-1f1b"]
    return own(shape)


def notes(plan: Plan, shape: Shape, under: Rescheduled | None) -> list[str]:
    """What a report must say that is not of the schedule that the program runs."""
    mine = own_schedule(plan, shape)
    if under is None or under.schedule is mine:
        return []
    asked = under.schedule
    found = [
        f"step and breakdown are those of {asked.title}, offered by {asked.offered_by}; the "
        f"program runs {mine.title}, and the memory verdict and the collectives are its own"
    ]
    if not asked.overlaps_data_parallel and plan.parallelism.overlap_grad_reduce:
        found.append(
            f"{asked.title}: gradients are reduced, and parameters gathered, after the pipeline "
            "(overlap_grad_reduce and overlap_param_gather are not offered with it)"
        )
    return found


def job_of(plan: Plan, stages: Sequence[RankTrace], kept: Kept, shape: Shape) -> Job:
    """The parts of a job, for any schedule.

    Raises:
        ScheduleError: Its layers can't be told apart.
    """
    if any(stage.parts_overlap(trace, c) for trace in stages for c in trace.chunks):
        raise ScheduleError(
            "schedule is not legal with sharded parameters (FSDP): their layers can't be priced "
            "apart from each other"
        )
    sharded = plan.parallelism.distributed_optimizer
    filled = [kept.buckets(trace, sharded) for trace in stages]
    by_rank = [
        kept.of(trace, ("parts", sharded), lambda t=trace, b=buckets: of_rank(
            kept.cost, imbalance.gated(t), b, kept.times(t, shape.microbatches)
        ))
        for trace, buckets in zip(stages, filled, strict=True)
    ]  # fmt: skip
    ordered = [by_rank[rank][chunk] for chunk in range(shape.vpp) for rank in range(shape.pp)]
    quiet = min(part.transient for parts in ordered for part in parts)
    boundary = max(part.boundary for parts in ordered for part in parts)
    calm = [
        [
            dataclasses.replace(part, boundary=boundary,
                                transient=quiet if part.layer else part.transient)
            for part in parts
        ]
        for parts in ordered
    ]  # fmt: skip
    pipeline = stages[0].groups.get("pp", (stages[0].rank,))
    return Job(plan=plan, cost=kept.cost, shape=shape, stages=calm, buckets=filled,
               pipeline=pipeline)  # fmt: skip


def rows(
    job: Job, stages: Sequence[RankTrace], memory: Memory, mine: Own, asked: str,
    chosen: Rescheduled | None = None,
) -> tuple[ScheduleRow, ...]:  # fmt: skip
    """A row for the program's own schedule and for those that were asked for.

    Args:
        job: The job.
        stages: Trace of every pipeline rank.
        memory: The answer for the program's own schedule.
        mine: The step under that.
        asked: A name, or ``all``.
        chosen: The job under ``asked``, where that is one schedule.
    """
    names = list(SCHEDULES) if asked == ALL else [mine.schedule.name, named(asked).name]
    found = []
    for name in dict.fromkeys(names):
        schedule = SCHEDULES[name]
        if schedule is mine.schedule:
            found.append(_own_row(job, memory, mine))
            continue
        role = "asked" if asked != ALL else ""
        try:
            under = chosen if chosen and chosen.schedule is schedule else Rescheduled(job, schedule)
            found.append(_row(under, stages, memory, role))
        except ScheduleError as error:
            found.append(
                ScheduleRow(schedule=name, title=schedule.title, offered_by=schedule.offered_by,
                            chunks=schedule.chunks or max(2, job.shape.vpp), role=role,
                            refused=str(error))
            )  # fmt: skip
    return tuple(found)


def _own_row(job: Job, memory: Memory, mine: Own) -> ScheduleRow:
    schedule = mine.schedule
    shape = dataclasses.replace(job.shape, schedule=schedule.name)
    order = programs(estimated.enough(shape))
    return ScheduleRow(
        schedule=schedule.name, title=schedule.title, offered_by=schedule.offered_by,
        chunks=job.shape.vpp, role="runs", step_s=mine.step_s,
        bubble_share=_bubble(mine.timeline),
        in_flight=max(estimated.in_flight(program, shape.vpp) for program in order),
        peak_bytes=tuple(role.peak_bytes for role in memory.per_role),
        fits=memory.verdict == "fits", memory_evidence="composed from the recorded program",
    )  # fmt: skip


def _row(
    under: Rescheduled, stages: Sequence[RankTrace], memory: Memory, role: str
) -> ScheduleRow:
    short = estimated.enough(under.shape)
    order = under.order(short)
    peaks = estimated.peaks(under, stages, order)
    beside = max(known.reserved_bytes - known.peak_bytes for known in memory.per_role)
    return ScheduleRow(
        schedule=under.schedule.name, title=under.schedule.title,
        offered_by=under.schedule.offered_by, chunks=under.shape.vpp, role=role,
        step_s=under.end, bubble_share=_bubble(under.timeline),
        in_flight=max(estimated.in_flight(program, under.shape.vpp) for program in order),
        peak_bytes=peaks, fits=max(peaks) + beside <= memory.capacity_bytes,
        memory_evidence=estimated.EVIDENCE,
    )  # fmt: skip


def _bubble(timeline: Timeline) -> float:
    ranks = range(len(timeline.busy))
    idle = sum(max(0.0, timeline.idle(rank)) for rank in ranks)
    return idle / len(timeline.busy) / timeline.makespan if timeline.makespan else 0.0

"""From a plan and the traces of its distinct ranks to the projection."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from primus_ext.cluster import Cluster
from primus_ext.cluster_files import assumptions
from primus_ext.cost.conditions import Conditions
from primus_ext.cost.formats import require_precision
from primus_ext.cost.measured_collectives import MeasuredCollectives
from primus_ext.plan import Plan, ProgramRef
from primus_ext.project import (
    caveats,
    comparison,
    data_parallel,
    evidence,
    imbalance,
    inventory,
    measured_evidence,
    memory,
    observing,
    unhidden,
)
from primus_ext.project.compiled import Durations
from primus_ext.project.kept import Kept
from primus_ext.project.ledger import Kind, Ledger, TermName
from primus_ext.project.observed import Measured
from primus_ext.project.programs import ScheduleError, Shape
from primus_ext.project.rescheduled import Job, Rescheduled, StepTimeline
from primus_ext.project.result import Memory, Projection, ScheduleRow, Term, Throughput
from primus_ext.project.schedule import Timeline, programs, simulate_repeating
from primus_ext.project.schedules import named
from primus_ext.project.throughput import interval_words, throughput
from primus_ext.project.unknown_ops import of_rank, unknown_ops
from primus_ext.trace import RankTrace, to_plain

GRID = 2.0**-40
"""Exposed seconds are multiples of this (0.9 ps), so that their sum is exact in any order."""


class PlanError(ValueError):
    """Plan, traces and target don't fit together; the message is one sentence."""


def project(
    plan: Plan,
    traces: Sequence[RankTrace],
    cluster: Cluster,
    *,
    mode: str,
    program: ProgramRef | None = None,
    warnings: Sequence[str] = (),
    schedule: str | None = None,
    kept: Kept | None = None,
    measured: Measured | None = None,
    collectives: MeasuredCollectives | None = None,
) -> Projection:
    """Memory and time of one step of a job on a target.

    Args:
        plan: The job.
        traces: One for every distinct kind of rank; together they hold all pipeline ranks.
        cluster: The target.
        mode: How the traces came about: simulate or measure.
        program: The program that the traces came from.
        warnings: What the makers of the traces want to be known.
        schedule: A pipeline schedule to price the step with (a key of
            :data:`primus_ext.project.schedules.SCHEDULES`), or ``all`` to compare them; None: what
            the program runs.
        kept: What other projections on this target found out; None: nothing, and nothing of this
            one is kept.
        measured: How long ranks really took; None: all is modelled.
        collectives: Measured ones, which go before the model; with ``kept`` they must be its own.

    Raises:
        MeasurementError: They are not of these ranks.
        PlanError: Traces are missing, or the target has another size than the job.
        CostError: An op or a collective has no price.
        ClusterError: The target lacks the precision of the job.
        ScheduleError: The schedule is one that the framework refuses.
    """
    step, under = _steps(plan, traces, cluster, schedule, kept, measured, collectives)
    return _projection(step, under, mode, program, warnings, schedule)


def timed(
    plan: Plan, traces: Sequence[RankTrace], cluster: Cluster,
    collectives: MeasuredCollectives | None = None, kept: Kept | None = None,
) -> tuple[Throughput, tuple[Term, ...]]:
    """As :func:`project`, without the memory: the time of a step, and its terms."""
    step, under = _steps(plan, traces, cluster, None, kept, collectives=collectives)
    terms, kinds = _terms(step, under)
    step_s = sum(term.exposed_seconds for term in terms)
    width = step.communication_width()
    speed = throughput(plan, step.stages, cluster, step_s, kinds, communication=width)
    return speed, tuple(terms)


def _terms(step: _Step, under: Rescheduled | None) -> tuple[list[Term], dict[Kind, float]]:
    total, end = (under.ledger(), under.end) if under else step.total()
    return step.terms(total, end, under.schedule.name if under else None)


def project_and_draw(
    plan: Plan,
    traces: Sequence[RankTrace],
    cluster: Cluster,
    *,
    mode: str,
    program: ProgramRef | None = None,
    warnings: Sequence[str] = (),
    schedule: str | None = None,
    kept: Kept | None = None,
    measured: Measured | None = None,
    collectives: MeasuredCollectives | None = None,
) -> tuple[Projection, StepTimeline]:
    """As :func:`project`, and when every pipeline rank does what in that step.

    ``all`` schedules are compared in the projection; what the program runs is drawn.
    """
    step, under = _steps(plan, traces, cluster, schedule, kept, measured, collectives)
    projection = _projection(step, under, mode, program, warnings, schedule)
    return projection, (under or step).recorded()


def _steps(
    plan: Plan, traces: Sequence[RankTrace], cluster: Cluster, schedule: str | None,
    kept: Kept | None = None, measured: Measured | None = None,
    collectives: MeasuredCollectives | None = None,
) -> tuple[_Step, Rescheduled | None]:  # fmt: skip
    """The step as the framework runs it, and under another schedule where one is asked for."""
    conditions = Conditions.of(plan, cluster.accelerator)
    if kept is not None and kept.cluster is not cluster:
        raise PlanError(f"what is kept is of {kept.cluster.name}, not of this {cluster.name}")
    if kept is not None and collectives not in (None, kept.cost.measured_collectives):
        raise PlanError("what is kept was priced with other collectives than the measured ones")
    if kept is None:
        kept = Kept(cluster, collectives=collectives)
    kept = kept.under(conditions)
    require_precision(cluster.accelerator, plan.precision)
    stages = stage_traces(plan, traces, cluster)
    if measured is not None:
        kept = observing.lasting(measured, plan, stages, kept)
    step = _Step(plan, stages, kept, schedule_shape(plan), measured)
    return step, _other_schedule(step, schedule)


def _projection(
    step: _Step, under: Rescheduled | None, mode: str, program: ProgramRef | None,
    warnings: Sequence[str], schedule: str | None,
) -> Projection:  # fmt: skip
    plan, stages, shape, kept = step.plan, step.stages, step.shape, step.kept
    cluster = kept.cluster
    terms, kinds = _terms(step, under)
    step_s = sum(term.exposed_seconds for term in terms)
    judged = memory.verdict(plan, stages, cluster, shape, kept, step.measured)
    return Projection(
        plan=plan,
        program=program,
        cluster=kept.of_target("cluster", lambda: _cluster(cluster)),
        mode=mode,
        model={
            "total_parameters": sum(trace.global_parameters for trace in stages),
            "active_parameters": sum(trace.active_parameters for trace in stages),
        },
        memory=judged,
        throughput=throughput(
            plan, stages, cluster, step_s, kinds, step.measured, step.communication_width()
        ),
        breakdown=tuple(terms),
        not_modelled=caveats.not_modelled(plan, stages, cluster),
        warnings=(
            *warnings, *kept.of_target("assumed", lambda: caveats.assumed(cluster)),
            *judged.notes, *_unknown(stages, kept),
            *comparison.notes(plan, shape, under),
        ),
        collectives=inventory.listed(inventory.of_step(plan, stages, shape, kept)),
        schedules=_compared(step, judged, schedule, under),
        expert_imbalance=imbalance.of_stages(stages),
        provenance={
            "binding_pp_rank": under.binding if under else step.binding,
            "prices": "model: published peaks, bandwidths and efficiencies",
            **measured_evidence.provenance(kept.cost),
            **kept.of_target("figures", lambda: _figures(cluster)),
            "interval": interval_words(step.measured),
            **({"measurements": to_plain(step.measured.ranks)} if step.measured else {}),
        },
    )


def timeline(
    plan: Plan, traces: Sequence[RankTrace], cluster: Cluster, schedule: str | None = None
) -> StepTimeline:
    """When every pipeline rank does what in one step.

    Args:
        plan: As for :func:`project`, and the rest too.
        traces: The same.
        cluster: The same.
        schedule: The same; ``all`` stands for what the program runs.

    Raises:
        ValueError: As :func:`project`.
    """
    step, under = _steps(plan, traces, cluster, schedule)
    return (under or step).recorded()


def _other_schedule(step: _Step, schedule: str | None) -> Rescheduled | None:
    """The step under a schedule that only :mod:`rescheduled` knows, None for the plain ones."""
    mine = comparison.own_schedule(step.plan, step.shape)
    asked = mine if schedule in (None, comparison.ALL) else named(schedule)
    if asked is not mine:
        return Rescheduled(step.job, asked)
    if not mine.pairs or not step.kept.cluster.hides_communication:
        return None
    try:
        return Rescheduled(step.job, mine)
    except ScheduleError:  # then it is priced without the overlap, as the caveats say
        return None


def _compared(
    step: _Step, judged: Memory, schedule: str | None, under: Rescheduled | None
) -> tuple[ScheduleRow, ...]:
    """Rows of the schedules that were asked for; none if none was."""
    if schedule is None:
        return ()
    mine = comparison.own_schedule(step.plan, step.shape)
    own = under if under and under.schedule is mine else _other_schedule(step, None)
    if own:
        ran = comparison.Own(schedule=mine, step_s=own.end, timeline=own.timeline)
    else:
        ran = comparison.Own(schedule=mine, step_s=step.total()[1], timeline=step.timeline)
    return comparison.rows(step.job, step.stages, judged, ran, schedule, under)


def schedule_shape(plan: Plan) -> Shape:
    """The pipeline schedule that the framework will run."""
    flags = plan.flags
    return Shape(
        pp=plan.parallelism.pp,
        vpp=plan.parallelism.vpp,
        microbatches=plan.batch.num_microbatches,
        group=int(flags.get("microbatch_group_size_per_vp_stage") or 0),
        overlap_p2p=plan.parallelism.overlap_p2p and plan.parallelism.vpp > 1,
        waits_for_sends=bool(flags.get("deallocate_pipeline_outputs", True)),
        early=int(bool(flags.get("overlap_moe_expert_parallel_comm"))),
    )


def stage_traces(
    plan: Plan, traces: Sequence[RankTrace], cluster: Cluster
) -> tuple[RankTrace, ...]:
    """The trace of every pipeline rank, in order.

    Raises:
        PlanError: A pipeline rank has none, or the sizes don't fit.
    """
    parallelism = plan.parallelism
    if parallelism.world_size != cluster.world_size:
        raise PlanError(
            f"world_size={parallelism.world_size} is not legal on {cluster.name}: it has "
            f"{cluster.world_size} GPUs"
        )
    if plan.batch.num_microbatches < 1:
        raise PlanError(
            f"gbs={plan.batch.gbs} is not legal: it must be at least mbs={plan.batch.mbs} times "
            f"dp={plan.batch.dp}"
        )
    by_rank = {rank: trace for trace in traces for rank in trace.pp_ranks}
    missing = [str(rank) for rank in range(parallelism.pp) if rank not in by_rank]
    if missing:
        raise PlanError(f"pipeline ranks {', '.join(missing)} have no trace")
    found = tuple(by_rank[rank] for rank in range(parallelism.pp))
    for rank, trace in enumerate(found):
        if len(trace.chunks) != parallelism.vpp:
            raise PlanError(
                f"the trace of pipeline rank {rank} has {len(trace.chunks)} model chunks, the "
                f"plan has vpp={parallelism.vpp}"
            )
        for chunk in trace.chunks:
            if min(chunk.memory.sizes()) < 0:
                raise PlanError(
                    f"the trace of pipeline rank {rank} has negative memory: {chunk.memory}"
                )
    return found


_IN_PIECES = "scatter_gather_tensors_in_pipeline"


class _Step:
    """The timeline of one step."""

    def __init__(
        self, plan: Plan, stages: Sequence[RankTrace], kept: Kept, shape: Shape,
        measured: Measured | None = None,
    ) -> None:  # fmt: skip
        self.plan, self.stages, self.shape, self.kept = plan, stages, shape, kept
        self.measured = measured
        self._timed = unhidden.as_timed(plan, kept.cluster)
        run = dataclasses.replace(
            shape, overlap_p2p=shape.overlap_p2p and self._timed.parallelism.overlap_p2p
        )
        ranks, sharded = range(shape.pp), plan.parallelism.distributed_optimizer
        self._times = [kept.times(trace, shape.microbatches) for trace in stages]
        self._buckets = [kept.buckets(trace, sharded) for trace in stages]
        self._forward = [[c.forward.seconds for c in t.chunks] for t in self._times]
        self._backward = [[c.backward.seconds for c in t.chunks] for t in self._times]
        self._first = data_parallel.first_waits(plan, run, self._buckets, self._forward)
        self._boundaries: list[tuple[int, int, int]] = []
        self._boundary = self._boundary_seconds()
        self.timeline: Timeline
        self._code, self.timeline = simulate_repeating(
            run, self._forward, self._backward, self._boundary, self._first
        )
        self.binding = max(ranks, key=lambda r: self.timeline.busy[r])

    def _boundary_seconds(self) -> list[float]:
        """Seconds of a transfer across each boundary between stages.

        With ``scatter_gather_tensors_in_pipeline`` each tensor-parallel rank sends its piece of
        what all of them hold, and the receivers gather them.
        """
        shape, pipeline = self.shape, self.stages[0].groups.get("pp", ())
        pieces = self.plan.parallelism.tp if self.plan.flags.get(_IN_PIECES) else 1
        if shape.pp > 1 and len(pipeline) != shape.pp:
            raise PlanError(f"group pp has {len(pipeline)} ranks, the plan has pp={shape.pp}")
        seconds = []
        for boundary, size in enumerate(memory.boundary_bytes(self.stages, shape)):
            here, there = boundary % shape.pp, (boundary + 1) % shape.pp
            self._boundaries.append((size // pieces, pipeline[here], pipeline[there]))
            sent = self.kept.send_seconds(size // pieces, pipeline[here], pipeline[there])
            if pieces > 1:
                sent += self.kept.gather_seconds(size, self.stages[there].groups["tp"])
            seconds.append(sent)
        return seconds

    def _after(self, rank: int) -> tuple[float, float]:
        """Seconds of the optimizer step, and of gathering parameters that nothing hides."""
        overlap = self.plan.parallelism.overlap_param_gather
        gather = 0.0 if overlap else sum(b.gather_s for b in self._buckets[rank])
        return self._times[rank].step.seconds, gather

    def _reduced(self, rank: int) -> float:
        return data_parallel.reduced_at(
            self.plan, self._code.shape, self.timeline, rank, self._buckets[rank],
            self._backward[rank],
        )  # fmt: skip

    def total(self) -> tuple[Ledger, float]:
        """Work of the binding rank, and when the step is over."""
        rank, timeline = self.binding, self.timeline
        ranks = range(self.shape.pp)
        total = Ledger()
        for chunk in self._times[rank].chunks:
            total.add(chunk.forward, self.shape.microbatches)
            total.add(chunk.backward, self.shape.microbatches)
        total.work(TermName.P2P, Kind.COMMUNICATION, timeline.p2p[rank])
        self._data_parallel(total)
        total.add(self._times[rank].step)
        # the norm of the gradients makes all ranks wait for the last one
        end = max(self._reduced(r) for r in ranks) + max(sum(self._after(r)) for r in ranks)
        return total, end

    def terms(
        self, total: Ledger, end: float, schedule: str | None
    ) -> tuple[list[Term], dict[Kind, float]]:
        """Terms of one rank with what is idle, and its exposed seconds by kind of work.

        Args:
            total: Its work; the bubble is added.
            end: When the step is over.
            schedule: Its name, where it is not the plan's.
        """
        idle = max(0.0, end - total.seconds)
        work = {kind: seconds for kind, seconds in total.kinds.items()}
        share = 1 + idle / max(GRID, sum(work.values()))
        total.work(TermName.BUBBLE, Kind.GEMM, idle)
        terms = [self._term(name, total, schedule) for name in TermName if total.busy.get(name)]
        return terms, {kind: seconds * share for kind, seconds in work.items()}

    def _data_parallel(self, total: Ledger) -> None:
        """Communication of gradients and parameters on the binding rank."""
        rank = self.binding
        _, gather = self._after(rank)
        exposed = self._reduced(rank) - self.timeline.finish[rank]
        exposed += sum(self._first[rank]) + gather
        total.hidden(TermName.DATA, sum(b.reduce_s + b.gather_s for b in self._buckets[rank]))
        total.waited(TermName.DATA, Kind.COMMUNICATION, exposed)

    def communication_width(self) -> float | None:
        """Half width of the interval of communication, where it was measured."""
        return measured_evidence.half_width(self._collectives)

    def _evidence(self, name: TermName, schedule: str | None) -> str:
        own = self.measured.words if self.measured else ""
        modelled = evidence.of(name, self.plan, self.kept.cluster, schedule, own)
        return measured_evidence.of(name, modelled, self.kept.cost, self._collectives)

    @functools.cached_property
    def _collectives(self) -> measured_evidence.ByTerm:
        """Prices of collectives by term, where some are measured."""
        sharded = self.plan.parallelism.distributed_optimizer
        return measured_evidence.prices(self.stages, self.kept, sharded, self._boundaries)

    @functools.cached_property
    def job(self) -> Job:
        """The job in parts, for another schedule."""
        return comparison.job_of(self._timed, self.stages, self.kept, self.shape)

    def recorded(self) -> StepTimeline:
        """When every rank does what."""
        durations = Durations(
            forward=self._forward, backward=self._backward, boundary=self._boundary,
            first_forward=self._first,
        )  # fmt: skip
        ranks = range(self.shape.pp)
        return StepTimeline(
            schedule=self.plan.schedule, shape=self._code.shape, durations=durations,
            programs=tuple(programs(self._code.shape)),
            code=self._code, microbatches=self.shape.microbatches,
            reduced=tuple(self._reduced(r) for r in ranks),
            finish=tuple(self.timeline.finish),
            step=tuple(self._times[r].step.seconds for r in ranks),
            gather=tuple(self._after(r)[1] for r in ranks),
        )  # fmt: skip

    def _term(self, name: TermName, total: Ledger, schedule: str | None) -> Term:
        return Term(
            term=str(name),
            seconds=total.busy[name],
            exposed_seconds=round(total.exposed.get(name, 0.0) / GRID) * GRID,
            evidence=self._evidence(name, schedule),
        )


def _unknown(stages: Sequence[RankTrace], kept: Kept) -> tuple[str, ...]:
    return unknown_ops(
        stages, lambda trace: kept.of(trace, "unknown ops", lambda: of_rank(trace))
    )


def _figures(cluster: Cluster) -> dict[str, Any]:
    """Where the numbers of the target come from."""
    return {
        "figures": to_plain(cluster.accelerator),
        "network": {
            key: to_plain(getattr(cluster, key))
            for key in ("nic_bandwidth", "nics_per_node", "nic_efficiency", "nic_latency_s",
                        "tiers")
        },
        "assumed": {key: figure.source for key, figure in assumptions(cluster).items()},
    }  # fmt: skip


def _cluster(cluster: Cluster) -> dict[str, Any]:
    """What the report says of the target."""
    plain = {
        field.name: getattr(cluster, field.name)
        for field in dataclasses.fields(cluster)
        if isinstance(getattr(cluster, field.name), (str, int))
    }
    accelerator = cluster.accelerator
    return {
        **plain,
        "world_size": cluster.world_size,
        "accelerator": accelerator.name,
        "arch": accelerator.arch,
        "memory_bytes": int(accelerator.hbm_bytes.value),
    }

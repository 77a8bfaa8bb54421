"""A job under another pipeline schedule than the one that its program runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from primus_ext.cost.model import CostModel
from primus_ext.plan import Plan
from primus_ext.project import beside, data_parallel
from primus_ext.project.compiled import Code, Durations, compiled
from primus_ext.project.data_parallel import BucketTimes
from primus_ext.project.ledger import Kind, Ledger, TermName
from primus_ext.project.parts import Filled, Part, cut
from primus_ext.project.programs import Program, ScheduleError, Shape, Transfers
from primus_ext.project.schedule import Timeline, programs, simulate_repeating, timed
from primus_ext.project.schedules import Schedule
from primus_ext.project.schedules.automatic import automatic
from primus_ext.trace import Collective, CollectiveKind

MOST_WORK = 12_000
"""Pieces of work up to which a schedule is made for the job; it takes about 0.3 s."""

@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a schedule is laid over."""

    plan: Plan
    cost: CostModel
    shape: Shape
    """Of the program's own schedule."""
    stages: Sequence[Sequence[Part]]
    """Of the program's own cut, in the order of the model."""
    buckets: Sequence[Sequence[BucketTimes]]
    """Gradient buckets of every rank, as the program has them."""
    pipeline: tuple[int, ...]
    """Global ranks of the pipeline."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeline:
    """What a picture of one step is drawn from; lists are by pipeline rank, in seconds."""

    schedule: str
    shape: Shape
    """What was simulated: as many microbatches as the step has, or fewer."""
    microbatches: int
    """Of the step."""
    programs: tuple[Program, ...]
    code: Code
    durations: Durations
    finish: tuple[float, ...]
    """End of the last backward."""
    reduced: tuple[float, ...]
    """When its gradients are reduced."""
    step: tuple[float, ...]
    """Duration of the optimizer."""
    gather: tuple[float, ...]
    """Duration of gathering parameters afterwards, where nothing hides it."""


def shape_for(job: Job, schedule: Schedule) -> Shape:
    """The shape of a job under a schedule.

    Raises:
        ScheduleError: It needs a pipeline, or more chunks than there are.
    """
    own, chunks = job.shape, schedule.chunks
    if own.pp == 1 and schedule.needs_pipeline:
        raise ScheduleError(f"the schedule {schedule.name} needs a pipeline, the job has pp=1")
    if schedule.pairs and not schedule.folded:
        if own.pp > 1 and own.vpp == 1:
            raise ScheduleError(
                f"the schedule {schedule.name} needs several chunks on each rank, the job has vpp=1"
            )
        chunks = own.vpp
    if not chunks:
        chunks = own.vpp if own.vpp > 1 else 2
    found = dataclasses.replace(
        own, vpp=chunks, folded=schedule.folded, schedule=schedule.name,
        early=schedule.early,
        # Megatron's default as soon as there are several chunks
        overlap_p2p=own.overlap_p2p if own.vpp > 1 else chunks > 1,
        group=own.group if chunks == own.vpp else 0,
    )  # fmt: skip
    found.check()
    return found


class Rescheduled:
    """One step of a job under a schedule."""

    def __init__(self, job: Job, schedule: Schedule) -> None:
        """Simulate the step.

        Raises:
            ScheduleError: The job can't run it.
        """
        self.job, self.schedule = job, schedule
        self.shape = shape_for(job, schedule)
        stages = cut(job.stages, job.shape.vpp, self.shape.pp, self.shape.vpp)
        of = Transfers(self.shape)
        ranks, chunks = range(self.shape.pp), range(self.shape.vpp)
        self.chunks = [[stages[of.stage(rank, chunk)] for chunk in chunks] for rank in ranks]
        """Parts by rank and chunk."""
        self._ahead = [[_total(p.forward for p in parts) for parts in row] for row in self.chunks]
        self._back = [[_total(p.backward for p in parts) for parts in row] for row in self.chunks]
        self._buckets = [self._buckets_of(rank) for rank in ranks]
        self._overlaps = schedule.overlaps_data_parallel
        self.durations = self._durations()
        self.programs: list[Program] | None = None
        if schedule.limit is not None:
            self.programs = self._made(schedule.limit(self.shape.pp))
            self._code = compiled(self.shape, self.programs)
            self.timeline = timed(self._code, self.durations)
        else:
            self._code, self.timeline = self._fixed()
        self.simulated = self._code.shape
        self.binding = max(ranks, key=lambda r: self.timeline.busy[r])

    def recorded(self) -> StepTimeline:
        """When every rank does what."""
        ranks = range(self.shape.pp)
        return StepTimeline(
            schedule=self.schedule.name, shape=self.simulated, durations=self.durations,
            microbatches=self.shape.microbatches, programs=tuple(self.order(self.simulated)),
            code=self._code, finish=tuple(self.timeline.finish),
            reduced=tuple(self._reduced(r) for r in ranks),
            step=tuple(self._step(r).seconds for r in ranks),
            gather=tuple(self._gather(r) for r in ranks),
        )  # fmt: skip

    def order(self, shape: Shape) -> list[Program]:
        """The program of every rank for a shape with as many microbatches, or fewer."""
        return self.programs if self.programs is not None else programs(shape)

    def _made(self, limit: int) -> list[Program]:
        work = 3 * self.shape.stages * self.shape.microbatches
        if work > MOST_WORK:
            raise ScheduleError(
                f"the schedule {self.schedule.name} is made for each job, which takes too long for "
                f"{self.shape.microbatches} microbatches on {self.shape.stages} stages: at most "
                f"{MOST_WORK // (3 * self.shape.stages)}"
            )
        return automatic(self.shape, self.durations, limit, self.schedule.build)

    def _fixed(self) -> tuple[Code, Timeline]:
        d = self.durations
        return simulate_repeating(
            self.shape, d.forward, d.backward, d.boundary, d.first_forward, d.weight, d.pair,
            long=self.schedule.repeats_after,
        )  # fmt: skip

    def _durations(self) -> Durations:
        forward = [[ledger.seconds for ledger in row] for row in self._ahead]
        waits = [[0.0 for _ in times] for times in forward]
        if self._overlaps:
            plan = self.job.plan
            waits = data_parallel.first_waits(plan, self.shape, self._buckets, forward)
        return Durations(
            forward=forward,
            backward=[[ledger.seconds for ledger in row] for row in self._back],
            weight=[[sum(p.weight for p in parts) for parts in row] for row in self.chunks],
            boundary=self._boundary(),
            first_forward=waits,
            pair=self._pairs() if self.schedule.pairs else None,
        )

    def _pairs(self) -> list[list[list[float]]]:
        """Seconds of a forward of one chunk beside a backward of another, by rank."""
        delayed = bool(self.job.plan.flags.get("delay_wgrad_compute"))
        known: dict[tuple[int, ...], float] = {}

        def both(ahead: Sequence[Part], back: Sequence[Part]) -> float:
            key = tuple(id(part) for part in (*ahead, *back))
            if key not in known:
                known[key] = beside.seconds(
                    [p.pieces for p in ahead], [p.pieces for p in back], delayed
                )
            return known[key]

        return [[[both(f, b) for b in row] for f in row] for row in self.chunks]

    def _boundary(self) -> list[float]:
        """Seconds of a transfer across each boundary between stages."""
        of, pipeline = Transfers(self.shape), self.job.pipeline
        ranks = {
            of.stage(rank, chunk): rank
            for rank in range(self.shape.pp) for chunk in range(self.shape.vpp)
        }  # fmt: skip
        size = max((part.boundary for parts in self.job.stages for part in parts), default=0)
        message = Collective(kind=CollectiveKind.SEND_RECV, group="pp", bytes=size, dtype="")
        return [
            0.0 if ranks[b] == ranks[b + 1]
            else self.job.cost.collective_seconds(
                message, (pipeline[ranks[b]], pipeline[ranks[b + 1]])
            ).seconds
            for b in range(self.shape.stages - 1)
        ]  # fmt: skip

    def _buckets_of(self, rank: int) -> list[BucketTimes]:
        """Gradient buckets of a rank; where its chunks are others than the job's, equal ones."""
        if self.shape.vpp == self.job.shape.vpp and not self.shape.folded:
            return list(self.job.buckets[rank])
        found = []
        for chunk, parts in enumerate(self.chunks[rank]):
            groups: dict[str, list[Filled]] = {}
            for filled in (filled for part in parts for filled in part.buckets):
                groups.setdefault(filled.group, []).append(filled)
            for group, filled in groups.items():
                count = max(1, round(sum(f.count for f in filled)))
                reduce_s, gather_s = (sum(f.reduce for f in filled), sum(f.gather for f in filled))
                bucket = BucketTimes(chunk, group, 1 / count, reduce_s / count, gather_s / count)
                found += [bucket] * count
        return found

    def _reduced(self, rank: int) -> float:
        """When the gradients of a rank are reduced."""
        buckets, finish = self._buckets[rank], self.timeline.finish[rank]
        if not self._overlaps or not self.job.plan.parallelism.overlap_grad_reduce:
            return finish + sum(bucket.reduce_s for bucket in buckets)
        return data_parallel.reduced_at(
            self.job.plan, self.simulated, self.timeline, rank, buckets,
            self.durations.backward[rank],
        )  # fmt: skip

    def _step(self, rank: int) -> Ledger:
        return _total(part.step for parts in self.chunks[rank] for part in parts)

    def _gather(self, rank: int) -> float:
        """Seconds of gathering parameters that nothing hides."""
        if self._overlaps and self.job.plan.parallelism.overlap_param_gather:
            return 0.0
        return sum(bucket.gather_s for bucket in self._buckets[rank])

    @property
    def end(self) -> float:
        """Seconds of the whole step; the norm of the gradients makes all ranks wait."""
        ranks = range(self.shape.pp)
        return max(self._reduced(r) for r in ranks) + max(
            self._step(r).seconds + self._gather(r) for r in ranks
        )

    def ledger(self) -> Ledger:
        """The step of the busiest rank by terms, the bubble last."""
        rank, total, first = self.binding, Ledger(), self.durations.first_forward
        for chunk in range(self.shape.vpp):
            total.add(self._ahead[rank][chunk], self.shape.microbatches)
            total.add(self._back[rank][chunk], self.shape.microbatches)
        total.work(TermName.P2P, Kind.COMMUNICATION, self.timeline.p2p[rank])
        data = self._reduced(rank) - self.timeline.finish[rank] + self._gather(rank)
        data += sum(first[rank]) if first else 0.0
        total.hidden(TermName.DATA, sum(b.reduce_s + b.gather_s for b in self._buckets[rank]))
        total.waited(TermName.DATA, Kind.COMMUNICATION, data)
        total.add(self._step(rank))
        hidden = min(self._hidden(), total.exposed.get(TermName.EXPERT, 0.0))
        if hidden > 0:
            total.waited(TermName.EXPERT, Kind.COMMUNICATION, -hidden)
        return total

    def _hidden(self) -> float:
        """Seconds that the busiest rank saves where it works on two microbatches at once."""
        pair, rank = self.durations.pair, self.binding
        if pair is None:
            return 0.0
        alone = sum(
            self.shape.microbatches * (a.seconds + b.seconds)
            for a, b in zip(self._ahead[rank], self._back[rank], strict=True)
        )
        first = self.durations.first_forward
        waits = sum(first[rank]) if first else 0.0
        return alone + waits - self.timeline.busy[rank]


def _total(ledgers) -> Ledger:  # noqa: ANN001
    total = Ledger()
    for ledger in ledgers:
        total.add(ledger)
    return total

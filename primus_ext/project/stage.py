"""Price the trace of one rank: seconds of a forward and a backward of each model chunk."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from primus_ext.cost.model import CostModel
from primus_ext.cost.priced import CostError
from primus_ext.measurement import RankMeasurement
from primus_ext.project import imbalance, lanes, observed, sharded
from primus_ext.project.ledger import Kind, Ledger, TermName
from primus_ext.trace import (
    LAYERS,
    Call,
    ChunkTrace,
    Collective,
    CollectiveKind,
    Family,
    Op,
    RankTrace,
    ScopeKind,
    Segment,
)

_TERMS = {
    Family.GEMM: TermName.GEMM,
    Family.GROUPED_GEMM: TermName.GROUPED_GEMM,
    Family.ATTENTION: TermName.ATTENTION,
    Family.MEMORY: TermName.MEMORY,
    Family.QUANTIZE: TermName.QUANTIZE,
    Family.HOST: TermName.MEMORY,
    Family.TRANSFER: TermName.MEMORY,
}
_KINDS = {
    Family.GEMM: Kind.GEMM,
    Family.GROUPED_GEMM: Kind.GEMM,
    Family.ATTENTION: Kind.ATTENTION,
}
GROUPS = {"tp": TermName.TENSOR, "cp": TermName.CONTEXT, "ep": TermName.EXPERT,
           "etp": TermName.EXPERT, "tp_ep": TermName.EXPERT, "pp": TermName.P2P,
           "dp": TermName.DATA, "dp_cp": TermName.DATA, "expert_dp": TermName.DATA}  # fmt: skip
"""Term of the communication in a group; that of other groups is :attr:`TermName.OTHER`."""
_EDGES = (ScopeKind.EMBEDDING, ScopeKind.OUTPUT, ScopeKind.OTHER)
_REMOTE = observed.REMOTE
_SHARDS = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkTimes:
    """One microbatch through one model chunk."""

    forward: Ledger
    backward: Ledger
    weight: float = 0.0
    """Seconds of the backward that compute weight gradients, which nothing else waits for: its
    products of layout nt.  Recomputation is none of them."""
    segments: tuple[ChunkTimes, ...] = ()
    """One occurrence of each segment; empty where segments overlap each other (FSDP)."""


@dataclasses.dataclass(frozen=True, slots=True)
class StageTimes:
    """One rank."""

    chunks: tuple[ChunkTimes, ...]
    step: Ledger
    """Gradient finalisation and optimizer."""


class Pricer:
    """Prices of the ops of one trace, each computed once."""

    def __init__(self, cost: CostModel, trace: RankTrace) -> None:
        """Price ``trace`` with ``cost``."""
        self._cost, self._trace = cost, trace
        self._seconds: list[float | None] = [None for _ in trace.ops]

    def seconds(self, index: int) -> float:
        """Seconds of one execution of an op.

        Raises:
            CostError: It has no price.
            ClusterError: The accelerator lacks its precision.
        """
        known = self._seconds[index]
        if known is None:
            known = self._seconds[index] = self._price(self._trace.ops[index])
        return known

    def _price(self, op: Op) -> float:
        if op.family not in _REMOTE:
            return self._cost.op_seconds(op).seconds
        if op.collective is None:
            raise CostError(f"op {op.name} of family {op.family} says nothing of its collective")
        return self._cost.remote_seconds(op, self.ranks(op.collective)).seconds

    def processor_share(self, index: int) -> float:
        """Of a collective or transfer without engines of its own, the part that takes a core."""
        op = self._trace.ops[index]
        if op.collective is None:
            return 0.0
        priced = self._cost.remote_seconds(op, self.ranks(op.collective))
        return priced.processor_s / priced.seconds if priced.seconds else 0.0

    def ranks(self, collective: Collective) -> tuple[int, ...]:
        """Members of a collective's group.

        Raises:
            CostError: The trace does not know the group.
        """
        ranks = self._trace.groups.get(collective.group)
        if ranks is None:
            raise CostError(
                f"group {collective.group} of a {collective.kind} is not in the trace: it has "
                f"{', '.join(self._trace.groups)}"
            )
        return ranks


@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    """One call, and where its seconds go."""

    call: Call
    scope: ScopeKind | None
    ledger: Ledger


class _Stream:
    """Accounts for calls in the order in which the host issues them; it is ahead of the device.

    Busy seconds are those of each call, exposed ones its share of the duration
    (:func:`lanes.shares`).  At the end everything that is still pending is waited for.
    """

    def __init__(self, cost: CostModel, trace: RankTrace) -> None:
        self._pricer, self._ops, self._host = Pricer(cost, trace), trace.ops, cost.conditions.host
        self._pieces = cost.conditions.pipelined_tp
        self._lasts = observed.AS_MODELLED
        """How long the part that is accounted for lasts."""
        blocking = self._host is not None and self._host.blocking
        self._serial = blocking
        """Whether the host waits for every call, so that nothing runs beside anything."""
        self._shares_cores = not cost.cluster.hides_communication
        """Whether communication takes the cores that compute."""

    def run(
        self, calls: Sequence[Call], scope: ScopeKind | None,
        lasts: observed.Lasts | None = None,
    ) -> Ledger:  # fmt: skip
        """Account for the calls of one part of the model, as long as it ``lasts`` if measured."""
        ledger = Ledger()
        self._lasts = lasts or observed.AS_MODELLED
        self.account([_Entry(call, scope, ledger) for call in calls])
        self._lasts = observed.AS_MODELLED
        if lasts and lasts.beside:
            term = TermName.OPTIMIZER if scope is None else TermName.EDGES
            ledger.work(term, Kind.MEMORY, lasts.beside)
        return ledger

    def whole(self, calls: Sequence[Call]) -> float:
        """Modelled seconds of calls with what their collectives expose."""
        return self.run(calls, ScopeKind.OTHER).seconds

    def own(self, calls: Sequence[Call]) -> float:
        """Modelled seconds of the calls that no other rank takes part in."""
        return sum(
            self._pricer.seconds(c.op) for c in calls if self._ops[c.op].family not in _REMOTE
        )

    def part(
        self, segment: Segment, calls: Sequence[Call], lasts: observed.Lasts | None = None
    ) -> Ledger:
        """One direction of a segment, or the time that the host needs for it."""
        ledger = self.run(calls, segment.kind, lasts)
        if segment.kind in LAYERS:
            _pipeline(ledger, self._pieces)
        if lasts is None:  # what was measured holds the host's time
            self.issue(ledger, [(segment, calls, 1)])
        return ledger

    def issue(
        self, ledger: Ledger, parts: Sequence[tuple[Segment | None, Sequence[Call], int]]
    ) -> None:
        """Add what the device waits for the host, over parts that occur so many times."""
        if self._host is None:
            return
        seconds = 0.0
        for segment, calls, count in parts:
            free = self._host.captured(segment) if segment else 0.0
            seconds += count * (1.0 - free) * self._host.seconds(self._ops, calls)
        waits = self._host.waits(ledger.seconds, seconds)
        if waits:
            ledger.work(TermName.HOST, Kind.MEMORY, waits)

    def weight(self, segments: Sequence[Segment], once: bool = False) -> float:
        """Seconds of weight gradients; ``once`` of one occurrence of each segment."""
        return sum(
            (1 if once else segment.count) * self._pricer.seconds(call.op)
            for segment in segments for call in segment.backward
            if computes_weights(self._ops[call.op], call)
        )  # fmt: skip

    def once(
        self, segment: Segment, lasts: tuple[observed.Lasts, observed.Lasts] | None = None
    ) -> ChunkTimes:
        """One occurrence of a segment."""
        ahead, back = lasts or (None, None)
        return ChunkTimes(
            self.part(segment, segment.forward, ahead), self.part(segment, segment.backward, back),
            self.weight([segment], once=True) * (back.stretch if back else 1.0),
        )  # fmt: skip

    def account(self, entries: Sequence[_Entry]) -> None:
        """Account for calls of several parts, which may overlap."""
        queues: dict[str, list[int]] = {}
        tasks: list[lanes.Task] = []
        owners: list[int] = []
        for owner, entry in enumerate(entries):
            task = self._task(entry.call, queues)
            if task.asynchronous and self._shares_cores:
                working, task = self._worked(entry.call, task)
                tasks.append(working)
                owners.append(owner)
            name = task.lane if task.asynchronous else entry.call.stream
            queues.setdefault(name, []).append(len(tasks))
            tasks.append(task)
            owners.append(owner)
        names = [self._names(entry) for entry in entries]
        for owner, task in zip(owners, tasks, strict=True):
            entries[owner].ledger.hidden(names[owner][0], task.seconds)
        for place, seconds in lanes.shares(tasks):
            owner = owners[place]
            entries[owner].ledger.waited(*names[owner], seconds)

    def _worked(self, call: Call, task: lanes.Task) -> tuple[lanes.Task, lanes.Task]:
        """An asynchronous call whose work takes a core: that, as if it computed, and the rest."""
        working = task.seconds * self._pricer.processor_share(call.op)
        return (
            dataclasses.replace(
                task, seconds=working, lane=lanes.DEVICE, asynchronous=False, after=()
            ),
            dataclasses.replace(task, seconds=task.seconds - working),
        )

    def _task(self, call: Call, queues: dict[str, list[int]]) -> lanes.Task:
        op, seconds = self._ops[call.op], self._pricer.seconds(call.op)
        remote = op.collective if op.family in _REMOTE else None
        seconds *= self._lasts.remote if op.family in _REMOTE else self._lasts.stretch
        if op.family is Family.P2P and op.name.endswith("send"):
            # it runs at the same time as the matching receive, which is what one waits for
            seconds = 0.0
        waited = ((queues.get(name, ()), behind) for name, behind in call.waits)
        return lanes.Task(
            seconds=seconds,
            stream=call.stream,
            lane=lanes.DEVICE if remote is None else remote.group,
            asynchronous=remote is not None and remote.asynchronous and not self._serial,
            # what is not in the list was over before it
            after=tuple(queue[-1 - behind] for queue, behind in waited if behind < len(queue)),
        )

    def _names(self, entry: _Entry) -> tuple[TermName, Kind]:
        op = self._ops[entry.call.op]
        if op.family in _REMOTE and op.collective is not None:
            return _remote_term(op.collective, entry.call, entry.scope), Kind.COMMUNICATION
        return _compute_term(op, entry.call, entry.scope), _KINDS.get(op.family, Kind.MEMORY)


def _pipeline(ledger: Ledger, pieces: int) -> None:
    """Run a layer's tensor-parallel communication beside its products, in pieces.

    Transformer Engine's userbuffers cut a gather or scatter in tp pieces, each beside the product
    of another piece (``common/comm_gemm_overlap``): one piece shows, and what the products are too
    short for.
    """
    sent = ledger.exposed.get(TermName.TENSOR, 0.0)
    hidden = min(sent * (1 - 1 / pieces), ledger.exposed.get(TermName.GEMM, 0.0))
    if hidden:
        ledger.waited(TermName.TENSOR, Kind.COMMUNICATION, -hidden)


def _compute_term(op: Op, call: Call, scope: ScopeKind | None) -> TermName:
    if scope is None:
        return TermName.OPTIMIZER
    if call.phase == "recompute":
        return TermName.RECOMPUTE
    return TermName.EDGES if scope in _EDGES else _TERMS[op.family]


def _remote_term(collective: Collective, call: Call, scope: ScopeKind | None) -> TermName:
    if scope is None:
        return TermName.OPTIMIZER
    if call.phase == "recompute":
        return TermName.RECOMPUTE
    return GROUPS.get(collective.group, TermName.OTHER)


def _whole_step(stream: _Stream, trace: RankTrace, microbatches: int) -> StageTimes:
    """A step whose microbatches differ and overlap each other; its mean microbatch.

    Every part runs in its place, forward and then backward, on streams that go on from one
    microbatch to the next, and from the optimizer's step into the first forward after it.
    """
    chunk = trace.chunks[0]
    recorded = list(chunk.microbatches)
    often = sharded.weights(len(recorded), microbatches)
    if len(often) > len(recorded):
        recorded.insert(1, recorded[1])
    ahead, back, step = Ledger(), Ledger(), Ledger()
    entries = [_Entry(call, None, step) for call in trace.step]
    shares: list[tuple[Ledger, Ledger, float]] = []
    for microbatch, weight in zip(recorded, often, strict=True):
        if not weight:
            continue
        placed = _placed(microbatch.segments or chunk.segments)
        forward, backward = Ledger(), Ledger()
        entries += [_Entry(call, s.kind, forward) for s in placed for call in s.forward]
        entries += [_Entry(call, s.kind, backward) for s in placed[::-1] for call in s.backward]
        shares += [(ahead, forward, weight), (back, backward, weight)]
    stream.account(entries)
    stream.issue(step, [(None, trace.step, 1)])
    for total, one, weight in shares:
        total.add(one, weight / microbatches)
    _issued(stream, chunk, ahead, back)
    return StageTimes((ChunkTimes(ahead, back),), step)


def _issued(stream: _Stream, chunk: ChunkTrace, ahead: Ledger, back: Ledger) -> None:
    """Add the host's time to a microbatch that was priced as a whole."""
    stream.issue(ahead, [(s, s.forward, s.count) for s in chunk.segments])
    stream.issue(back, [(s, s.backward, s.count) for s in chunk.segments])


def observe(
    cost: CostModel, trace: RankTrace, measurement: RankMeasurement, alone: bool = True
) -> observed.Observed:
    """How long parts of a trace took on a device, over what the model says of that device.

    Args:
        cost: Prices on the device that was measured.
        trace: The rank.
        measurement: Of a rank that does the same.
        alone: Whether its collectives were answered at once; else they ran, and are in the times.

    Raises:
        MeasurementError: They don't match.
        CostError: An op has no price.
    """
    stream = _Stream(cost, trace)
    return observed.of(trace, measurement, stream.own if alone else stream.whole, alone)


def _measured(stream: _Stream, trace: RankTrace, seen: observed.Observed) -> StageTimes:
    """As :func:`price`, with measured durations of what is the rank's own."""
    chunks = []
    for chunk, lasts, between in zip(trace.chunks, seen.chunks, seen.between, strict=True):
        if parts_overlap(trace, chunk):
            raise observed.MeasurementError(
                "sharded parameters (FSDP) can't be projected from a measurement by this version"
            )
        parts = tuple(map(stream.once, chunk.segments, lasts))
        ahead, back = Ledger(), Ledger()
        for segment, part in zip(chunk.segments, parts, strict=True):
            ahead.add(part.forward, segment.count)
            back.add(part.backward, segment.count)
        for ledger, left in zip((ahead, back), between, strict=True):
            if left.beside:
                ledger.work(TermName.EDGES, Kind.MEMORY, left.beside)
        weight = sum(
            part.weight * segment.count
            for segment, part in zip(chunk.segments, parts, strict=True)
        )
        chunks.append(ChunkTimes(ahead, back, weight, parts))
    return StageTimes(tuple(chunks), stream.run(trace.step, None, seen.step))


def price(
    cost: CostModel, trace: RankTrace, microbatches: int = 1,
    seen: observed.Observed | None = None,
) -> StageTimes:  # fmt: skip
    """Seconds of everything that one rank does for a microbatch and for a step.

    In every layer it waits for the expert-parallel rank with most tokens.

    Args:
        cost: Prices on the target.
        trace: The rank.
        microbatches: Of a step; where they differ the times are those of the mean one.
        seen: How long its parts really took (:func:`observe`); None: nothing was measured.

    Raises:
        CostError: An op or collective has no price.
        ClusterError: The accelerator lacks a precision that the trace uses.
        MeasurementError: The measurement can't be used for this job.
    """
    own = _Stream(cost, trace)
    if seen is not None:
        return _measured(own, trace, seen)
    busiest = imbalance.gated(trace)
    if trace.chunks[0].microbatches:
        return _whole_step(own, trace, microbatches)
    stream = own if busiest is trace else _Stream(cost, busiest)
    chunks = []
    for chunk in busiest.chunks:
        if parts_overlap(busiest, chunk):
            chunks.append(_in_order(stream, chunk))
            continue
        ahead, back = Ledger(), Ledger()
        parts = tuple(stream.once(segment) for segment in chunk.segments)
        for segment, part in zip(chunk.segments, parts, strict=True):
            ahead.add(part.forward, segment.count)
            back.add(part.backward, segment.count)
        chunks.append(ChunkTimes(ahead, back, stream.weight(chunk.segments), parts))
    step = own.run(trace.step, None)
    own.issue(step, [(None, trace.step, 1)])
    return StageTimes(tuple(chunks), step)


def parts_overlap(trace: RankTrace, chunk: ChunkTrace) -> bool:
    """Whether parameters are gathered, or gradients reduced, inside a microbatch (FSDP)."""
    if chunk.microbatches:
        return True
    used = {
        (found.group, found.kind)
        for segment in chunk.segments
        for call in (*segment.forward, *segment.backward)
        if (found := trace.ops[call.op].collective) is not None
    }
    return any(GROUPS.get(group) is TermName.DATA and kind in _SHARDS for group, kind in used)


def _in_order(stream: _Stream, chunk: ChunkTrace) -> ChunkTimes:
    """A microbatch whose parts overlap: every part in its place, forward and then backward."""
    placed = _placed(chunk.segments)
    ahead, back = Ledger(), Ledger()
    entries = [_Entry(call, s.kind, ahead) for s in placed for call in s.forward]
    entries += [_Entry(call, s.kind, back) for s in reversed(placed) for call in s.backward]
    stream.account(entries)
    _issued(stream, chunk, ahead, back)
    return ChunkTimes(ahead, back, stream.weight(chunk.segments))


def computes_weights(op: Op, call: Call) -> bool:
    """Whether a call of a backward computes a weight gradient."""
    return (
        op.family in (Family.GEMM, Family.GROUPED_GEMM)
        and call.phase == "backward"
        and op.attr("layout") == "nt"
    )


def _placed(segments: Sequence[Segment]) -> list[Segment]:
    """Every occurrence of every segment, in the order of the forward."""
    placed = [(place, segment) for segment in segments for place in segment.places]
    return [segment for _, segment in sorted(placed, key=lambda pair: pair[0])]

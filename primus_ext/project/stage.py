"""Price the trace of one rank: seconds of a forward and a backward of each model chunk."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from primus_ext.cost.model import CostModel
from primus_ext.cost.priced import CostError
from primus_ext.project import sharded
from primus_ext.project.ledger import Kind, Ledger, TermName
from primus_ext.trace import (
    Call,
    Collective,
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
}
_KINDS = {
    Family.GEMM: Kind.GEMM,
    Family.GROUPED_GEMM: Kind.GEMM,
    Family.ATTENTION: Kind.ATTENTION,
}
_GROUPS = {"tp": TermName.TENSOR, "cp": TermName.CONTEXT, "ep": TermName.EXPERT,
           "etp": TermName.EXPERT, "tp_ep": TermName.EXPERT, "pp": TermName.P2P,
           "dp": TermName.DATA, "dp_cp": TermName.DATA, "expert_dp": TermName.DATA}  # fmt: skip
_EDGES = (ScopeKind.EMBEDDING, ScopeKind.OUTPUT, ScopeKind.OTHER)
# After one of these an asynchronous collective is waited for.
_HIDES = (Family.GEMM, Family.GROUPED_GEMM, Family.ATTENTION)
_REMOTE = (Family.COLLECTIVE, Family.P2P)


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkTimes:
    """One microbatch through one model chunk."""

    forward: Ledger
    backward: Ledger


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
        return self._cost.collective_seconds(op.collective, self.ranks(op.collective)).seconds

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


class _Stream:
    """Walks calls in order: a compute stream, and what runs beside it.

    Calls that name a stream run there, in order, after what they wait for; collectives of one
    group run one at a time, as one communicator does.  The host is ahead of the device: it issues
    everything in time.  An asynchronous collective that names no stream runs on a stream of its
    own until the next matrix product or attention.
    """

    def __init__(self, pricer: Pricer, ops: Sequence[Op], ledger: Ledger) -> None:
        self._pricer, self._ops, self.ledger = pricer, ops, ledger
        self._time = self._link_free = 0.0
        self._pending: list[tuple[float, TermName]] = []
        self._ends: dict[str, list[float]] = {"": []}
        self._free: dict[str, float] = {}

    def run(self, calls: Sequence[Call], scope: ScopeKind | None) -> None:
        """Account for ``calls``; what is still pending at their end is waited for."""
        for call in calls:
            op = self._ops[call.op]
            if call.stream:
                self._beside(op, call)
                continue
            for stream, behind in call.waits:
                self._reach(self._end(stream, behind))
            if op.family in _REMOTE and op.collective is not None:
                self._communicate(op, op.collective, call, scope)
            else:
                self._compute(op, call, scope)
            self._ends[""].append(self._time)
        self._wait()

    def _end(self, stream: str, behind: int) -> float:
        """When all calls on a stream were done but the last ``behind``."""
        ends = self._ends.get(stream, [])
        return ends[-1 - behind] if behind < len(ends) else 0.0

    def _reach(self, end: float) -> None:
        if end > self._time:
            self.ledger.waited(TermName.DATA, Kind.COMMUNICATION, end - self._time)
            self._time = end

    def _beside(self, op: Op, call: Call) -> None:
        seconds = self._pricer.seconds(call.op)
        start = max([self._end(call.stream, 0), *(self._end(s, b) for s, b in call.waits)])
        if op.collective is not None:
            group = op.collective.group
            start = max(start, self._free.get(group, 0.0))
            self._free[group] = start + seconds
        self.ledger.hidden(TermName.DATA, seconds)
        self._ends.setdefault(call.stream, []).append(start + seconds)

    def _compute(self, op: Op, call: Call, scope: ScopeKind | None) -> None:
        seconds = self._pricer.seconds(call.op)
        kind = _KINDS.get(op.family, Kind.MEMORY)
        self.ledger.work(_compute_term(op, call, scope), kind, seconds)
        self._time += seconds
        if op.family in _HIDES:
            self._wait()

    def _communicate(
        self, op: Op, collective: Collective, call: Call, scope: ScopeKind | None
    ) -> None:
        # a send and the matching receive run at the same time; the receive is what one waits for
        if op.family is Family.P2P and op.name.endswith("send"):
            return
        term = _remote_term(collective, call, scope)
        seconds = self._pricer.seconds(call.op)
        start = max(self._time, self._link_free)
        self._link_free = start + seconds
        if collective.asynchronous or op.family is Family.P2P:
            self.ledger.hidden(term, seconds)
            self._pending.append((self._link_free, term))
            return
        self._wait()
        self.ledger.work(term, Kind.COMMUNICATION, seconds)
        self._time = self._link_free

    def _wait(self) -> None:
        """Wait for everything that runs beside the compute stream."""
        for end, term in self._pending:
            if end > self._time:
                self.ledger.waited(term, Kind.COMMUNICATION, end - self._time)
                self._time = end
        self._pending.clear()


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
    return _GROUPS.get(collective.group, TermName.OTHER)


def _whole_step(pricer: Pricer, trace: RankTrace, microbatches: int) -> StageTimes:
    """A step whose microbatches differ and overlap each other; its mean microbatch.

    Every part runs in its place, forward and then backward, on streams that go on from one
    microbatch to the next, into the optimizer's step and from there into the next first forward.
    """
    chunk = trace.chunks[0]
    recorded = list(chunk.microbatches)
    often = sharded.weights(len(recorded), microbatches)
    if len(often) > len(recorded):
        recorded.insert(1, recorded[1])
    ahead, back, step = Ledger(), Ledger(), Ledger()
    stream = _Stream(pricer, trace.ops, Ledger())
    stream.run(trace.step, None)  # of the step before: what it started may still run
    for microbatch, weight in zip(recorded, often, strict=True):
        if not weight:
            continue
        placed = _in_order(microbatch.segments or chunk.segments)
        for total, parts in ((ahead, placed), (back, placed[::-1])):
            stream.ledger = Ledger()
            for segment in parts:
                calls = segment.forward if total is ahead else segment.backward
                stream.run(calls, segment.kind)
            total.add(stream.ledger, weight / microbatches)
    stream.ledger = step
    stream.run(trace.step, None)
    return StageTimes((ChunkTimes(ahead, back),), step)


def _in_order(segments: Sequence[Segment]) -> list[Segment]:
    """Every occurrence of every segment, in the order of the forward."""
    placed = [(place, segment) for segment in segments for place in segment.places]
    return [segment for _, segment in sorted(placed, key=lambda pair: pair[0])]


def price(cost: CostModel, trace: RankTrace, microbatches: int = 1) -> StageTimes:
    """Seconds of everything that one rank does for a microbatch and for a step.

    Args:
        cost: Prices on the target.
        trace: The rank.
        microbatches: Of a step; where they differ the times are those of the mean one.

    Raises:
        CostError: An op or collective has no price.
        ClusterError: The accelerator lacks a precision that the trace uses.
    """
    pricer = Pricer(cost, trace)
    if trace.chunks[0].microbatches:
        return _whole_step(pricer, trace, microbatches)
    chunks = []
    for chunk in trace.chunks:
        ahead, back = Ledger(), Ledger()
        for segment in chunk.segments:
            for total, calls in ((ahead, segment.forward), (back, segment.backward)):
                one = Ledger()
                _Stream(pricer, trace.ops, one).run(calls, segment.kind)
                total.add(one, segment.count)
        chunks.append(ChunkTimes(ahead, back))
    step = Ledger()
    _Stream(pricer, trace.ops, step).run(trace.step, None)
    return StageTimes(tuple(chunks), step)

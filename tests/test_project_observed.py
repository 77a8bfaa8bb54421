"""Measured durations in the place of modelled ones: exact ratios on traces made by arithmetic."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primus_ext.cluster import Cluster
from primus_ext.cluster_data import load_cluster
from primus_ext.cost.model import CostModel
from primus_ext.measurement import (
    ChunkSamples,
    KernelTime,
    PartSamples,
    RankMeasurement,
    Samples,
    merged,
)
from primus_ext.project import anchored, compose, stage
from primus_ext.project.kept import Kept
from primus_ext.project.observed import Measured, MeasurementError
from primus_ext.trace import RankTrace, ScopeKind
from tests import synthetic

JOB = synthetic.Job(tp=2, pp=2, dp=2, layers=8)
COMMUNICATION = ("tensor-parallel communication", "data-parallel communication", "pipeline p2p")


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return load_cluster("h100", 1, 8)


def measurement(trace: RankTrace, cluster: Cluster, times: float) -> RankMeasurement:
    """What a device would show whose every op takes so many times what the model says of it."""
    own = stage._Stream(CostModel(cluster), trace).own

    def samples(seconds: float) -> Samples:
        return Samples((times * seconds,) * 5)

    chunks = []
    for chunk in trace.chunks:
        placed = sorted((place, i) for i, s in enumerate(chunk.segments) for place in s.places)
        order = [chunk.segments[i] for _, i in placed] or [
            s for s in chunk.segments for _ in range(s.count)
        ]
        parts = tuple(
            PartSamples(kind=s.kind, name=f"{s.name}.{n}", forward=samples(own(s.forward)),
                        backward=samples(own(s.backward)))
            for n, s in enumerate(order)
        )  # fmt: skip
        chunks.append(ChunkSamples(vpp_stage=chunk.vpp_stage, parts=parts))
    zero = Samples((0.0,) * 5)
    return RankMeasurement(
        rank=trace.rank, pp_ranks=trace.pp_ranks, device="H100", beside=1, microbatches=4, steps=5,
        chunks=tuple(chunks), step={"optimizer": samples(own(trace.step)), "between": zero},
        answers=zero, whole=samples(1.0), warm_up=3,
    )  # fmt: skip


def measured(traces: list[RankTrace], cluster: Cluster, times: float) -> Measured:
    ranks = tuple(measurement(trace, cluster, times) for trace in traces)
    return Measured(ranks=ranks, accelerator="h100")


def test_a_device_that_is_as_modelled_changes_no_term(cluster: Cluster):
    """The host's time alone is another one: what was measured holds it already."""
    plan, traces = synthetic.plan(JOB), synthetic.traces(JOB)
    alone = compose.project(plan, traces, cluster, mode="simulate")
    found = compose.project(
        plan, traces, cluster, mode="measure", measured=measured(traces, cluster, 1.0)
    )
    modelled = {term.term: term.exposed_seconds for term in alone.breakdown}
    for term in found.breakdown:
        if term.term not in ("waiting for the host", "pipeline bubble"):
            assert term.exposed_seconds == pytest.approx(modelled[term.term], rel=1e-9), term.term
    assert sum(t.exposed_seconds for t in found.breakdown) == found.throughput.step_s


@settings(max_examples=20, deadline=None)
@given(times=st.floats(0.3, 4.0))
def test_own_work_lasts_as_measured_and_communication_as_modelled(times: float):
    cluster = load_cluster("h100", 1, 8)
    job = dataclasses.replace(JOB, overlap=False)
    plan, traces = synthetic.plan(job), synthetic.traces(job)
    once, often = (
        compose.project(plan, traces, cluster, mode="measure",
                        measured=measured(traces, cluster, t))
        for t in (1.0, times)
    )  # fmt: skip
    for one, other in zip(once.breakdown, often.breakdown, strict=True):
        if one.term in COMMUNICATION:
            assert other.seconds == pytest.approx(one.seconds, rel=1e-9)
            assert not other.evidence.startswith("measured")
        elif one.term != "pipeline bubble":
            assert other.seconds == pytest.approx(times * one.seconds, rel=1e-9)
            assert other.evidence.startswith("measured: median of 5 steps on H100")


def test_a_measurement_is_carried_to_another_target_by_the_model(cluster: Cluster):
    """Twice as slow as modelled on one device is twice as slow as modelled on the other."""
    plan, traces = synthetic.plan(JOB), synthetic.traces(JOB)
    other = load_cluster("h200", 1, 8)
    seen = dataclasses.replace(measured(traces, cluster, 2.0), device=cluster)
    modelled = {
        t.term: t.seconds
        for t in compose.project(plan, traces, other, mode="simulate").breakdown
    }
    found = compose.project(plan, traces, other, mode="measure", measured=seen)
    for term in found.breakdown:
        if term.term in ("gemm", "attention", "memory-bound"):
            assert term.seconds == pytest.approx(2.0 * modelled[term.term], rel=1e-9)
            assert "by the model to the target" in term.evidence


def test_fewer_layers_stand_for_all_of_their_kind(cluster: Cluster):
    traces = synthetic.traces(JOB)
    whole = measurement(traces[0], cluster, 1.7)
    layers = [p for p in whole.chunks[0].parts if p.kind is ScopeKind.DENSE_LAYER]
    others = [p for p in whole.chunks[0].parts if p.kind is not ScopeKind.DENSE_LAYER]
    short = dataclasses.replace(whole.chunks[0], parts=(*others, layers[0]))
    one = dataclasses.replace(whole, chunks=(short,))
    cost = CostModel(cluster)
    assert stage.observe(cost, traces[0], one) == stage.observe(cost, traces[0], whole)


def test_measurements_of_other_ranks_are_refused(cluster: Cluster):
    traces = synthetic.traces(JOB)
    first = measurement(traces[0], cluster, 1.0)
    plan = synthetic.plan(JOB)
    with pytest.raises(MeasurementError, match="pipeline rank 1 was not measured"):
        compose.project(plan, traces, cluster, mode="measure",
                        measured=Measured(ranks=(first,), accelerator="h100"))  # fmt: skip
    chunk = first.chunks[0]
    bare = dataclasses.replace(chunk, parts=tuple(
        part for part in chunk.parts if part.kind is not ScopeKind.DENSE_LAYER
    ))  # fmt: skip
    with pytest.raises(MeasurementError, match="no part of kind dense_layer"):
        stage.observe(CostModel(cluster), traces[0], dataclasses.replace(first, chunks=(bare,)))


def test_samples_of_copies_count_together():
    def of(*seconds: float) -> RankMeasurement:
        part = PartSamples(kind=ScopeKind.OTHER, name="", forward=Samples(seconds),
                           backward=Samples(seconds))  # fmt: skip
        return RankMeasurement(
            rank=0, pp_ranks=(0,), device="cpu", beside=2, microbatches=1, steps=3, warm_up=1,
            chunks=(ChunkSamples(vpp_stage=0, parts=(part,)),),
            step={"zero": Samples(seconds)}, answers=Samples((0.5,) * len(seconds)),
            whole=Samples(tuple(3 * s for s in seconds)),
            kernels=(KernelTime(name="mm", calls=2, seconds=1.5),),
        )  # fmt: skip

    (both,) = merged([of(1.0, 2.0, 3.0), of(3.0, 4.0, 5.0)])
    assert both.chunks[0].forward.median == 3.0 and both.once.median == 3.0
    assert both.own.seconds == (2.5, 5.5, 8.5, 8.5, 11.5, 14.5)
    assert both.unattributed == pytest.approx(1 - 1.5 / 9.0)
    assert both.spread == pytest.approx((12.25 - 4.75) / 8.5)


def test_memory_beyond_the_projection_becomes_reserve(cluster: Cluster):
    plan, traces = synthetic.plan(JOB), synthetic.traces(JOB)
    shape = compose.schedule_shape(plan)
    judged = compose.memory.verdict(plan, traces, cluster, shape, Kept(cluster))
    role = dataclasses.replace(judged.per_role[0], allocated_bytes=10**9, allocator_bytes=2 * 10**9)
    seen = dataclasses.replace(
        measurement(traces[0], cluster, 1.0),
        allocated_bytes=10**9 + 300, reserved_bytes=2 * 10**9 + 700,
    )  # fmt: skip
    basis = Measured(ranks=(seen,), accelerator="h100")
    (found,), notes = anchored.roles([role], [traces[0]], basis)
    assert found.parts.reserve == role.parts.reserve + 300
    assert found.parts.total == found.peak_bytes == role.peak_bytes + 300
    assert found.reserved_bytes == role.reserved_bytes + 700
    assert "1,000,000,300 bytes were allocated when it was measured" in notes[0]
    less = dataclasses.replace(seen, allocated_bytes=10**9 - 300, reserved_bytes=10**9)
    (same,), quiet = anchored.roles(
        [role], [traces[0]], dataclasses.replace(basis, ranks=(less,))
    )
    assert same == role and not quiet

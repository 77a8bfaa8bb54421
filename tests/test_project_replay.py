"""Replayed allocations: the same highest moment as the schedule's arithmetic, nothing lost."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primus_ext.cluster_data import load_cluster
from primus_ext.project import inflight, memory, tight
from primus_ext.project.allocator_config import AllocatorConfig, parse
from primus_ext.project.footprint import Replayed, enough, footprint
from primus_ext.project.programs import Shape
from primus_ext.project.recorded import Recorded
from primus_ext.project.replay import Replay, highest
from primus_ext.project.schedule import programs
from primus_ext.trace import (
    AllocationKind,
    ChunkEvents,
    ChunkMemory,
    ChunkTrace,
    RankTrace,
    StaticEvents,
    StaticMemory,
)
from tests import synthetic
from tests.synthetic import Job, plan

MIB = 2**20
UNIT = 3 * MIB
"""Every activation that crosses a boundary."""
WORK = 3 * UNIT
"""More than the exchanges of a stage: these alone are not a moment that inflight looks at."""
BUILT = 2
"""MiB that the setup needs for a while."""
STATIC = {"parameters": 7, "gradients": 14, "optimizer": 21, "workspaces": 5}


class Writer:
    """Writes events as the recorder does."""

    def __init__(self, kinds: list[AllocationKind]) -> None:
        self.kinds, self.events, self.count = kinds, [], 0

    def make(self, size: int, phase: str, module: str = "") -> int:
        kind = AllocationKind(bytes=size, op="op", module=module, phase=phase)
        if kind not in self.kinds:
            self.kinds.append(kind)
        self.events.append(self.kinds.index(kind))
        self.count += 1
        return self.count - 1

    def free(self, number: int) -> None:
        self.events.append(-number - 1)


def chunk(
    kinds: list[AllocationKind], layers: list[int], first: bool, last: bool
) -> tuple[ChunkEvents, ChunkMemory]:
    """Each layer saves some MiB and needs ``WORK`` more while it runs; outputs are one unit.

    The memory is added up here, not taken from the events.
    """
    log = Writer(kinds)
    received = -1 if first else log.make(UNIT, "forward")
    saved, held = [], 0 if first else UNIT
    forward_peak = backward_peak = held
    for size in layers:
        work = log.make(WORK, "forward", "layer.work")
        saved.append(log.make(size * MIB, "forward", "layer.saved"))
        forward_peak = max(forward_peak, held + WORK + size * MIB)
        held += size * MIB
        log.free(work)
    output = -1
    if not last:
        output = log.make(UNIT, "forward")
        forward_peak = max(forward_peak, held + UNIT)
        log.free(output)
    forward = tuple(log.events)
    log.events = []
    kept = held
    gradient = -1 if last else log.make(UNIT, "backward")
    live = held + (0 if last else UNIT)
    backward_peak = max(backward_peak, live)
    for size, number in zip(reversed(layers), reversed(saved), strict=True):
        work = log.make(WORK, "backward")
        backward_peak = max(backward_peak, live + WORK)
        log.free(number)
        log.free(work)
        live -= size * MIB
    sent = -1
    if not first:
        sent = log.make(UNIT, "backward")
        backward_peak = max(backward_peak, live + UNIT)
    events = ChunkEvents(
        forward=forward, backward=tuple(log.events), received=received, output=output,
        gradient=gradient, input_gradient=sent,
    )  # fmt: skip
    return events, ChunkMemory(kept, forward_peak, backward_peak)


def stage(shape: Shape, rank: int, layers: list[list[int]]) -> RankTrace:
    """One rank whose chunks save ``layers`` MiB."""
    kinds: list[AllocationKind] = []
    setup = Writer(kinds)
    built = setup.make(BUILT * MIB, "setup")
    for part in ("parameters", "gradients"):
        setup.make(STATIC[part] * MIB, part)
    setup.free(built)
    made = len(setup.events)
    for _ in range(3):
        setup.make(STATIC["optimizer"] // 3 * MIB, "optimizer")
    step = Writer(kinds)
    step.free(step.make(MIB, "step"))
    late = Writer(kinds)
    late.make(STATIC["workspaces"] * MIB, "workspaces")
    chunks = []
    for index in range(shape.vpp):
        number = index * shape.pp + rank
        last = number == shape.stages - 1
        events, memory = chunk(kinds, layers[index], number == 0, last)
        chunks.append(
            ChunkTrace(
                vpp_stage=index, segments=(), memory=memory,
                boundary_bytes=0 if last else UNIT, events=events,
            )
        )  # fmt: skip
    sizes = {part: size * MIB for part, size in STATIC.items()}
    return RankTrace(
        rank=rank, pp_ranks=(rank,), groups={}, ops=(), chunks=tuple(chunks), step=(), buckets=(),
        parameters=0, global_parameters=0, active_parameters=0,
        static=StaticMemory(**sizes, step_peak_bytes=MIB),
        allocations=tuple(kinds),
        static_events=StaticEvents(
            setup=tuple(setup.events[:made]), late_workspaces=tuple(late.events),
            first_step=tuple(setup.events[made:]), step=tuple(step.events),
        ),
    )  # fmt: skip


@st.composite
def ranks(draw: st.DrawFn) -> tuple[Shape, int, RankTrace]:
    pp = draw(st.integers(1, 5))
    vpp = draw(st.integers(1, 3)) if pp > 1 else 1
    microbatches = pp * draw(st.integers(1, 5)) if vpp > 1 else draw(st.integers(1, 14))
    shape = Shape(pp=pp, vpp=vpp, microbatches=microbatches)
    layers = draw(
        st.lists(st.lists(st.integers(12, 40), min_size=1, max_size=3), min_size=vpp, max_size=vpp)
    )
    rank = draw(st.integers(0, pp - 1))
    return shape, rank, stage(shape, rank, layers)


def expected(shape: Shape, rank: int, trace: RankTrace) -> int:
    """The peak as ``project/inflight.py`` adds it up."""
    sizes = [UNIT] * (shape.stages - 1)
    chunks = [c.memory for c in trace.chunks]
    moment = inflight.peak(shape, programs(shape)[rank], rank, chunks, sizes)
    inputs = sum(chunk * shape.pp + rank > 0 for chunk in range(shape.vpp))
    step = MIB + 2 * inputs * UNIT  # a chunk keeps its last input, and that input's gradient
    return sum(STATIC.values()) * MIB + max(moment.total, step)


@given(drawn=ranks())
@settings(max_examples=80, deadline=None)
def test_the_replayed_peak_is_the_composed_one(drawn: tuple[Shape, int, RankTrace]) -> None:
    shape, rank, trace = drawn
    sizes = [UNIT] * (shape.stages - 1)
    short = enough(inflight.steady(shape), rank)
    replay = Replay(trace, rank, short, programs(short)[rank], sizes)
    assert highest(replay, 3) == expected(shape, rank, trace)


@given(drawn=ranks(), text=st.sampled_from(["", "expandable_segments:True"]))
@settings(max_examples=40, deadline=None)
def test_a_footprint_holds_the_tensors(
    drawn: tuple[Shape, int, RankTrace], text: str
) -> None:
    shape, rank, trace = drawn
    sizes = [UNIT] * (shape.stages - 1)
    asked = Replayed(trace, rank, inflight.steady(shape), sizes, parse(text))
    found = footprint(asked)
    peak = expected(shape, rank, trace)
    assert found.reserved_bytes >= found.allocated_bytes >= peak
    assert found == footprint(asked)
    highest_point = max(sum(point[1:]) for point in found.timeline.points)
    assert highest_point == peak
    assert len(found.timeline.points) <= 2000
    positions = [point[0] for point in found.timeline.points]
    assert positions == sorted(positions)
    assert 0 < positions[0] <= positions[-1] <= len(found.timeline.pieces)
    top = found.top_allocations
    assert len(top) <= 20
    weights = [a.bytes * a.count for a in top]
    assert weights == sorted(weights, reverse=True)
    if len(top) < 20:
        assert sum(weights) == peak


@given(drawn=ranks())
@settings(max_examples=40, deadline=None)
def test_every_step_ends_as_it_began(drawn: tuple[Shape, int, RankTrace]) -> None:
    shape, rank, trace = drawn
    sizes = [UNIT] * (shape.stages - 1)
    replay = Replay(trace, rank, shape, programs(shape)[rank], sizes)
    made, live = 0, set()
    pieces = [replay.setup(), *replay.step(first=True)]
    ends = []
    for number in range(3):
        for piece in pieces:
            for event in piece.events:
                if event >= 0:
                    live.add(made)
                    made += 1
                else:
                    live.remove(-event - 1)
        ends.append(len(live))
        if number < 2:
            pieces = list(replay.step(first=False))
    assert ends[1] == ends[2] == ends[0]


def test_blas_workspaces_are_allocated_but_are_no_tensors() -> None:
    shape = Shape(pp=1, microbatches=2)
    trace = stage(shape, 0, [[4]])
    asked = Replayed(trace, 0, shape, [], AllocatorConfig())
    without = footprint(asked)
    found = footprint(dataclasses.replace(asked, workspaces=(32 * MIB, 32 * MIB)))
    assert found.allocated_bytes - without.allocated_bytes == 64 * MIB


def test_a_later_microbatch_replaces_what_a_module_remembers() -> None:
    shape = Shape(pp=1, microbatches=3)
    trace = stage(shape, 0, [[4]])
    one = trace.chunks[0]
    assert one.events is not None
    remembered = AllocationKind(bytes=2 * MIB, op="op", module="router", phase="forward")
    kept = dataclasses.replace(
        one.events, forward=(*one.events.forward, len(trace.allocations)),
        backward=tuple(e if e >= -2 else e - 1 for e in one.events.backward), kept=(2,),
    )  # fmt: skip
    changed = dataclasses.replace(
        trace, allocations=(*trace.allocations, remembered),
        chunks=(dataclasses.replace(one, events=kept),),
    )  # fmt: skip
    plain = highest(Replay(trace, 0, shape, programs(shape)[0], []), 4)
    assert highest(Replay(changed, 0, shape, programs(shape)[0], []), 4) == plain + 2 * MIB


@given(drawn=ranks())
@settings(max_examples=25, deadline=None)
def test_a_device_as_large_as_what_is_reserved_is_enough(
    drawn: tuple[Shape, int, RankTrace]
) -> None:
    shape, rank, trace = drawn
    sizes = [UNIT] * (shape.stages - 1)
    asked = Replayed(trace, rank, inflight.steady(shape), sizes, AllocatorConfig())
    found = footprint(asked)
    plain = tight.squeeze(asked, found.reserved_bytes)
    assert (plain.retries, plain.refused) == (0, 0)
    assert plain.reserved_bytes == found.reserved_bytes
    less = tight.squeeze(asked, expected(shape, rank, trace) - 1)
    assert less.refused > 0
    between = found.reserved_bytes - 2 * MIB
    if between >= expected(shape, rank, trace):
        squeezed = tight.squeeze(asked, between)
        assert squeezed.refused or squeezed.reserved_bytes <= between


def test_what_is_said_of_a_rank_at_risk() -> None:
    shape = Shape(pp=1, microbatches=2)
    trace = stage(shape, 0, [[60, 30, 60]])
    asked = Replayed(trace, 0, shape, [], AllocatorConfig())
    peak, reserved = expected(shape, 0, trace), footprint(asked).reserved_bytes
    assert reserved > peak
    said = {
        tight.sentence(dataclasses.replace(asked, config=config), room)
        for room in range(peak, reserved, MIB)
        for config in (AllocatorConfig(), parse("expandable_segments:True"))
    }
    assert any("no room for a request" in text for text in said)
    assert any("it runs" in text for text in said)


def test_a_trace_without_events_is_refused() -> None:
    shape = Shape(pp=1, microbatches=1)
    trace = dataclasses.replace(stage(shape, 0, [[1]]), static_events=None)
    with pytest.raises(ValueError, match="no allocations to replay"):
        Replay(trace, 0, shape, programs(shape)[0], [])


def test_a_replay_that_disagrees_is_left_out_and_said() -> None:
    job = Job(dp=8, microbatches=2)
    shape = Shape(pp=1, microbatches=2)
    good = stage(shape, 0, [[60, 30]])
    one = good.chunks[0]
    other = dataclasses.replace(one.memory, saved_bytes=2**40, backward_peak_bytes=2**40)
    bad = dataclasses.replace(good, chunks=(dataclasses.replace(one, memory=other),))
    cluster = load_cluster("h100", 1, 8)
    right = memory.verdict(plan(job), [good], cluster, shape)
    assert right.notes == () and right.per_role[0].allocator_bytes is not None
    assert right.per_role[0].replayed_bytes == right.per_role[0].peak_bytes
    wrong = memory.verdict(plan(job), [bad], cluster, shape)
    role = wrong.per_role[0]
    assert role.allocator_bytes is None and role.timeline is None
    assert f"replay to {role.replayed_bytes:,} bytes" in wrong.notes[0]


def test_steps_as_recorded_need_no_schedule() -> None:
    """Setup 100 MiB; a step of 60; one of 60 and 80 at once, of which 60 are on a side stream."""
    kinds = (
        AllocationKind(100 * MIB, "aten.empty", "", "parameters"),
        AllocationKind(60 * MIB, "aten.mm", "layer", "forward"),
        AllocationKind(60 * MIB, "c10d.all_gather", "layer", "forward", 1),
        AllocationKind(80 * MIB, "aten.mm", "layer", "backward"),
    )
    steps = ((0,), (1, -2), (2, 3, -4, -3))
    recorded = dataclasses.replace(
        synthetic.trace(Job(), 0), allocations=kinds, recorded_events=steps
    )
    assert highest(Recorded(recorded), 2) == 240 * MIB
    shape, config = Shape(pp=1, microbatches=3), parse("")
    of = Replayed(recorded, 0, shape, [], config, (8 * MIB, 8 * MIB))
    found = footprint(of)
    assert found.tensor_bytes == 256 * MIB == found.allocated_bytes
    # The first step's block of 60 MiB serves neither the other stream nor 80 MiB; 2 x 8 share 20.
    assert found.reserved_bytes == (100 + 20 + 60 + 60 + 80) * MIB
    of = dataclasses.replace(of, workspaces=(0, 0))
    squeezed = tight.squeeze(of, 250 * MIB)
    assert squeezed.refused == 0 and squeezed.retries == 1  # 60 MiB are given back
    assert tight.squeeze(of, 239 * MIB).refused == 80 * MIB

"""Schedules beside the framework's own: published closed forms, and what always holds."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primus_ext.project.compiled import Durations, compiled, spans
from primus_ext.project.programs import (
    BACKWARD,
    FORWARD,
    INPUT,
    PAIR,
    WEIGHT,
    Program,
    ScheduleError,
    Shape,
    Transfers,
)
from primus_ext.project.schedule import Timeline, programs, simulate_repeating, timed
from primus_ext.project.schedules import ALIASES, SCHEDULES, named
from primus_ext.project.schedules.automatic import automatic

FIXED = [name for name, schedule in SCHEDULES.items() if schedule.limit is None]
AUTOMATIC = [name for name, schedule in SCHEDULES.items() if schedule.limit is not None]


def shape_of(name: str, pp: int, microbatches: int, vpp: int = 2) -> Shape:
    schedule = named(name)
    return Shape(pp=pp, vpp=schedule.chunks or vpp, microbatches=microbatches, schedule=name,
                 folded=schedule.folded)  # fmt: skip


def uniform(shape: Shape, f: float = 1.0, b: float = 2.0, w: float = 1.0) -> Durations:
    """Seconds of a whole stage, spread over its chunks."""
    def each(seconds: float) -> list[list[float]]:
        return [[seconds / shape.vpp] * shape.vpp for _ in range(shape.pp)]

    return Durations(forward=each(f), backward=each(b), weight=each(w),
                     boundary=[0.0] * (shape.stages - 1))  # fmt: skip


def made(shape: Shape, durations: Durations) -> list[Program]:
    schedule = named(shape.schedule)
    if schedule.limit is None:
        return programs(shape)
    return automatic(shape, durations, schedule.limit(shape.pp), schedule.build)


def run(shape: Shape, durations: Durations) -> tuple[Timeline, list[Program]]:
    found = made(shape, durations)
    return timed(compiled(shape, found), durations), found


def peak(program: Program, vpp: int) -> float:
    """Most chunks between their forward and their weight gradients, in stages."""
    live = most = 0
    for kind, _, _ in program:
        live += kind in (FORWARD, PAIR)
        most = max(most, live)
        live -= kind in (BACKWARD, WEIGHT, PAIR)
    return most / vpp


# PP 4, 8 microbatches, F = 1, B = 2 of which 1 is for weights.  1F1B: (m + p - 1)(F + B);
# interleaved: m(F + B) + (p - 1)(F + B) / v; ZB-H1: m(F + B) + (p - 1)(F + B - 2W)
# (arXiv 2401.10241, table 1; B is the whole backward); ZBV: the last stage is on the first rank, so
# the last rank starts after p - 1 chunks and never waits; V-half and V-min: what Primus' own
# simulator gives (v26.5.1); DualPipe-V: (p - 1)(F&B + B - 3W) in chunks (their README).
@pytest.mark.parametrize(
    ("name", "makespan", "in_flight"),
    [
        ("1f1b", 33.0, 4.0), ("interleaved", 28.5, 5.5), ("zero-bubble", 27.0, 4.0),
        ("zbv", 25.5, 4.0), ("v-half", 26.5, 3.0), ("v-min", 29.5, 2.0),
        ("zero-bubble-auto", 27.0, 4.0), ("zbv-greedy", 25.5, 4.0), ("dualpipe-v", 27.0, 4.5),
    ],
)  # fmt: skip
def test_equal_stages_take_what_is_published(
    name: str, makespan: float, in_flight: float
) -> None:
    shape = shape_of(name, 4, 8)
    timeline, found = run(shape, uniform(shape))
    assert timeline.makespan == pytest.approx(makespan, abs=1e-9)
    assert max(peak(program, shape.vpp) for program in found) == in_flight


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("groups", [1, 2, 5])
@pytest.mark.parametrize(("f", "b", "w"), [(1.0, 2.0, 1.0), (1.0, 2.25, 1.0), (1.0, 2.5, 0.75)])
def test_zero_bubble_pays_a_bubble_without_weight_gradients(
    pp: int, groups: int, f: float, b: float, w: float
) -> None:
    m = groups * pp
    shape = shape_of("zero-bubble", pp, m)
    timeline, found = run(shape, uniform(shape, f, b, w))
    # ZB-H1 of the paper counts the bubble of the rank that ends last
    assert timeline.makespan == pytest.approx(m * (f + b) + (pp - 1) * (f + b - 2 * w))
    assert {peak(program, 1) for program in found} == {min(m, pp)}


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("m", [16, 19, 40])
@pytest.mark.parametrize("both", [2.25, 2.5, 3.0])
def test_dualpipe_v_has_the_bubble_of_its_authors(pp: int, m: int, both: float) -> None:
    # (PP/2 - 1)(F&B + B - 3W) with PP/2 ranks; W is half of B, as they draw it
    shape = shape_of("dualpipe-v", pp, m)
    durations = dataclasses.replace(
        uniform(shape, 2.0, 4.0, 2.0), pair=[[[both] * 2] * 2 for _ in range(pp)]
    )
    timeline, found = run(shape, durations)
    idle = max(timeline.idle(rank) for rank in range(pp))
    assert idle == pytest.approx((pp - 1) * (both + 2.0 - 3 * 1.0))
    assert max(peak(program, 1) for program in found) == 2 * pp + 1


def test_v_schedules_hold_a_half_and_a_third() -> None:
    for pp in (4, 6, 8, 12):
        for name, most in (("v-half", pp / 2 + 1), ("v-min", pp / 3 + 4 / 3)):
            shape = shape_of(name, pp, 4 * pp)
            assert max(peak(program, 2) for program in programs(shape)) <= most


@st.composite
def cases(draw: st.DrawFn, names: list[str]) -> tuple[Shape, Durations]:
    name, pp = draw(st.sampled_from(names)), draw(st.integers(2, 5))
    schedule = named(name)
    if schedule.chunks:
        least = 2 * pp if name in ("zbv", "zbv-greedy", "dualpipe-v") else 1
        microbatches = draw(st.integers(least, 4 * pp))
    else:
        microbatches = pp * draw(st.integers(1, 4))
    shape = shape_of(name, pp, microbatches, draw(st.integers(2, 3)))
    time = st.floats(0.01, 10.0)

    def table() -> list[list[float]]:
        return [[draw(time) for _ in range(shape.vpp)] for _ in range(pp)]

    forward, inputs, weight = table(), table(), table()
    backward = [[a + b for a, b in zip(*pair, strict=True)]
                for pair in zip(inputs, weight, strict=True)]  # fmt: skip
    pair = [
        [[max(f, b) + 0.5 * min(f, b) for b in backward[r]] for f in forward[r]]
        for r in range(pp)
    ]
    boundary = [draw(st.floats(0, 1)) for _ in range(shape.stages - 1)]
    return shape, Durations(forward=forward, backward=backward, weight=weight, pair=pair,
                            boundary=boundary)  # fmt: skip


Event = tuple[float, float]


def _events(shape: Shape, found: list[Program], durations: Durations):  # noqa: ANN202
    """Start and end of everything by kind, stage and microbatch; a pair counts as both."""
    of = Transfers(shape)
    forwards: dict[tuple[int, int], Event] = {}
    backwards: dict[tuple[int, int], Event] = {}
    weights: dict[tuple[int, int], Event] = {}
    by_rank: list[list[Event]] = [[] for _ in range(shape.pp)]
    for rank, place, start, end in spans(compiled(shape, found), durations):
        if rank < 0:
            continue
        kind, first, second = found[rank][place]
        by_rank[rank].append((start, end))
        if kind == PAIR:
            parts = [(forwards, first), (backwards, second), (weights, second)]
        elif kind == BACKWARD:
            parts = [(backwards, (first, second)), (weights, (first, second))]
        else:
            into = {FORWARD: forwards, INPUT: backwards, WEIGHT: weights}[kind]
            parts = [(into, (first, second))]
        for into, (chunk, microbatch) in parts:
            key = of.stage(rank, chunk), microbatch
            assert key not in into, "done twice"
            into[key] = (start, end)
    return forwards, backwards, weights, by_rank


@given(case=cases(list(SCHEDULES)))
@settings(max_examples=80, deadline=None)
def test_nothing_starts_before_its_inputs_and_no_rank_does_two_things(
    case: tuple[Shape, Durations],
) -> None:
    shape, durations = case
    found = made(shape, durations)
    forwards, backwards, weights, by_rank = _events(shape, found, durations)
    everything = shape.stages * shape.microbatches
    assert len(forwards) == len(backwards) == len(weights) == everything
    last, turn = shape.stages - 1, shape.pp - 1 if shape.folded else -1
    for (stage, microbatch), (start, _) in forwards.items():
        if stage:
            hop = 0.0 if stage - 1 == turn else durations.boundary[stage - 1]
            assert start >= forwards[stage - 1, microbatch][1] + hop - 1e-9
    for (stage, microbatch), (start, _) in backwards.items():
        assert start >= forwards[stage, microbatch][1] - 1e-9
        if stage < last:
            hop = 0.0 if stage == turn else durations.boundary[stage]
            assert start >= backwards[stage + 1, microbatch][1] + hop - 1e-9
    for key, (start, end) in weights.items():
        assert start >= backwards[key][1] - 1e-9 or (start, end) == backwards[key]
    for events in by_rank:
        events.sort()
        for (_, end), (start, _) in zip(events, events[1:], strict=False):
            assert start >= end - 1e-9


@given(case=cases(list(SCHEDULES)))
@settings(max_examples=60, deadline=None)
def test_memory_bounds_are_kept(case: tuple[Shape, Durations]) -> None:
    shape, durations = case
    pp, group = shape.pp, shape.group_size * (shape.vpp - 1)
    bounds = {
        "1f1b": pp, "zero-bubble": pp, "zero-bubble-auto": pp, "zero-bubble-2p": 2 * pp - 1,
        "zbv": 2 * pp, "zbv-greedy": 2 * pp, "dualpipe-v": 2 * pp + 1,
        "v-half": pp + 2, "v-min": 2 * (pp + 4) / 3,
        "interleaved": 2 * (pp - 1) + group + 1, "combined-1f1b": 2 * (pp - 1) + group + 2,
    }  # fmt: skip
    for program in made(shape, durations):
        assert peak(program, 1) <= bounds[shape.schedule]


@given(case=cases(AUTOMATIC))
@settings(max_examples=25, deadline=None)
def test_an_automatic_schedule_is_never_slower_than_the_fixed_one(
    case: tuple[Shape, Durations],
) -> None:
    shape, durations = case
    timeline, _ = run(shape, durations)
    build = named(shape.schedule).build
    fixed = compiled(shape, [build(shape, rank) for rank in range(shape.pp)])
    assert timeline.makespan <= timed(fixed, durations).makespan + 1e-9


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("pp", [2, 4])
def test_a_long_step_ends_where_all_of_it_would(name: str, pp: int) -> None:
    shape = shape_of(name, pp, 32 * pp)
    plain = uniform(shape)
    slower = [[1.0 + 0.1 * ((3 * rank + chunk) % 4) for chunk in range(shape.vpp)]
              for rank in range(pp)]  # fmt: skip
    durations = dataclasses.replace(
        plain, forward=slower, boundary=[0.03] * (shape.stages - 1),
        pair=[[[2.5] * shape.vpp] * shape.vpp for _ in range(pp)],
    )  # fmt: skip
    full = timed(compiled(shape, programs(shape)), durations)
    code, timeline = simulate_repeating(
        shape, durations.forward, durations.backward, durations.boundary, None,
        durations.weight, durations.pair, long=12,
    )  # fmt: skip
    assert code.shape.microbatches < shape.microbatches
    assert timeline.makespan == pytest.approx(full.makespan, rel=1e-9)
    assert timeline.busy == pytest.approx(full.busy, rel=1e-9)
    assert timeline.p2p == pytest.approx(full.p2p, rel=1e-6, abs=1e-9)


def test_an_automatic_schedule_uses_the_memory_that_it_is_given() -> None:
    small, large = (shape_of(f"zero-bubble-{kind}", 4, 16) for kind in ("auto", "2p"))
    durations = dataclasses.replace(uniform(small), boundary=[0.2] * 3)
    assert run(large, durations)[0].makespan < run(small, durations)[0].makespan


@pytest.mark.parametrize(
    ("name", "microbatches", "words"),
    [
        ("zbv", 6, ["6 microbatches", "zbv", "7"]),
        ("dualpipe-v", 7, ["7 microbatches", "dualpipe-v", "8"]),
        ("combined-1f1b", 3, ["3 microbatches"]),
    ],
)
def test_too_few_microbatches_are_refused(
    name: str, microbatches: int, words: list[str]
) -> None:
    with pytest.raises(ScheduleError) as refused:
        programs(shape_of(name, 4, microbatches))
    assert all(word in str(refused.value) for word in words)


def test_combined_needs_chunks_in_a_pipeline_and_none_without() -> None:
    with pytest.raises(ScheduleError, match="vpp=1"):
        programs(shape_of("combined-1f1b", 4, 8, vpp=1))
    alone = Shape(pp=1, vpp=1, microbatches=4, schedule="combined-1f1b")
    durations = dataclasses.replace(uniform(alone), pair=[[[2.25]]])
    # a forward, three pairs, a backward
    assert run(alone, durations)[0].makespan == pytest.approx(1 + 3 * 2.25 + 2)


def test_every_name_means_something() -> None:
    for name, meant in ALIASES.items():
        assert named(name) is SCHEDULES[meant]
    with pytest.raises(ScheduleError, match="schedule=gpipe is unknown; legal: all, 1f1b"):
        named("gpipe")
    assert all(schedule.offered_by for schedule in SCHEDULES.values())

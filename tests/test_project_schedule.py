"""Schedules against closed forms, properties, and Megatron's own functions."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primus_ext.project.interleaved import order, warmup_forwards
from primus_ext.project.programs import (
    BACKWARD,
    FORWARD,
    PAIR,
    TRANSFER,
    Program,
    ScheduleError,
    Shape,
)
from primus_ext.project.schedule import LONG, Timeline, programs, simulate, simulate_repeating


def run(shape: Shape, f: float = 1.0, b: float = 2.0, p2p: float = 0.0) -> Timeline:
    forward = [[f] * shape.vpp for _ in range(shape.pp)]
    backward = [[b] * shape.vpp for _ in range(shape.pp)]
    return simulate(shape, programs(shape), forward, backward, [p2p] * (shape.stages - 1))


def work(program: Program) -> list[tuple[int, int, int]]:
    return [item for item in program if item[0] != TRANSFER]


def in_flight(program: Program) -> int:
    """Most microbatches (times chunks) that wait for their backward."""
    live = most = 0
    for kind, _, _ in work(program):
        live += 1 if kind == FORWARD else -1
        most = max(most, live)
    return most


SHAPES = st.builds(
    lambda pp, vpp, groups, rest, overlap: Shape(
        pp=pp, vpp=vpp if pp > 1 else 1,
        microbatches=pp * groups + (rest if vpp == 1 or pp == 1 else 0), overlap_p2p=overlap,
    ),
    pp=st.integers(1, 6), vpp=st.integers(1, 4), groups=st.integers(1, 4), rest=st.integers(0, 5),
    overlap=st.booleans(),
)  # fmt: skip
TIMES = st.floats(0.01, 10.0)


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 8, 32])
def test_equal_stages_take_m_plus_p_minus_1_slots(pp: int, microbatches: int) -> None:
    shape = Shape(pp=pp, microbatches=microbatches)
    assert run(shape).makespan == pytest.approx((microbatches + pp - 1) * 3.0)


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("vpp", [2, 3, 5])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("overlap", [False, True])
def test_interleaving_divides_the_bubble_by_the_chunks(
    pp: int, vpp: int, groups: int, overlap: bool
) -> None:
    shape = Shape(pp=pp, vpp=vpp, microbatches=pp * groups, overlap_p2p=overlap)
    timeline = run(shape, 1 / vpp, 2 / vpp)
    ideal = shape.microbatches * 3.0
    assert timeline.makespan / ideal - 1 == pytest.approx((pp - 1) / (vpp * shape.microbatches))


def test_the_slowest_stage_sets_the_pace() -> None:
    shape = Shape(pp=4, microbatches=100)
    forward, backward = [[1.0], [1.0], [1.5], [1.0]], [[2.0], [2.0], [3.0], [2.0]]
    timeline = simulate(shape, programs(shape), forward, backward, [0.0] * 3)
    # The slow stage waits 2 for the first forward to reach it; its second forward ends at 5, the
    # first gradient comes at 2 + 1.5 + 1 + 2 = 6.5; at the end two backwards of 2 are left.
    assert timeline.makespan == pytest.approx(2 + 100 * 4.5 + 1.5 + 2 * 2.0)
    assert timeline.idle(2) == pytest.approx(timeline.makespan - 450)


def test_transfers_are_exposed_once_a_direction_and_hop_when_few_microbatches_run() -> None:
    shape = Shape(pp=4, microbatches=1)
    assert run(shape, p2p=0.1).makespan == pytest.approx(4 * 3 + 2 * 3 * 0.1)


def test_overlapped_transfers_cost_less() -> None:
    plain = Shape(pp=4, vpp=4, microbatches=32)
    beside = Shape(pp=4, vpp=4, microbatches=32, overlap_p2p=True)
    assert run(beside, p2p=0.2).makespan < run(plain, p2p=0.2).makespan
    assert run(beside, p2p=0.2).makespan > run(beside).makespan


@given(shape=SHAPES, data=st.data())
@settings(max_examples=150, deadline=None)
def test_makespan_is_bounded_and_all_work_is_done(shape: Shape, data: st.DataObject) -> None:
    forward = [[data.draw(TIMES) for _ in range(shape.vpp)] for _ in range(shape.pp)]
    backward = [[data.draw(TIMES) for _ in range(shape.vpp)] for _ in range(shape.pp)]
    p2p = data.draw(st.floats(0, 1))
    boundary = [p2p] * (shape.stages - 1)
    timeline = simulate(shape, programs(shape), forward, backward, boundary)
    m = shape.microbatches
    for rank in range(shape.pp):
        busy = m * (sum(forward[rank]) + sum(backward[rank]))
        assert timeline.busy[rank] == pytest.approx(busy)
        assert timeline.makespan >= busy * (1 - 1e-12)
        assert timeline.idle(rank) >= -1e-9 * timeline.makespan
        assert len(timeline.backward_ends[rank]) == m * shape.vpp
    path = sum(map(sum, forward)) + sum(map(sum, backward)) + 2 * p2p * (shape.stages - 1)
    assert timeline.makespan >= path * (1 - 1e-12)
    serial = m * (sum(map(sum, forward)) + sum(map(sum, backward)) + 2 * p2p * shape.stages)
    assert timeline.makespan <= serial * (1 + 1e-12)


@given(shape=SHAPES)
@settings(max_examples=150, deadline=None)
def test_programs_match_sends_with_receives_and_respect_the_data(shape: Shape) -> None:
    posted: dict[int, int] = {}
    for rank, program in enumerate(programs(shape)):
        done, live = set(), set()
        for kind, first, second in program:
            if kind == TRANSFER:
                assert set(first) or set(second)
                for transfer in first:
                    posted[transfer] = posted.get(transfer, 0) + 1
            elif kind == FORWARD:
                live.add((first, second))
            else:
                live.remove((first, second))
                done.add((first, second))
        assert len(done) == shape.microbatches * shape.vpp and not live, rank
    assert set(posted.values()) <= {2}
    assert len(posted) == 2 * shape.microbatches * (shape.stages - 1)


@given(pp=st.integers(1, 12), microbatches=st.integers(1, 40))
def test_in_flight_of_1f1b_is_min_m_p_minus_r(pp: int, microbatches: int) -> None:
    for rank, program in enumerate(programs(Shape(pp=pp, microbatches=microbatches))):
        assert in_flight(program) == min(microbatches, pp - rank)


CASES = [(2, 2, 4, 0), (4, 3, 16, 0), (4, 2, 11, 7), (8, 4, 24, 0), (2, 5, 6, 3), (4, 2, 4, 0)]
# In a process of its own: without the stand-in of Transformer Engine's extension, Megatron can be
# imported only where Transformer Engine can't, and what it then holds itself to be must not leak.
MEGATRON = """
import json, sys
sys.modules["transformer_engine"] = None
from megatron.core.pipeline_parallel import schedules
class Group:
    def __init__(self, size, rank): self.size, self.rank = (lambda: size), (lambda: rank)
class Communicator:
    def __init__(self, pp, vpp, rank):
        self.pp_group, self.virtual_pipeline_model_parallel_size = Group(pp, rank), vpp
found = []
for pp, vpp, microbatches, group in json.loads(sys.argv[1]):
    group = group or pp
    counts, combined = [[schedules.get_pp_rank_microbatches(
        microbatches, vpp, group, p2p_communicator=Communicator(pp, vpp, rank),
        overlap_moe_expert_parallel_comm=beside) for rank in range(pp)]
        for beside in (False, True)]
    found.append([schedules.get_schedule_table(microbatches, vpp, group), counts, combined])
print("FOUND" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def megatron() -> list[list[list]]:
    """What Megatron's own functions say of each case: its table, and counts of every rank."""
    done = subprocess.run(
        [sys.executable, "-c", MEGATRON, json.dumps(CASES)], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.partition("FOUND")[2])


@pytest.mark.parametrize("case", range(len(CASES)))
def test_warm_up_and_order_are_those_of_megatron(case: int, megatron: list[list[list]]) -> None:
    pp, vpp, microbatches, group = CASES[case]
    table, counts, _ = megatron[case]
    shape = Shape(pp=pp, vpp=vpp, microbatches=microbatches, group=group)
    assert order(shape) == [tuple(pair) for pair in table]
    for rank, program in enumerate(programs(shape)):
        total, all_warmup, warmup, rest = counts[rank]
        assert warmup_forwards(shape, rank) == warmup
        kinds = [kind for kind, _, _ in work(program)]
        assert kinds[:warmup] == [FORWARD] * warmup
        assert kinds[warmup:] == [FORWARD, BACKWARD] * rest + [BACKWARD] * warmup
        assert len(kinds) == 2 * total and all_warmup == (rest == 0)
        # the steady state holds what is warm and one more
        assert in_flight(program) == min(total, warmup + 1)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_combined_1f1b_warms_up_as_megatron_says(case: int, megatron: list[list[list]]) -> None:
    pp, vpp, microbatches, group = CASES[case]
    shape = Shape(pp=pp, vpp=vpp, microbatches=microbatches, group=group,
                  schedule="combined-1f1b")  # fmt: skip
    for rank, program in enumerate(programs(shape)):
        _, _, warmup, rest = megatron[case][2][rank]
        kinds = [kind for kind, _, _ in work(program)]
        assert kinds == [FORWARD] * warmup + [PAIR] * rest + [BACKWARD] * warmup


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (Shape(pp=4, vpp=2, microbatches=3), ["microbatch_group_size_per_vp_stage=4", "3"]),
        (Shape(pp=4, vpp=2, microbatches=6), ["6 microbatches", "2 left over", "pp=4"]),
        (Shape(pp=4, vpp=2, microbatches=8, group=2), ["microbatch_group_size_per_vp_stage=2"]),
        (Shape(pp=4, microbatches=0), ["microbatches=0", "positive"]),
    ],
)
def test_what_megatron_refuses_is_refused(shape: Shape, words: list[str]) -> None:
    with pytest.raises(ScheduleError) as refused:
        programs(shape)
    assert all(word in str(refused.value) for word in words)


def test_a_schedule_that_waits_for_ever_is_an_error() -> None:
    shape = Shape(pp=2, microbatches=1)
    broken = programs(shape)
    broken[1] = work(broken[1])
    with pytest.raises(RuntimeError, match="waits for ever"):
        simulate(shape, broken, [[1.0], [1.0]], [[1.0], [1.0]], [0.0])


@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (2, 1), (4, 1), (4, 2), (2, 3)])
@pytest.mark.parametrize("extra", [0, 1, 5])
def test_a_long_schedule_ends_where_all_of_it_would(pp: int, vpp: int, extra: int) -> None:
    group = pp if vpp > 1 else 1
    shape = Shape(pp=pp, vpp=vpp, microbatches=3 * LONG * pp + extra * group)
    forward = [[1.0 + 0.1 * r + 0.03 * c for c in range(vpp)] for r in range(pp)]
    backward = [[2.0 + 0.07 * ((r * 3 + c) % 4) for c in range(vpp)] for r in range(pp)]
    boundary = [0.05] * (pp * vpp - 1)
    full = simulate(shape, programs(shape), forward, backward, boundary)
    code, timeline = simulate_repeating(shape, forward, backward, boundary)
    assert code.shape.microbatches < shape.microbatches
    assert timeline.makespan == pytest.approx(full.makespan, rel=1e-9)
    assert timeline.busy == pytest.approx(full.busy, rel=1e-9)
    assert timeline.p2p == pytest.approx(full.p2p, rel=1e-6, abs=1e-9)
    for rank in range(pp):
        assert timeline.backward_ends[rank][-1] == pytest.approx(full.backward_ends[rank][-1])


def test_a_billion_microbatches_take_no_longer() -> None:
    shape = Shape(pp=8, microbatches=10**9)
    _, timeline = simulate_repeating(
        shape, [[1.0]] * 8, [[2.0]] * 8, [0.0] * 7
    )
    assert timeline.makespan == pytest.approx((10**9 + 7) * 3.0, rel=1e-9)

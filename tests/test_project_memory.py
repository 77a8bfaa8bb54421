"""Peak memory from schedule and static tensors, with exact sums."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primus_ext.cluster_data import load_cluster
from primus_ext.project import inflight, memory, shortfall
from primus_ext.project.compose import schedule_shape
from primus_ext.project.programs import Shape
from primus_ext.project.result import MemoryParts, RoleMemory
from primus_ext.project.retained import COUNTER
from primus_ext.project.schedule import programs
from primus_ext.trace import AfterBackward, ChunkMemory, FirstMicrobatch, RankTrace
from tests.synthetic import Job, plan, trace, traces

GIB = 2**30


def stages(job: Job) -> list[RankTrace]:
    by_rank = {rank: t for t in traces(job) for rank in t.pp_ranks}
    return [by_rank[rank] for rank in range(job.pp)]


def judged(job: Job, name: str = "h100") -> memory.Memory:
    cluster = load_cluster(name, max(1, job.world // 8), min(8, job.world))
    return memory.verdict(plan(job), stages(job), cluster, schedule_shape(plan(job)))


JOBS = st.builds(
    lambda pp, vpp, groups, recompute: Job(
        pp=pp, vpp=vpp if pp > 1 else 1, dp=8 // pp, microbatches=pp * groups,
        recompute=recompute,
    ),
    pp=st.sampled_from([1, 2, 4, 8]), vpp=st.sampled_from([1, 2, 4]), groups=st.integers(1, 3),
    recompute=st.booleans(),
)  # fmt: skip


@given(job=JOBS)
@settings(max_examples=40, deadline=None)
def test_parts_add_up_and_nothing_is_negative(job: Job) -> None:
    found = judged(job)
    assert len(found.per_role) == job.pp
    assert sum(role.ranks for role in found.per_role) == job.world
    for role in found.per_role:
        parts = dataclasses.asdict(role.parts)
        assert sum(parts.values()) == role.peak_bytes
        assert min(parts.values()) >= 0
        assert role.reserved_bytes > role.peak_bytes
    heaviest = max(found.per_role, key=lambda role: role.reserved_bytes)
    assert found.binding_role == heaviest.role


def test_one_rank_holds_its_tensors_and_one_microbatch() -> None:
    job = Job(dp=8, microbatches=2)
    one = trace(job, 0)
    role = judged(job).per_role[0]
    chunk = one.chunks[0].memory
    static = one.static
    assert role.parts.activations == chunk.saved_bytes
    assert role.parts.temporaries == chunk.backward_peak_bytes - chunk.saved_bytes
    assert role.peak_bytes == (
        static.parameters + static.gradients + static.optimizer + static.workspaces
        + chunk.backward_peak_bytes + COUNTER
    )  # fmt: skip


@pytest.mark.parametrize("microbatches", [1, 2, 3, 16, 200])
def test_1f1b_stage_r_holds_min_m_p_minus_r_microbatches(microbatches: int) -> None:
    job = Job(pp=4, dp=2, microbatches=microbatches)
    for rank, role in enumerate(judged(job).per_role):
        saved = stages(job)[rank].chunks[0].memory.saved_bytes
        assert role.parts.activations == min(microbatches, 4 - rank) * saved
        # The synthetic chunk needs 4 activations more in its backward.  From the second backward
        # on there is also the gradient of the input that the one before left.
        again = rank > 0 and microbatches > 4 - rank
        above = role.parts.temporaries + role.parts.communication - COUNTER
        assert above / job.activation == (5 if again else 4)


def test_interleaving_holds_the_warm_up_and_one_more() -> None:
    # Megatron: 2 (p - r - 1) + (v - 1) p forwards are warm, each of 1/(p v) of the layers
    job = Job(pp=4, vpp=4, dp=2, microbatches=16)
    for rank, role in enumerate(judged(job).per_role):
        saved = stages(job)[rank].chunks[0].memory.saved_bytes
        assert role.parts.activations == (2 * (3 - rank) + 3 * 4 + 1) * saved
        # exchanges carry 1 activation in each direction that is received or not sent yet; a chunk
        # keeps its last input and its gradient
        assert role.parts.communication <= (3 + 2 * 4) * job.activation + COUNTER


def test_the_optimizer_step_binds_when_it_is_higher() -> None:
    job = Job(dp=8, microbatches=1, recompute=True, seq=128)
    one = trace(job, 0)
    step = one.chunks[0].memory.backward_peak_bytes + COUNTER + 7
    high = dataclasses.replace(one, static=dataclasses.replace(one.static, step_peak_bytes=step))
    found = memory.verdict(plan(job), [high], load_cluster("h100", 1, 8), Shape(pp=1,
                           microbatches=1)).per_role[0]  # fmt: skip
    assert (found.parts.activations, found.parts.temporaries) == (0, step)


@given(
    pp=st.integers(2, 6), vpp=st.integers(1, 4), groups=st.integers(1, 9), overlap=st.booleans(),
    rank=st.integers(0, 5), saved=st.integers(1, 1000), sizes=st.integers(0, 50),
    logged=st.integers(0, 30), kept=st.integers(0, 40),
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_a_shorter_schedule_has_the_same_highest_moment(
    pp: int, vpp: int, groups: int, overlap: bool, rank: int, saved: int, sizes: int,
    logged: int, kept: int,
) -> None:  # fmt: skip
    shape = Shape(pp=pp, vpp=vpp, microbatches=pp * groups, overlap_p2p=overlap and vpp > 1)
    rank %= pp
    chunks = [
        ChunkMemory(
            saved + 3 * c + kept, saved + 7 * c + 5 + kept, saved + 11 * c + 9 + kept,
            logged_bytes=logged if c == vpp - 1 else 0, counted_bytes=logged // 3,
            leftover_bytes=kept, forward_peak_after_bytes=saved + 7 * c + 6 + 2 * kept,
            inflight_saved_bytes=saved + 3 * c,
            inflight_forward_peak_bytes=saved + 7 * c + 4 + 2 * kept,
            inflight_backward_peak_bytes=saved + 11 * c + 9,
            first=FirstMicrobatch(kept // 2, saved + 7 * c + 5 + kept, saved + 11 * c + 9, None),
            after_backward=AfterBackward(
                logged, saved + 7 * c + 7, saved + 11 * c + 9 + logged, saved + 11 * c + 10 + kept
            ),
        )
        for c in range(vpp)
    ]  # fmt: skip
    boundary = [sizes] * (shape.stages - 1)
    short = inflight.steady(shape)
    assert short.microbatches <= shape.microbatches
    full = inflight.peak(shape, programs(shape)[rank], rank, chunks, boundary)
    skipped = shape.microbatches - short.microbatches
    less = inflight.peak(short, programs(short)[rank], rank, chunks, boundary, skipped)
    assert less.total == full.total


def moment(chunks: list[ChunkMemory], rank: int, shape: Shape) -> int:
    return inflight.peak(shape, programs(shape)[rank], rank, chunks, [0] * (shape.stages - 1)).total


@pytest.mark.parametrize(("rank", "lower"), [(0, 10), (1, 0)])
def test_copies_that_a_first_backward_makes_are_absent_before_it(rank: int, lower: int) -> None:
    """They are back in the second backward, which in stage 0 has no other microbatch beside it."""
    shape = Shape(pp=2, microbatches=2)
    usual = ChunkMemory(10, 20, 90)
    first = FirstMicrobatch(40, 20, 50, 50)
    found = moment([dataclasses.replace(usual, first=first)], rank, shape)
    assert moment([usual], rank, shape) - found == lower
    one = moment([dataclasses.replace(usual, first=first)], rank, Shape(pp=2, microbatches=1))
    assert found - one == 40


def test_a_graph_that_a_backward_leaves_counts_while_another_chunk_works() -> None:
    """Rank 1 of 2, two chunks: chunk 0 runs two backwards before chunk 1 runs again."""
    shape = Shape(pp=2, vpp=2, microbatches=4, overlap_p2p=True)
    small, big = ChunkMemory(10, 20, 30), ChunkMemory(10, 20, 500)
    left = dataclasses.replace(small, after_backward=AfterBackward(7, 20, 30, 30))
    assert moment([left, big], 1, shape) - moment([small, big], 1, shape) == 7


@given(pp=st.integers(2, 5), vpp=st.integers(1, 3), groups=st.integers(1, 4),
       overlap=st.booleans())  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_every_buffer_is_freed(pp: int, vpp: int, groups: int, overlap: bool) -> None:
    shape = Shape(pp=pp, vpp=vpp, microbatches=pp * groups, overlap_p2p=overlap and vpp > 1)
    for rank, program in enumerate(programs(shape)):
        live = inflight._Live(shape, rank, [1] * (shape.stages - 1))
        for kind, first, second in program:
            if kind == 2:
                live.transfer(first, second)
            else:
                taken, made = live.work(kind == 0, first, second)
                live.buffers += made - taken
            assert live.buffers >= 0
        assert live.buffers == 0


def test_verdicts_follow_the_capacity() -> None:
    job = Job(dp=8, microbatches=1)
    one = trace(job, 0)
    accelerator = load_cluster("h100", 1, 8).accelerator
    peak = sum(dataclasses.astuple(one.static)[:4]) + one.chunks[0].memory.backward_peak_bytes
    peak += COUNTER

    def verdict(capacity: int) -> str:
        sized = dataclasses.replace(
            accelerator, hbm_bytes=dataclasses.replace(accelerator.hbm_bytes, value=capacity)
        )
        cluster = dataclasses.replace(load_cluster("h100", 1, 8), accelerator=sized)
        return memory.verdict(plan(job), [one], cluster, Shape(pp=1, microbatches=1)).verdict

    role = judged(job).per_role[0]
    least = peak + sum(role.outside.values())  # no product is torch's own here
    assert verdict(least - 1) == "oom"
    assert verdict(least) == "at_risk"
    assert verdict(role.reserved_bytes - 1) == "at_risk"
    assert verdict(role.reserved_bytes) == "fits"
    assert role.reserved_bytes == int(peak * (1 + memory.SLACK)) + sum(role.outside.values())


@pytest.mark.parametrize(
    ("name", "experts", "dispatcher", "missing"),
    [
        ("h100", 8, "alltoall", 0.0),
        ("mi355x", 0, "alltoall", 0.0),
        ("mi355x", 8, "flex", shortfall.MISSING["flex"]),
        ("mi300x", 8, "allgather", shortfall.MISSING["alltoall"]),
    ],
)
def test_experts_on_amd_are_at_risk_where_published_runs_took_more(
    name: str, experts: int, dispatcher: str, missing: float
) -> None:
    job = Job(dp=8, microbatches=1)
    asked = plan(job)
    asked = dataclasses.replace(
        asked, model=dataclasses.replace(asked.model, num_experts=experts),
        flags={**asked.flags, "moe_token_dispatcher_type": dispatcher},
    )  # fmt: skip
    target = load_cluster(name, 1, 8)

    def judge(capacity: float) -> memory.Memory:
        hbm = dataclasses.replace(target.accelerator.hbm_bytes, value=capacity)
        sized = dataclasses.replace(target.accelerator, hbm_bytes=hbm)
        return memory.verdict(
            asked, [trace(job, 0)], dataclasses.replace(target, accelerator=sized),
            Shape(pp=1, microbatches=1),
        )  # fmt: skip

    reserved = judge(1e15).per_role[0].reserved_bytes
    needed = int(reserved / (1 - missing)) + 1
    assert judge(needed).verdict == "fits" and judge(needed).notes == ()
    below = judge(reserved)
    assert below.verdict == ("at_risk" if missing else "fits")
    assert ["for reasons not known" in note for note in below.notes] == ([True] if missing else [])
    if missing:
        assert judge(needed - 2).verdict == "at_risk"


def test_roles_are_named_by_what_they_hold() -> None:
    names = [role.role for role in judged(Job(pp=4, dp=2)).per_role]
    assert names[0] == "pp stage 0 (embedding, 8 layers)"
    assert names[1] == "pp stage 1 (8 layers)"
    assert names[3] == "pp stage 3 (8 layers, output)"


def test_a_model_that_is_too_large_to_be_built_does_not_fit() -> None:
    """Sharded after it is built whole: the step fits, the building does not."""
    parts = MemoryParts(parameters=10, gradients=0, optimizer=0, activations=20, temporaries=0,
                        communication=0, reserve=0)  # fmt: skip
    role = RoleMemory(
        role="pp stage 0", ranks=1, example_rank=0, parameters=5, peak_bytes=30,
        reserved_bytes=40, parts=parts, outside={"context": 7}, setup_bytes=90,
    )  # fmt: skip
    assert role.least_bytes == 97
    assert dataclasses.replace(role, setup_bytes=29).least_bytes == 37
    assert dataclasses.replace(role, setup_bytes=None).least_bytes == 37
    (line,) = memory._built_too_large([role], 96)
    assert "building the model takes 90 bytes" in line and "--init-model-with-meta-device" in line
    assert memory._built_too_large([role], 97) == []
    assert memory._built_too_large([dataclasses.replace(role, peak_bytes=95)], 96) == []

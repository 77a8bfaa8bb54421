"""What of the data-parallel communication is hidden."""

from __future__ import annotations

import dataclasses

import pytest

from primus_ext.cluster_data import load_cluster
from primus_ext.cost.model import CostModel
from primus_ext.cost.priced import CostError
from primus_ext.plan import Plan
from primus_ext.project import data_parallel as dp
from primus_ext.project.programs import Shape
from primus_ext.project.schedule import Timeline, programs, simulate
from tests.synthetic import BUCKETS, Job, plan, trace


def bucket(share: float, reduce_s: float, gather_s: float = 0.0, chunk: int = 0) -> dp.BucketTimes:
    return dp.BucketTimes(chunk, "dp", share, reduce_s, gather_s)


def timeline(shape: Shape, forward: float = 1.0, backward: float = 2.0) -> Timeline:
    f = [[forward] * shape.vpp for _ in range(shape.pp)]
    b = [[backward] * shape.vpp for _ in range(shape.pp)]
    return simulate(shape, programs(shape), f, b, [0.0] * (shape.stages - 1))


def job_plan(overlap: bool = True, **flags: bool) -> Plan:
    return dataclasses.replace(plan(Job(dp=8, overlap=overlap)), flags=dict(flags))


def test_without_overlap_everything_comes_after_the_last_backward() -> None:
    shape = Shape(pp=1, microbatches=3)
    buckets = [bucket(0.5, 0.1), bucket(0.5, 0.3)]
    end = dp.reduced_at(job_plan(False), shape, timeline(shape), 0, buckets, [2.0])
    assert end == pytest.approx(9.0 + 0.4)


def test_a_bucket_is_reduced_while_the_backward_goes_on() -> None:
    shape = Shape(pp=1, microbatches=3)
    buckets = [bucket(0.25, 0.4) for _ in range(4)]
    # filled at 7.5, 8.0, 8.5, 9.0; the link is free again before each but the last
    end = dp.reduced_at(job_plan(), shape, timeline(shape), 0, buckets, [2.0])
    assert end == pytest.approx(9.4)


def test_a_slow_link_falls_behind_the_backward() -> None:
    shape = Shape(pp=1, microbatches=3)
    buckets = [bucket(0.25, 0.7) for _ in range(4)]
    end = dp.reduced_at(job_plan(), shape, timeline(shape), 0, buckets, [2.0])
    assert end == pytest.approx(7.5 + 4 * 0.7)


def test_only_the_last_microbatch_hides_reductions() -> None:
    buckets = [bucket(0.25, 0.7) for _ in range(4)]
    for microbatches in (1, 50):
        shape = Shape(pp=1, microbatches=microbatches)
        run = timeline(shape)
        end = dp.reduced_at(job_plan(), shape, run, 0, buckets, [2.0])
        assert end - run.finish[0] == pytest.approx(7.5 + 4 * 0.7 - 9)


def test_later_stages_reduce_in_the_bubble_when_aligned() -> None:
    shape = Shape(pp=4, microbatches=8)
    run, buckets = timeline(shape), [bucket(0.5, 0.5), bucket(0.5, 0.5)]
    for rank in range(4):
        end = dp.reduced_at(job_plan(), shape, run, rank, buckets, [2.0])
        hidden = end <= run.makespan
        assert hidden is (rank > 0)
        free = dp.reduced_at(job_plan(align_grad_reduce=False), shape, run, rank, buckets, [2.0])
        assert free == pytest.approx(run.finish[rank] + 0.5)


def test_aligned_chunks_are_reduced_while_lower_chunks_work() -> None:
    shape = Shape(pp=2, vpp=2, microbatches=4)
    run = timeline(shape)
    buckets = [bucket(1.0, 1.0, chunk=0), bucket(1.0, 1.0, chunk=1)]
    # rank 0: chunk 1 is reduced beside the last two backwards of chunk 0, chunk 0 afterwards
    end = dp.reduced_at(job_plan(), shape, run, 0, buckets, [2.0, 2.0])
    assert end == pytest.approx(run.finish[0] + 1.0)
    slow = [bucket(1.0, 1.0, chunk=0), bucket(1.0, 7.0, chunk=1)]
    end = dp.reduced_at(job_plan(), shape, run, 0, slow, [2.0, 2.0])
    assert end == pytest.approx(run.finish[0] - 4.0 + 7.0 + 1.0)
    # rank 1 starts one backward later, as rank 0 does with the same chunk
    end = dp.reduced_at(job_plan(), shape, run, 1, slow, [2.0, 2.0])
    after_one_more = run.backward_ends[1][-2]
    assert end == pytest.approx(after_one_more + 7.0 + 1.0)


def test_the_first_gather_is_waited_for_and_the_next_ones_hide() -> None:
    # backward order: the forward meets the last bucket first
    buckets = [bucket(0.25, 0, gather) for gather in (0.2, 0.2, 0.9, 0.3)]
    waits = dp.first_forward_waits(buckets, [2.0], overlap=True)
    assert waits == pytest.approx([0.3 + (0.9 - 0.5)])
    assert dp.first_forward_waits(buckets, [2.0], overlap=False) == [0.0]


def test_interleaved_chunks_are_gathered_behind_the_chunk_before() -> None:
    """Megatron gathers chunks 0 and 1 at the start, chunk k + 1 when chunk k is begun."""
    shape = Shape(pp=2, vpp=3, microbatches=4)
    job = dataclasses.replace(
        job_plan(), parallelism=dataclasses.replace(job_plan().parallelism,
                                                    overlap_param_gather=True))  # fmt: skip
    own = [bucket(1.0, 0, 3.0, chunk=0), bucket(1.0, 0, 3.0, chunk=1), bucket(1.0, 0, 5.0, chunk=2)]
    waits = dp.first_waits(job, shape, [own, own], [[2.0, 2.0, 2.0]] * 2)
    # two microbatches of the chunk before hide 4 seconds; the second rank waits for nothing more
    assert waits == [[3.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
    free = dataclasses.replace(job, flags={**job.flags, "align_param_gather": False})
    assert dp.first_waits(free, shape, [own, own], [[2.0, 2.0, 2.0]] * 2) == [[3.0, 3.0, 5.0]] * 2


def test_buckets_are_priced_on_their_own_group() -> None:
    job = Job(tp=8, dp=4)
    cost = CostModel(load_cluster("h100", 4, 8), alone=True)
    one = trace(job, 0)
    sharded = dp.bucket_times(cost, one, sharded=True)
    assert len(sharded) == BUCKETS
    assert sum(b.share for b in sharded) == pytest.approx(1.0)
    nic = cost.cluster.nic_bandwidth.value * cost.cluster.nic_efficiency.value
    size = one.buckets[0].grad_bytes
    assert sharded[0].reduce_s == pytest.approx(size * 3 / 4 / nic, rel=0.05)
    assert sharded[0].gather_s == pytest.approx(sharded[0].reduce_s / 2, rel=0.05)

    reduced = dp.bucket_times(cost, one, sharded=False)
    assert reduced[0].gather_s == 0.0
    assert reduced[0].reduce_s == pytest.approx(2 * sharded[0].reduce_s, rel=0.05)


def test_a_group_that_the_trace_does_not_know_is_an_error() -> None:
    job = Job(dp=8)
    one = trace(job, 0)
    lost = dataclasses.replace(one, groups={"tp": (0,), "pp": (0,)})
    cost = CostModel(load_cluster("h100", 1, 8), alone=True)
    with pytest.raises(CostError, match="group dp of a gradient bucket"):
        dp.bucket_times(cost, lost, sharded=True)

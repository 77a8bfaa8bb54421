"""A job under other schedules than its own: parts, cuts, memory, the table, the timeline."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from primus_ext.cluster_data import load_cluster
from primus_ext.cost.conditions import Conditions
from primus_ext.cost.model import CostModel
from primus_ext.project import beside, comparison, compose, estimated, stage
from primus_ext.project.kept import Kept
from primus_ext.project.programs import ScheduleError, Shape
from primus_ext.project.rescheduled import Rescheduled
from primus_ext.project.result import Projection
from primus_ext.project.schedules import SCHEDULES, named
from primus_ext.report import step_timeline, terminal
from primus_ext.trace import Call, Collective, CollectiveKind, Family, Op, ScopeKind
from tests.synthetic import Job, plan, trace, traces

JOB = Job(tp=2, pp=4, dp=2, layers=32, hidden=4096, microbatches=16)
CLUSTER = load_cluster("h100", 2, 8)


def projected(job: Job, schedule: str | None = "all") -> Projection:
    cluster = load_cluster("h100", max(1, job.world // 8), min(8, job.world))
    return compose.project(plan(job), traces(job), cluster, mode="simulate", schedule=schedule)


def in_parts(job: Job) -> comparison.Job:
    stages = compose.stage_traces(plan(job), traces(job), CLUSTER)
    shape = compose.schedule_shape(plan(job))
    kept = Kept(CLUSTER).under(Conditions.of(plan(job), CLUSTER.accelerator))
    return comparison.job_of(plan(job), stages, kept, shape)


@pytest.mark.parametrize("vpp", [1, 2])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("sharded", [True, False])
def test_the_jobs_own_schedule_comes_out_the_same_in_parts(
    vpp: int, overlap: bool, sharded: bool
) -> None:
    job = dataclasses.replace(JOB, vpp=vpp, overlap=overlap, distributed_optimizer=sharded)
    under = Rescheduled(in_parts(job), SCHEDULES["1f1b" if vpp == 1 else "interleaved"])
    assert under.end == pytest.approx(projected(job, None).throughput.step_s, rel=1e-9)
    terms = {t.term: t.exposed_seconds for t in projected(job, None).breakdown}
    for name, seconds in under.ledger().exposed.items():
        assert seconds == pytest.approx(terms[name], rel=1e-6, abs=1e-11), name


@pytest.mark.parametrize("vpp", [1, 2])
def test_estimated_memory_of_the_jobs_own_schedule_is_near_the_composed_one(vpp: int) -> None:
    job = dataclasses.replace(JOB, vpp=vpp)
    under = Rescheduled(in_parts(job), SCHEDULES["1f1b" if vpp == 1 else "interleaved"])
    stages = compose.stage_traces(plan(job), traces(job), CLUSTER)
    found = estimated.peaks(under, stages, under.order(estimated.enough(under.shape)))
    for mine, role in zip(found, projected(job).memory.per_role, strict=True):
        assert mine == pytest.approx(role.peak_bytes, rel=0.02)


@pytest.mark.parametrize("schedule", [n for n, s in SCHEDULES.items() if n != "combined-1f1b"])
def test_nothing_is_lost_when_the_layers_are_dealt_out_anew(schedule: str) -> None:
    job = in_parts(JOB)
    under = Rescheduled(job, named(schedule))
    before = [part for parts in job.stages for part in parts]
    after = [part for row in under.chunks for parts in row for part in parts]
    for name in ("weight", "saved", "put_off", "static"):
        assert math.fsum(getattr(p, name) for p in after) == pytest.approx(
            math.fsum(getattr(p, name) for p in before)
        )
    for name in ("reduce", "gather"):
        assert sum(getattr(f, name) for p in after for f in p.buckets) == pytest.approx(
            sum(getattr(b, f"{name}_s") for row in job.buckets for b in row)
        )
    assert sum(part.layer for part in after) == JOB.layers
    static = sum(
        t.static.parameters + t.static.gradients + t.static.optimizer
        for t in compose.stage_traces(plan(JOB), traces(JOB), CLUSTER)
    )
    assert math.fsum(p.static for p in after) == pytest.approx(static)
    busy = JOB.microbatches * sum(p.forward.seconds + p.backward.seconds for p in before)
    if schedule != "dualpipe-v":
        assert sum(under.timeline.busy) == pytest.approx(
            busy + sum(sum(waits) for waits in under.durations.first_forward or [])
        )


def test_a_v_has_the_first_and_the_last_stage_on_rank_0() -> None:
    under = Rescheduled(in_parts(JOB), SCHEDULES["zbv"])
    edges = [[sum(not p.layer for p in parts) for parts in row] for row in under.chunks]
    assert edges == [[1, 1], [0, 0], [0, 0], [0, 0]]
    assert under.durations.boundary[JOB.pp - 1] == 0.0  # the turn stays on the last rank
    assert min(under.durations.boundary[: JOB.pp - 1]) > 0


@pytest.mark.parametrize("recompute", [False, True])
def test_weight_gradients_are_the_products_of_layout_nt(recompute: bool) -> None:
    job = dataclasses.replace(JOB, recompute=recompute)
    recorded, prices = trace(job, 1), CostModel(CLUSTER)
    found = stage.price(prices, recorded).chunks[0]
    by_hand = sum(
        prices.op_seconds(recorded.ops[call.op]).seconds * segment.count
        for segment in recorded.chunks[0].segments for call in segment.backward
        if recorded.ops[call.op].attr("layout") == "nt"
    )  # fmt: skip
    assert found.weight == pytest.approx(by_hand) and by_hand > 0
    assert found.weight < 0.5 * found.backward.seconds
    plain = stage.price(prices, trace(JOB, 1)).chunks[0]
    assert found.weight == pytest.approx(plain.weight)  # recomputation belongs to the rest


def test_all_schedules_are_compared_and_what_can_not_be_says_why() -> None:
    rows = {row.schedule: row for row in projected(JOB).schedules}
    assert list(rows) == list(SCHEDULES)
    assert [row.role for row in rows.values()].count("runs") == 1 and rows["1f1b"].role == "runs"
    assert rows["combined-1f1b"].refused == (
        "the schedule combined-1f1b needs several chunks on each rank, the job has vpp=1"
    )
    done = {name: row for name, row in rows.items() if row.step_s is not None}
    assert len(done) == len(SCHEDULES) - 1
    for row in done.values():
        assert row.step_s and 0 <= (row.bubble_share or 0) < 0.5 and len(row.peak_bytes) == JOB.pp
    # nearly equal stages: the order of the published bubbles, and of the published memory
    bubbles = [done[n].bubble_share for n in ("zbv", "v-half", "zero-bubble", "1f1b", "v-min")]
    assert sorted(bubbles[:4]) == bubbles[:4]  # type: ignore[type-var]
    assert [done[n].in_flight for n in ("zbv", "v-half", "v-min", "interleaved")] == [4, 3, 2, 5.5]
    assert max(done["v-min"].peak_bytes) < max(done["v-half"].peak_bytes)
    assert max(done["v-half"].peak_bytes) < max(done["zbv"].peak_bytes)


def test_one_schedule_is_asked_for() -> None:
    found = projected(JOB, "zbv-formatted")
    rows = {row.role: row for row in found.schedules}
    assert set(rows) == {"runs", "asked"} and rows["asked"].schedule == "zbv"
    assert found.throughput.step_s == pytest.approx(rows["asked"].step_s, rel=1e-9)
    assert sum(t.exposed_seconds for t in found.breakdown) == found.throughput.step_s
    assert found.breakdown[-1].evidence == "schedule: event simulation of zbv"
    assert any("the program runs 1F1B" in line for line in found.warnings)
    assert any("after the pipeline" in line for line in found.warnings)
    assert found.memory == projected(JOB, None).memory
    assert projected(JOB, None).schedules == ()


def test_asking_for_what_runs_changes_nothing() -> None:
    asked, plain = projected(JOB, "1f1b"), projected(JOB, None)
    assert asked.throughput == plain.throughput and asked.breakdown == plain.breakdown
    assert [row.role for row in asked.schedules] == ["runs"]


@pytest.mark.parametrize(
    ("changes", "schedule", "words"),
    [
        ({"layers": 36}, "zbv", "36 layers can't be cut into 8 equal stages"),
        ({"pp": 1, "layers": 8, "dp": 8}, "v-min", "needs a pipeline, the job has pp=1"),
        ({"microbatches": 4}, "zbv", "4 microbatches are not legal with the schedule zbv"),
        ({"microbatches": 2000}, "zbv-greedy", "takes too long for 2000 microbatches"),
        ({}, "gpipe", "schedule=gpipe is unknown; legal: all, 1f1b"),
    ],
)
def test_what_can_not_be_is_refused_in_one_sentence(
    changes: dict, schedule: str, words: str
) -> None:
    with pytest.raises(ScheduleError) as refused:
        projected(dataclasses.replace(JOB, **changes), schedule)
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_stages_are_put_together_and_halved() -> None:
    several = Rescheduled(in_parts(dataclasses.replace(JOB, vpp=4)), SCHEDULES["1f1b"])
    halves = Rescheduled(in_parts(JOB), SCHEDULES["interleaved"])
    for row in several.chunks:
        assert [sum(p.layer for p in parts) for parts in row] == [8]
    for row in halves.chunks:
        assert [sum(p.layer for p in parts) for parts in row] == [4, 4]
    # rank 0 of an interleaved schedule has the first and the fifth eighth, not the second
    assert halves.chunks[0][0] is not halves.chunks[0][1]
    kinds = [sum(not p.layer for p in parts) for row in halves.chunks for parts in row]
    assert kinds == [1, 0, 0, 0, 0, 0, 0, 1]


def layer(**seconds: float) -> beside.Pieces:
    return beside.Pieces(**{"attention": 0.0, **seconds})


def test_tokens_travel_while_the_other_microbatch_computes() -> None:
    moe = layer(attention=2.0, dispatch=1.0, mlp=3.0, combine=1.0, attention_back=4.0,
                dispatch_back=1.0, mlp_back=6.0, mlp_weight=3.0, combine_back=1.0)  # fmt: skip
    # everything that travels fits beside what the other one computes: 2 + 3 + 4 + 6 and no more,
    # but for the first transfer of the backward, which has the forward's attention beside it
    assert beside.seconds([moe], [moe]) == pytest.approx(2 + 6 + 3 + 4)
    slow = dataclasses.replace(moe, dispatch=10.0, combine=0.0, combine_back=0.0)
    # attention 2, tokens 2..12, experts 12..15; the gradient's tokens follow on the same lane
    # 12..13, and its attention comes after the experts
    assert beside.seconds([slow], [slow]) == pytest.approx(2 + 10 + 3 + 4)
    dense = layer(attention=5.0, attention_back=10.0)
    assert beside.seconds([dense, dense], [dense]) == pytest.approx(5 + 5 + 10)


def test_late_weight_gradients_hide_the_tokens_of_the_gradient() -> None:
    moe = layer(attention_back=1.0, dispatch_back=3.0, mlp_back=6.0, mlp_weight=3.0)
    assert beside.seconds([], [moe]) == pytest.approx(6 + 3 + 1)
    assert beside.seconds([], [moe], delayed=True) == pytest.approx(3 + 3 + 1)


@pytest.mark.parametrize("schedule", [None, "zbv", "dualpipe-v", "zero-bubble-auto"])
def test_timeline_holds_all_work_of_every_rank(schedule: str | None, tmp_path: Path) -> None:
    drawn = compose.timeline(plan(JOB), traces(JOB), CLUSTER, schedule)
    found = json.loads(step_timeline.write(drawn, tmp_path).read_text())
    events = [event for event in found["traceEvents"] if event["ph"] == "X"]
    step = projected(JOB, schedule).throughput.step_s
    assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(step * 1e6, rel=1e-6)
    assert found["otherData"]["left_out"] == "nothing"
    for rank in range(JOB.pp):
        work = sorted((e["ts"], e["dur"], e) for e in events if (e["pid"], e["tid"]) == (rank, 0))
        for (start, length, _), (following, _, _) in zip(work, work[1:], strict=False):
            assert start + length <= following + 0.01
        ahead = sum("forward" in e["cat"] for *_, e in work)
        chunks = drawn.shape.vpp
        assert ahead == JOB.microbatches * chunks
        for *_, event in work:
            assert 0 <= event["args"]["microbatch"] < JOB.microbatches
            assert 0 <= event["args"]["chunk"] < chunks
    tracks = {e["args"]["name"] for e in found["traceEvents"] if e["name"] == "process_name"}
    assert tracks == {f"pp rank {rank}" for rank in range(JOB.pp)}
    cats = {event["cat"] for event in events}
    assert {"forward", "p2p", "dp", "optimizer"} <= cats
    assert ("weight gradient" in cats) == (schedule is not None)


def test_a_long_timeline_is_cut_and_says_so() -> None:
    job = dataclasses.replace(JOB, microbatches=4000)
    found = step_timeline.content(compose.timeline(plan(job), traces(job), CLUSTER))
    assert "of 4000 microbatches" in found["otherData"]["left_out"]
    many = dataclasses.replace(JOB, pp=8, vpp=4, dp=1, layers=32, microbatches=240)
    found = step_timeline.content(compose.timeline(plan(many), traces(many), CLUSTER))
    assert "slices in the middle" in found["otherData"]["left_out"]
    assert len(found["traceEvents"]) < step_timeline.MOST_SLICES + 200


def test_the_table_names_what_runs_and_what_does_not_fit() -> None:
    console = Console(width=110, record=True, no_color=True, file=io.StringIO())
    terminal.render(projected(JOB), console)
    text = console.export_text()
    assert "Pipeline schedules" in text and "1f1b (runs)" in text
    assert "combined-1f1b: the schedule combined-1f1b needs several chunks" in text
    assert text.index("zbv  ") < text.index("1f1b (runs)")


def test_fsdp_is_refused() -> None:
    recorded = [
        dataclasses.replace(t, chunks=tuple(
            dataclasses.replace(c, microbatches=(object(),)) for c in t.chunks))
        for t in traces(JOB)
    ]  # fmt: skip
    with pytest.raises(ScheduleError, match=r"not legal with sharded parameters \(FSDP\)"):
        comparison.job_of(plan(JOB), recorded, Kept(CLUSTER), Shape(pp=4, microbatches=8))


def with_experts(job: Job) -> tuple:
    """Plan and traces of a job whose layers send tokens to experts and back."""
    found = []
    for one in traces(job):
        ops = list(one.ops)
        travel = Op(
            name="c10d.alltoall_base_", family=Family.COLLECTIVE, inputs=(), outputs=(), flops=0,
            bytes=0, collective=Collective(kind=CollectiveKind.ALL_TO_ALL, group="ep",
                                           bytes=4 * job.activation, dtype="bf16"),
        )  # fmt: skip
        ops.append(travel)

        def spread(calls: tuple[Call, ...], phase: str, at: int = len(ops) - 1) -> tuple[Call, ...]:
            middle = len(calls) // 2
            there, back = (Call(op=at, phase=phase, module="") for _ in range(2))
            return (*calls[:middle], there, *calls[middle:-1], back, calls[-1])

        chunks = [
            dataclasses.replace(chunk, segments=tuple(
                dataclasses.replace(s, forward=spread(s.forward, "forward"),
                                    backward=spread(s.backward, "backward"))
                if s.kind is ScopeKind.DENSE_LAYER else s
                for s in chunk.segments
            ))
            for chunk in one.chunks
        ]  # fmt: skip
        found.append(
            dataclasses.replace(one, ops=tuple(ops), chunks=tuple(chunks),
                                groups={**one.groups, "ep": one.groups["dp"]})
        )  # fmt: skip
    flags = {"overlap_moe_expert_parallel_comm": True}
    return dataclasses.replace(plan(job), flags=flags), found


def test_a_job_that_asks_for_combined_1f1b_is_priced_with_it() -> None:
    job = dataclasses.replace(JOB, vpp=2)
    asked, recorded = with_experts(job)

    def step(flags: dict, schedule: str | None = None) -> Projection:
        return compose.project(dataclasses.replace(asked, flags=flags), recorded, CLUSTER,
                               mode="simulate", schedule=schedule)  # fmt: skip

    plain, both = step({}), step(asked.flags)
    assert both.throughput.step_s < plain.throughput.step_s
    assert sum(t.exposed_seconds for t in both.breakdown) == both.throughput.step_s
    travel = [
        next(t for t in p.breakdown if t.term == "expert communication") for p in (plain, both)
    ]
    assert travel[0].seconds == pytest.approx(travel[1].seconds)
    # only the forwards before the first backward, and the backwards after the last forward, wait
    assert 0 < travel[1].exposed_seconds < 0.5 * travel[0].exposed_seconds
    assert both.breakdown[-1].evidence == "schedule: event simulation of combined-1f1b"
    rows = {row.schedule: row for row in step(asked.flags, "all").schedules}
    assert rows["combined-1f1b"].role == "runs" and rows["interleaved"].step_s is not None
    assert rows["combined-1f1b"].step_s == pytest.approx(both.throughput.step_s, rel=1e-9)
    assert rows["interleaved"].step_s == pytest.approx(plain.throughput.step_s, rel=1e-9)
    late = step({**asked.flags, "delay_wgrad_compute": True})
    assert late.throughput.step_s <= both.throughput.step_s


def test_combined_1f1b_holds_one_more_chunk() -> None:
    job = dataclasses.replace(JOB, vpp=2)
    asked, recorded = with_experts(job)
    plain = compose.project(dataclasses.replace(asked, flags={}), recorded, CLUSTER,
                            mode="simulate")  # fmt: skip
    both = compose.project(asked, recorded, CLUSTER, mode="simulate")
    saved = recorded[1].chunks[0].memory.saved_bytes
    more = [b.peak_bytes - a.peak_bytes
            for a, b in zip(plain.memory.per_role, both.memory.per_role, strict=True)]  # fmt: skip
    assert more == pytest.approx([saved] * job.pp, rel=0.2)

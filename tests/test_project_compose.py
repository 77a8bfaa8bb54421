"""The whole projection of synthetic jobs."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primus_ext.cluster_data import ClusterError, load_cluster
from primus_ext.cost.model import CostModel
from primus_ext.project import stage
from primus_ext.project.compose import _IN_PIECES as IN_PIECES
from primus_ext.project.compose import PlanError, project
from primus_ext.project.compose import _Step as Step
from primus_ext.project.kept import Kept
from primus_ext.project.ledger import TermName
from primus_ext.project.programs import ScheduleError
from primus_ext.project.result import Projection
from primus_ext.project.schedule import Shape
from primus_ext.trace import to_plain
from tests.synthetic import Job, plan, traces


def projected(job: Job, name: str = "h100") -> Projection:
    cluster = load_cluster(name, max(1, job.world // 8), min(8, job.world))
    return project(plan(job), traces(job), cluster, mode="simulate")


def exposed(projection: Projection) -> dict[str, float]:
    return {term.term: term.exposed_seconds for term in projection.breakdown}


JOBS = st.builds(
    lambda tp, pp, vpp, dp, groups, rest: dataclasses.replace(
        Job(tp=tp, pp=pp, vpp=vpp if pp > 1 else 1, dp=dp, microbatches=pp * groups), **rest
    ),
    tp=st.sampled_from([1, 2, 8]), pp=st.sampled_from([1, 2, 4]), vpp=st.sampled_from([1, 2, 4]),
    dp=st.sampled_from([8, 16]), groups=st.integers(1, 3),
    rest=st.fixed_dictionaries({
        "recompute": st.booleans(), "overlap": st.booleans(), "asynchronous": st.booleans(),
        "distributed_optimizer": st.booleans(), "overlap_p2p": st.booleans(),
    }),
)  # fmt: skip


@given(job=JOBS, name=st.sampled_from(["a100", "h100", "b200", "mi300x", "mi355x"]))
@settings(max_examples=60, deadline=None)
def test_exposed_seconds_add_up_to_the_step_in_any_way_of_adding(job: Job, name: str) -> None:
    found = json.loads(json.dumps(to_plain(projected(job, name))))
    values = [term["exposed_seconds"] for term in found["breakdown"]]
    step = found["throughput"]["step_s"]
    naive = 0.0
    for value in values:
        naive += value
    assert sum(values) == math.fsum(values) == naive == math.fsum(reversed(values)) == step
    assert min(values) >= 0
    interval = found["throughput"]["interval"]
    assert interval["low"] < step < interval["high"]
    assert 0 < found["throughput"]["mfu"] < 1


def test_the_same_question_has_the_same_answer() -> None:
    job = Job(tp=8, pp=4, dp=2)
    assert to_plain(projected(job)) == to_plain(projected(job))


@pytest.mark.parametrize("recompute", [False, True])
def test_model_flops_are_six_per_parameter_and_token_and_causal_attention(
    recompute: bool,
) -> None:
    job = Job(tp=8, pp=4, dp=2, recompute=recompute)
    found = projected(job).throughput
    tokens = plan(job).batch.gbs * job.seq
    matrices = job.layers * job.layer_matrix + job.vocab * job.hidden
    pairs = job.seq * (job.seq + 1) // 2
    attention = 3 * 4 * pairs * job.hidden * job.layers * plan(job).batch.gbs
    expected = (6 * matrices * tokens + attention) / job.world / found.step_s
    assert found.model_tflops_per_gpu * 1e12 == pytest.approx(expected, rel=1e-9)
    peak = load_cluster("h100", 1, 8).accelerator.peak_flops["bf16"].value
    assert found.mfu == pytest.approx(expected / peak)
    rate = tokens / found.step_s / job.world
    assert found.tokens_per_s_per_gpu == pytest.approx(rate)


def test_parameters_are_counted_once_over_all_stages() -> None:
    job = Job(tp=8, pp=4, dp=2)
    found = projected(job).model["total_parameters"]
    assert found == job.layers * job.layer_matrix + 2 * job.vocab * job.hidden


def test_an_ideal_pipeline_shows_its_bubble() -> None:
    """Equal stages: the bubble is (p - 1) / m of the work."""
    job = Job(pp=4, dp=2, microbatches=16, vocab=8, overlap=False)
    found = projected(job)
    terms = exposed(found)
    work = sum(terms[name] for name in ("gemm", "attention", "memory-bound"))
    assert terms["pipeline bubble"] == pytest.approx(3 / 16 * work, rel=0.05)


def test_more_microbatches_take_proportionally_longer() -> None:
    few, many = (projected(Job(tp=8, dp=1, microbatches=m)).throughput.step_s for m in (10, 20))
    assert few < many < 2 * few


def test_interleaving_shortens_the_bubble() -> None:
    plain = exposed(projected(Job(pp=4, dp=2, microbatches=8)))
    interleaved = exposed(projected(Job(pp=4, vpp=4, dp=2, microbatches=8)))
    assert interleaved["pipeline bubble"] < 0.5 * plain["pipeline bubble"]
    assert interleaved["pipeline p2p"] > plain["pipeline p2p"]


def test_stages_that_send_pieces_take_a_tps_part_of_the_network_and_a_gather() -> None:
    """A boundary over the network: whole from each rank, or its eighth and NVLink for the rest."""
    job = Job(tp=8, pp=2, dp=1, microbatches=2, sequence_parallel=False)
    cluster = load_cluster("a100", 2, 8)
    kept, stages = Kept(cluster), traces(job)
    told = plan(job)
    pieces = dataclasses.replace(told, flags={**told.flags, IN_PIECES: "1"})
    shape = Shape(pp=2, vpp=1, microbatches=2)
    (whole,) = Step(told, stages, kept, shape)._boundary
    (split,) = Step(pieces, stages, kept, shape)._boundary
    size = stages[0].chunks[0].boundary_bytes
    assert whole == kept.send_seconds(size, 0, 8)
    gather = kept.gather_seconds(size, tuple(range(8, 16)))
    assert split == kept.send_seconds(size // 8, 0, 8) + gather
    assert gather < split < whole / 3


def test_recomputation_costs_one_forward_of_the_layers() -> None:
    job = Job(tp=8)
    cost = CostModel(load_cluster("h100", 1, 8))
    forward = stage.price(cost, traces(job)[0]).chunks[0].forward
    layers = forward.seconds - forward.exposed[TermName.EDGES]
    with_it = exposed(projected(dataclasses.replace(job, recompute=True)))
    assert with_it["recompute"] == pytest.approx(job.microbatches * layers)
    assert "recompute" not in exposed(projected(job))


def test_overlap_hides_data_parallel_communication() -> None:
    beside = projected(Job(tp=1, dp=64, microbatches=4, layers=8))
    after = projected(Job(tp=1, dp=64, microbatches=4, layers=8, overlap=False))
    hidden = {t.term: t for t in beside.breakdown}["data-parallel communication"]
    shown = {t.term: t for t in after.breakdown}["data-parallel communication"]
    assert shown.exposed_seconds == pytest.approx(shown.seconds)
    assert hidden.seconds == pytest.approx(shown.seconds)
    assert hidden.exposed_seconds < 0.5 * shown.exposed_seconds
    assert beside.throughput.step_s < after.throughput.step_s


def test_tensor_parallelism_across_nodes_costs_more() -> None:
    job, name = Job(tp=8), "tensor-parallel communication"
    inside = project(plan(job), traces(job), load_cluster("h100", 1, 8), mode="simulate")
    across = project(plan(job), traces(job), load_cluster("h100", 4, 2), mode="simulate")
    assert exposed(across)[name] > 2.5 * exposed(inside)[name]


def test_8192_gpus_with_512_microbatches() -> None:
    job = Job(tp=8, pp=16, vpp=2, dp=64, microbatches=512, layers=96, hidden=12288, heads=96,
              kv_heads=96, ffn=32768)  # fmt: skip
    found = projected(job, "mi355x")
    assert found.cluster["world_size"] == 8192
    assert len(found.memory.per_role) == 16
    assert 0.1 < found.throughput.mfu < 0.7


def test_memory_too_small_is_an_answer_not_an_error() -> None:
    found = projected(Job(dp=8, layers=320))
    assert found.memory.verdict == "oom"


def test_every_term_says_how_it_is_known() -> None:
    for term in projected(Job(tp=8, pp=4, dp=2)).breakdown:
        assert term.evidence.partition(":")[0] in ("model", "schedule")
        assert len(term.evidence) > 10
        assert term.seconds >= term.exposed_seconds - 1e-9


def test_what_is_not_modelled_depends_on_the_job() -> None:
    job = Job(dp=8)
    moe = dataclasses.replace(plan(job).model, num_experts=8, topk=2)
    with_experts = dataclasses.replace(plan(job), model=moe, flags={"cuda_graph_impl": "local"})
    cluster = load_cluster("mi300x", 1, 8)
    lines = project(with_experts, traces(job), cluster, mode="simulate").not_modelled
    for word in ("imbalance", "CUDA graphs", "ROCm"):
        assert any(word in line for line in lines)
    assert not any("imbalance" in line for line in projected(job).not_modelled)


def test_provenance_holds_every_figure_with_its_source() -> None:
    found = projected(Job(dp=8)).provenance
    assert found["figures"]["hbm_bandwidth"]["source"]
    assert found["network"]["nic_bandwidth"]["value"] == 50e9


def test_missing_traces_and_wrong_sizes_are_refused_in_one_sentence() -> None:
    job = Job(tp=2, pp=4, dp=1)
    cluster = load_cluster("h100", 1, 8)
    with pytest.raises(PlanError, match="pipeline ranks 1, 2 have no trace"):
        project(plan(job), [traces(job)[0], traces(job)[2]], cluster, mode="simulate")
    with pytest.raises(PlanError, match="world_size=8 is not legal on h100_2x8: it has 16 GPUs"):
        project(plan(job), traces(job), load_cluster("h100", 2, 8), mode="simulate")
    two = dataclasses.replace(plan(job).parallelism, vpp=2)
    with pytest.raises(PlanError, match="1 model chunks, the plan has vpp=2"):
        wrong = dataclasses.replace(plan(job), parallelism=two)
        project(wrong, traces(job), cluster, mode="simulate")
    small = dataclasses.replace(plan(job).batch, gbs=0)
    with pytest.raises(PlanError, match="gbs=0"):
        project(dataclasses.replace(plan(job), batch=small), traces(job), cluster, mode="simulate")


def test_negative_memory_in_a_trace_is_refused() -> None:
    job = Job(dp=8)
    one = traces(job)[0]
    chunk = one.chunks[0]
    bad = dataclasses.replace(chunk.memory, saved_bytes=-1)
    broken = dataclasses.replace(one, chunks=(dataclasses.replace(chunk, memory=bad),))
    with pytest.raises(PlanError, match="negative memory"):
        project(plan(job), [broken], load_cluster("h100", 1, 8), mode="simulate")


def test_precision_and_schedule_that_cannot_run_are_refused() -> None:
    with pytest.raises(ClusterError, match="precision=fp8 is not available on a100"):
        projected(Job(dp=8, dtype="fp8_e4m3/tensor"), "a100")
    with pytest.raises(ScheduleError, match="left over"):
        projected(Job(pp=4, vpp=2, dp=2, microbatches=6))

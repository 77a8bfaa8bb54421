"""Requests that share a trace: what follows from it equals a trace of their own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from primus_ext import trace_io
from primus_ext.cluster_data import load_cluster
from primus_ext.runner import bulk, pricing, sharing
from tests.emulation import GPT, H100

_WORDS = (
    "--bf16 --transformer-impl transformer_engine --mock-data --tokenizer-type NullTokenizer "
    "--train-iters 10 --lr 1e-4 --num-layers 4 --hidden-size 256 --num-attention-heads 4 "
    "--max-position-embeddings 256 --seq-length 256 --vocab-size 1000 --micro-batch-size 2 "
    "--normalization LayerNorm --position-embedding-type rope --attention-dropout 0 "
    "--hidden-dropout 0 --pipeline-model-parallel-size 2 --context-parallel-size 1"
)
REPLICATED = _WORDS.split()
SHARDED = [*REPLICATED, "--use-distributed-optimizer", "--overlap-grad-reduce"]


def request(args: list[str], world: int, gbs: int, tp: int = 2) -> dict[str, Any]:
    return {
        "module": GPT, "device": H100, "world_size": world, "gpus_per_node": min(8, world),
        "frameworks": ["primus_ext.frameworks.megatron.entry"], "formats": ["bf16"],
        "origins": False,
        "args": [*args, "--tensor-model-parallel-size", str(tp), "--global-batch-size", str(gbs)],
    }  # fmt: skip


JOBS = {
    "replicated": request(REPLICATED, 32, 256),  # 8 replicas
    "sharded": request(SHARDED, 8, 12),  # 2 replicas, 3 microbatches
}


@pytest.fixture(scope="module")
def answers() -> dict[str, bulk.Answer]:
    """Of the jobs, of those that stand for them, and of one in smaller nodes: one process."""
    asked = JOBS | {f"{name} for others": sharing.shared(job).request for name, job in JOBS.items()}
    assert asked["replicated for others"]["world_size"] == 8
    assert asked["sharded for others"]["world_size"] == 8
    found: dict[str, bulk.Answer] = {}
    bulk.answers({**asked, "small nodes": SMALL_NODES}, found.__setitem__, 1)
    return found


SMALL_NODES = {**request(SHARDED, 8, 12), "gpus_per_node": 2}


def test_nodes_of_another_size_need_no_process_of_their_own(
    answers: dict[str, bulk.Answer],
) -> None:
    alone: dict[str, bulk.Answer] = {}
    bulk.answers({"small nodes": SMALL_NODES}, alone.__setitem__, 1)
    own, other = (json.loads(a["small nodes"].text) for a in (alone, answers))
    assert own["traces"] == other["traces"] and own["plan"] == other["plan"]


def test_jobs_priced_together_are_those_priced_alone(answers: dict[str, bulk.Answer]) -> None:
    text = answers["replicated for others"].text
    wanted = [
        pricing.Wanted(
            f"{world} {gbs} {len(conditions)} {memory}", load_cluster("h100", world // 8, 8),
            conditions, sharing.shared(request(REPLICATED, world, gbs)).sizes, memory,
        )
        for world, gbs in ((32, 256), (32, 64), (64, 256), (8, 256))
        for conditions in ({}, {"CUDA_LAUNCH_BLOCKING": "1"})
        for memory in (True, False)
    ]  # fmt: skip
    together = pricing.price(text, wanted)
    alone = {one.name: pricing.price(text, [one])[one.name] for one in wanted}
    assert together == alone
    assert all(isinstance(one, pricing.Timed) for one in alone.values())
    times = {one.throughput.step_s for one in alone.values() if isinstance(one, pricing.Timed)}
    assert len(times) == 8  # by world, batch and conditions


def test_a_restored_trace_is_the_one_it_would_have_been(
    answers: dict[str, bulk.Answer],
) -> None:
    for name, job in JOBS.items():
        own, other = (json.loads(answers[n].text) for n in (name, f"{name} for others"))
        sizes = sharing.shared(job).sizes
        assert sizes is not None
        plan, traces = sharing.restored(
            trace_io.plan_from_plain(other["plan"]), trace_io.traces_from_plain(other["traces"]),
            sizes,
        )  # fmt: skip
        assert plan == trace_io.plan_from_plain(own["plan"])
        assert list(traces) == trace_io.traces_from_plain(own["traces"])


def test_batches_and_replicas_have_one_trace() -> None:
    found = {
        json.dumps(sharing.shared(request(REPLICATED, world, gbs)).request)
        for world, gbs in ((8, 8), (8, 64), (16, 64), (64, 64))
    }
    assert len(found) == 1
    alone = sharing.shared(request(REPLICATED, 4, 8)).request  # one replica: groups of one rank
    assert alone["world_size"] == 4


@pytest.mark.parametrize(
    "job",
    [
        request(REPLICATED, 8, 9),  # does not divide: the framework says so
        request([*REPLICATED, "--use-torch-fsdp2"], 8, 16),
        request(REPLICATED, 6, 16),
        request([*REPLICATED, "--num-virtual-stages-per-pipeline-rank", "2"], 8, 12),
    ],
)
def test_others_stand_for_themselves(job: dict[str, Any]) -> None:
    assert sharing.shared(job) == sharing.Shared(job, None)


def test_a_sharded_optimizer_keeps_its_replicas() -> None:
    assert sharing.shared(request(SHARDED, 32, 64)).request["world_size"] == 32

"""A trace that was recorded for its times alone: the same times, and no memory."""

from __future__ import annotations

from typing import Any

import pytest

from primus_ext.cluster import Cluster
from primus_ext.cluster_data import load_cluster
from primus_ext.plan import Plan
from primus_ext.project import compose
from primus_ext.runner import bulk, pricing
from primus_ext.trace import RankTrace
from tests.emulation import GPT, H100

# Quantized weights and layers that are computed again: what a first microbatch holds differs.
_EXPERTS = (
    "--bf16 --fp8-format hybrid --fp8-recipe tensorwise --transformer-impl transformer_engine "
    "--mock-data --tokenizer-type NullTokenizer --train-iters 10 --lr 1e-4 --num-layers 4 "
    "--hidden-size 256 --num-attention-heads 4 --max-position-embeddings 256 --seq-length 256 "
    "--vocab-size 1000 --micro-batch-size 2 --global-batch-size 32 --normalization RMSNorm "
    "--position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 --num-experts 4 "
    "--moe-grouped-gemm --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2 "
    "--pipeline-model-parallel-size 2 --disable-bias-linear --swiglu "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
)
Traced = tuple[Plan, list[RankTrace]]


@pytest.fixture(scope="module")
def traced() -> dict[str, Traced]:
    request = {
        "module": GPT, "device": H100, "world_size": 8, "gpus_per_node": 8, "origins": False,
        "frameworks": ["primus_ext.frameworks.megatron.entry"], "formats": ["bf16", "fp8"],
        "args": _EXPERTS.split(),
    }  # fmt: skip
    found: dict[str, bulk.Answer] = {}
    asked = {"whole": request, "timed": {**request, "memory": False}}
    bulk.answers(asked, found.__setitem__, 1)
    return {name: pricing.decoded(answer.text) for name, answer in found.items()}


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return load_cluster("h100", 1, 8)


def plain(traced: Traced) -> list[dict[str, Any]]:
    """Everything that takes time, as the trace has it."""
    return [
        {
            "segments": [chunk.segments for chunk in trace.chunks],
            "once": (trace.step, trace.sync, trace.buckets, trace.groups),
            "ops": trace.ops,
        }
        for trace in traced[1]
    ]


def test_what_takes_time_is_the_same(traced: dict[str, Traced], cluster: Cluster) -> None:
    assert plain(traced["timed"]) == plain(traced["whole"])
    timed, whole = (compose.timed(*traced[name], cluster) for name in ("timed", "whole"))
    assert timed == whole


def test_the_rest_was_left_out(traced: dict[str, Traced]) -> None:
    measured = [c.memory.inflight_saved_bytes for t in traced["whole"][1] for c in t.chunks]
    assert None not in measured  # so there was something to leave out
    assert all(trace.only_timed for trace in traced["timed"][1])
    assert all(not t.allocations and t.static_events is None for t in traced["timed"][1])
    assert not any(trace.only_timed for trace in traced["whole"][1])


def test_it_has_no_memory(traced: dict[str, Traced], cluster: Cluster) -> None:
    with pytest.raises(ValueError, match="times alone"):
        compose.project(*traced["timed"], cluster, mode="simulate")
    assert compose.project(*traced["whole"], cluster, mode="simulate").memory.per_role

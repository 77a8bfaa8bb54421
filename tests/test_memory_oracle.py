"""Composed peak memory against Megatron's own training loop run on one rank, all microbatches."""

from __future__ import annotations

from pathlib import Path

import pytest

from primus_ext import trace_io
from primus_ext.cluster_data import load_cluster
from primus_ext.project import compose
from tests.emulation import emulate

MODEL = (
    "--num-layers 8 --hidden-size 256 --ffn-hidden-size 704 --num-attention-heads 8 "
    "--group-query-attention --num-query-groups 2 --seq-length 128 "
    "--max-position-embeddings 128 --micro-batch-size 2 --vocab-size 1023 "
    "--make-vocab-size-divisible-by 128 --global-batch-size 16 "
)
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel "
PP2, PP4 = "--pipeline-model-parallel-size 2 ", "--pipeline-model-parallel-size 4 "
VPP2 = "--num-virtual-stages-per-pipeline-rank 2 "
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
MOE = (
    "--num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 2 "
    "--expert-tensor-parallel-size 1 --moe-grouped-gemm --moe-token-dispatcher-type alltoall "
)
slow = pytest.mark.slow


def composed_and_whole(tmp_path: Path, world: int, args: str) -> list[tuple[int, int]]:
    """Per pipeline stage: composed peak and whole-rank peak."""
    answer = emulate(tmp_path, world, MODEL + args)
    assert answer["status"] == "ok", answer
    plan = trace_io.plan_from_plain(answer["plan"])
    traces = trace_io.traces_from_plain(answer["traces"])
    cluster = load_cluster("h100", 1, world)
    roles = compose.project(plan, traces, cluster, mode="simulate").memory.per_role
    pp = plan.parallelism.pp
    whole = emulate(
        tmp_path, world, MODEL + args, whole=True, ranks=[s * world // pp for s in range(pp)]
    )
    assert whole["status"] == "ok", whole
    peaks = [w["peak_bytes"] for w in whole["traces"]]
    return [(r.peak_bytes, p) for r, p in zip(roles, peaks, strict=True)]


@pytest.mark.parametrize(
    ("world", "args"),
    [
        pytest.param(4, TP2 + PP2, id="tp2 pp2"),
        pytest.param(4, TP2 + PP2 + FULL, id="full recompute"),
        pytest.param(2, PP2 + "--fp8-format hybrid --fp8-recipe delayed", id="fp8 delayed"),
        pytest.param(4, MOE + PP2, id="experts"),
        pytest.param(2, TP2, id="tp2", marks=slow),
        pytest.param(8, TP2 + PP4, id="tp2 pp4", marks=slow),
        pytest.param(
            4,
            TP2 + PP2 + "--recompute-granularity selective --recompute-modules core_attn mlp",
            id="selective recompute",
            marks=slow,
        ),
        pytest.param(2, "--context-parallel-size 2", id="cp2", marks=slow),
        pytest.param(8, TP2 + PP4 + VPP2, id="interleaved", marks=slow),
        pytest.param(
            4, PP4 + VPP2 + "--no-overlap-p2p-communication", id="interleaved, blocking", marks=slow
        ),
        pytest.param(
            4, "--overlap-grad-reduce --overlap-param-gather", id="dp4 overlapped", marks=slow
        ),
        pytest.param(
            2, PP2 + "--fp8-format e4m3 --fp8-recipe blockwise", id="fp8 blockwise", marks=slow
        ),
    ],
)
def test_composition_is_the_whole_rank(tmp_path: Path, world: int, args: str) -> None:
    for composed, whole in composed_and_whole(tmp_path, world, args):
        assert composed == whole

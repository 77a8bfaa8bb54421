"""Jobs for Transformer Engine where the package is missing, and Megatron's local layers."""

from __future__ import annotations

from pathlib import Path

import pytest

from primus_ext import trace_io
from primus_ext.cluster_data import load_cluster
from primus_ext.project import compose
from tests.emulation import emulate, ops_of

HIDDEN, FFN, HEADS, KV, LAYERS, SEQ, MBS = 256, 704, 8, 2, 2, 128, 2
DENSE = (
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --ffn-hidden-size {FFN} "
    f"--num-attention-heads {HEADS} --group-query-attention --num-query-groups {KV} "
    f"--seq-length {SEQ} --max-position-embeddings {SEQ} --micro-batch-size {MBS} "
    "--vocab-size 1023 --make-vocab-size-divisible-by 128 --global-batch-size 16 "
)
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel "
MOE = (
    "--num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 2 "
    "--expert-tensor-parallel-size 1 --moe-grouped-gemm --moe-token-dispatcher-type alltoall "
)
HIDDEN_TE = {"frameworks": ["tests.hide_te", "primus_ext.frameworks.megatron"]}
MATRICES = HIDDEN * HIDDEN * (2 + 2 * KV / HEADS) + 3 * HIDDEN * FFN


def flops(trace: dict, family: str, phase: str | None = None) -> int:
    return sum(op["flops"] for op in ops_of(trace, phase) if op["family"] == family)


def test_stand_in_layers_do_the_same_work(tmp_path: Path) -> None:
    stand_in = emulate(tmp_path, 2, DENSE + TP2, **HIDDEN_TE)
    assert stand_in["status"] == "ok", stand_in
    trace = stand_in["traces"][0]
    tokens = MBS * SEQ
    assert flops(trace, "gemm") == 6 * (MATRICES * LAYERS + HIDDEN * 1024) // 2 * tokens
    pairs = MBS * HEADS // 2 * SEQ * (SEQ + 1) // 2 * (HIDDEN // HEADS)
    assert flops(trace, "attention", "forward") == 2 * 2 * pairs * LAYERS
    real = emulate(tmp_path, 2, DENSE + TP2)["traces"][0]
    assert trace["parameters"] == real["parameters"]
    same = ("parameters", "gradients", "optimizer")
    assert [trace["static"][k] for k in same] == [real["static"][k] for k in same]
    ours, theirs = (t["chunks"][0]["memory"]["saved_bytes"] for t in (trace, real))
    # a norm's output is kept beside its input, which Transformer Engine's fused layer may drop
    normed = SEQ // 2 * MBS * HIDDEN * 2
    assert 0 <= ours - theirs <= (2 * LAYERS + 1) * normed
    plan = trace_io.plan_from_plain(stand_in["plan"])
    traces = trace_io.traces_from_plain(stand_in["traces"])
    lines = compose.project(plan, traces, load_cluster("h100", 1, 2), mode="simulate")
    assert any("Transformer Engine is not installed" in line for line in lines.not_modelled)


@pytest.mark.slow
def test_stand_in_experts_compose_to_the_whole_rank(tmp_path: Path) -> None:
    answer = emulate(tmp_path, 2, DENSE + MOE, **HIDDEN_TE)
    assert answer["status"] == "ok", answer
    trace = answer["traces"][0]
    rows = MBS * SEQ * 2
    assert flops(trace, "grouped_gemm") == 6 * rows * 3 * HIDDEN * FFN * LAYERS
    plan = trace_io.plan_from_plain(answer["plan"])
    traces = trace_io.traces_from_plain(answer["traces"])
    roles = compose.project(plan, traces, load_cluster("h100", 1, 2), mode="simulate").memory
    whole = emulate(tmp_path, 2, DENSE + MOE, whole=True, ranks=[0], **HIDDEN_TE)["traces"]
    peak = whole[0]["peak_bytes"]
    assert abs(peak - roles.per_role[0].peak_bytes) <= 1e-3 * peak


@pytest.mark.parametrize(
    ("args", "message"),
    [
        pytest.param(
            "--context-parallel-size 2 ",
            "context_parallel_size=2 can't be projected without transformer-engine; legal: 1",
            id="cp",
        ),
    ],
)
def test_what_only_transformer_engine_can_do_is_refused(
    tmp_path: Path, args: str, message: str
) -> None:
    answer = emulate(tmp_path, 2, DENSE + args, **HIDDEN_TE)
    assert (answer["status"], answer["exit_code"]) == ("error", 2)
    assert message in answer["message"]


def test_local_layers_are_megatrons_own(tmp_path: Path) -> None:
    """Asked for, they run as they are: the score matrix is really there."""
    local = "--transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion "
    answer = emulate(tmp_path, 2, DENSE + local + "--no-rope-fusion --no-masked-softmax-fusion")
    assert answer["status"] == "ok", answer
    trace = answer["traces"][0]
    scores = 2 * MBS * HEADS * SEQ * SEQ * (HIDDEN // HEADS)  # whole, not the causal half
    linear = 2 * (MATRICES * LAYERS + HIDDEN * 1024) * MBS * SEQ
    assert flops(trace, "gemm", "forward") == linear + 2 * scores * LAYERS
    assert flops(trace, "attention") == 0

"""Multi-token prediction: DeepSeek-V3 as published, and layouts that place the layer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.breadth import PP2, SHAPE, assert_same, compared
from tests.emulation import emulate

HIDDEN, HEADS, Q_RANK, KV_RANK, NOPE, ROPE, VALUE = 7168, 128, 1536, 512, 128, 64, 128
DENSE_FFN, EXPERT_FFN, EXPERTS, VOCAB, LAYERS, FIRST_DENSE = 18432, 2048, 256, 129280, 61, 3
DEEPSEEK_V3 = (
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --ffn-hidden-size {DENSE_FFN} "
    f"--num-attention-heads {HEADS} --kv-channels 128 --multi-latent-attention "
    f"--q-lora-rank {Q_RANK} --kv-lora-rank {KV_RANK} --qk-head-dim {NOPE} "
    f"--qk-pos-emb-head-dim {ROPE} --v-head-dim {VALUE} --qk-layernorm --no-rope-fusion "
    "--seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 "
    f"--vocab-size {VOCAB - 1} --make-vocab-size-divisible-by 1280 --global-batch-size 1024 "
    f"--num-experts {EXPERTS} --moe-router-topk 8 --moe-ffn-hidden-size {EXPERT_FFN} "
    f"--moe-shared-expert-intermediate-size {EXPERT_FFN} --moe-grouped-gemm "
    f"--moe-layer-freq ([0]*{FIRST_DENSE}+[1]*{LAYERS - FIRST_DENSE}) "
    "--moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-score-function sigmoid "
    "--moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32 --moe-permute-fusion "
    "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep "
    "--expert-model-parallel-size 64 --expert-tensor-parallel-size 1 "
    "--pipeline-model-parallel-size 16 --mtp-num-layers 1 "
    "--pipeline-model-parallel-layout Et*3|(tt|)*29m|L "
    "--recompute-granularity selective --recompute-modules mla_up_proj moe_act layernorm"
)


def attention() -> int:
    """Parameters of one multi-latent attention with its two inner norms."""
    query = HIDDEN * Q_RANK + Q_RANK + Q_RANK * HEADS * (NOPE + ROPE)
    key_value = HIDDEN * (KV_RANK + ROPE) + KV_RANK + KV_RANK * HEADS * (NOPE + VALUE)
    return query + key_value + HEADS * VALUE * HIDDEN


def moe_layer(experts: int) -> int:
    """Parameters of a layer of which ``experts`` routed ones count."""
    return attention() + 2 * HIDDEN + HIDDEN * EXPERTS + 3 * HIDDEN * EXPERT_FFN * (experts + 1)


def model(experts: int, mtp_layers: int) -> int:
    """Parameters of the whole model, ``mtp_layers`` of which are prediction modules."""
    dense = FIRST_DENSE * (attention() + 2 * HIDDEN + 3 * HIDDEN * DENSE_FFN)
    ends = 2 * VOCAB * HIDDEN + HIDDEN
    mtp = moe_layer(experts) + 2 * HIDDEN + 2 * HIDDEN * HIDDEN + HIDDEN
    return dense + (LAYERS - FIRST_DENSE) * moe_layer(experts) + ends + mtp_layers * mtp


def test_the_closed_form_is_the_published_size() -> None:
    # arXiv:2412.19437: 671 B parameters, 37 B activated for each token (embeddings not looked up
    # whole), without the prediction module
    assert round(model(EXPERTS, 0) / 1e9) == 671
    assert round((model(8, 0) - VOCAB * HIDDEN) / 1e9) == 37


@pytest.mark.slow
def test_deepseek_v3_with_its_prediction_layer(tmp_path: Path) -> None:
    answer = emulate(tmp_path, 1024, DEEPSEEK_V3)
    assert answer["status"] == "ok", (answer, answer["stderr"][-2000:])
    stages = {rank: t for t in answer["traces"] for rank in t["pp_ranks"]}
    assert sorted(stages) == list(range(16))
    # stage 13 alone holds the decoder's final norm, which the prediction needs before stage 15
    assert [t["pp_ranks"] for t in answer["traces"]] == [
        [0], list(range(1, 13)), [13], [14], [15]
    ]  # fmt: skip
    total = sum(t["global_parameters"] for t in stages.values())
    active = sum(t["active_parameters"] for t in stages.values())
    unpadded = 2 * HIDDEN  # embedding and output have one row less
    assert total == model(EXPERTS, 1) - unpadded
    assert active == model(8, 1) - unpadded
    kinds = {s["kind"] for c in stages[14]["chunks"] for s in c["segments"]}
    assert "mtp_layer" in kinds
    grouped = [op for op in stages[5]["ops"] if op["family"] == "grouped_gemm"]
    assert {dict(map(tuple, op["attrs"]))["groups"] for op in grouped} == {EXPERTS // 64}


SMALL = (
    "--num-layers 4 --hidden-size 256 --ffn-hidden-size 704 --num-attention-heads 8 "
    "--group-query-attention --num-query-groups 2 --seq-length 128 "
    "--max-position-embeddings 128 --micro-batch-size 2 --vocab-size 1023 "
    "--make-vocab-size-divisible-by 128 --global-batch-size 8 "
    "--pipeline-model-parallel-size 2 --mtp-num-layers 1 "
    "--pipeline-model-parallel-layout Et|ttt|m|L"
)


def test_a_prediction_layer_in_a_stage_of_its_own(tmp_path: Path) -> None:
    """The stage behind it gets the sequence once more for the prediction."""
    answer = emulate(tmp_path, 2, SMALL)
    assert answer["status"] == "ok", (answer, answer["stderr"][-2000:])
    activation = 128 * 2 * 256 * 2
    boundaries = {
        t["pp_ranks"][0]: [c["boundary_bytes"] for c in t["chunks"]] for t in answer["traces"]
    }
    assert boundaries == {0: [activation, 2 * activation], 1: [activation, 0]}
    layer = 256 * 256 * (2 + 2 / 4) + 3 * 256 * 704 + 2 * 256
    mtp = layer + 2 * 256 + 2 * 256 * 256 + 256
    ends = 2 * 1023 * 256 + 256
    # rank 0 holds a second copy of the embedding for the prediction, which counts once
    assert sum(t["global_parameters"] for t in answer["traces"]) == 4 * layer + mtp + ends


@pytest.mark.slow
def test_handles_of_exchanges_outlive_the_backward(tmp_path: Path) -> None:
    """The schedule refers to an output and its graph until its next forward is through.

    The graph holds what DeepEP's functions put on their contexts, in both expert layers.
    """
    experts = (
        "--num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 2 "
        "--expert-tensor-parallel-size 1 --moe-grouped-gemm --moe-token-dispatcher-type flex "
        "--moe-flex-dispatcher-backend deepep --moe-router-dtype fp32 "
    )
    split = "--pipeline-model-parallel-layout Et|tmL --num-layers 2 --mtp-num-layers 1 "
    found = compared(tmp_path, 4, SHAPE + experts + PP2 + split)
    assert_same(found)
    assert all(one.trace.chunks[0].memory.graph_bytes > 0 for one in found)

"""Experts' work and traffic in whole microbatches, by dispatcher and by routing."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest

from tests.emulation import emulate, ops_of, traces

HIDDEN, FFN, EXPERTS, TOPK, EP, LAYERS, SEQ, MBS = 256, 704, 8, 2, 4, 2, 128, 2
TOKENS = SEQ * MBS
ARGS = (
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --ffn-hidden-size {FFN} "
    "--num-attention-heads 8 --group-query-attention --num-query-groups 2 "
    f"--seq-length {SEQ} --max-position-embeddings {SEQ} --micro-batch-size {MBS} "
    "--vocab-size 1023 --make-vocab-size-divisible-by 128 --global-batch-size 16 "
    f"--num-experts {EXPERTS} --moe-router-topk {TOPK} --expert-model-parallel-size {EP} "
    "--expert-tensor-parallel-size 1 --moe-grouped-gemm --moe-router-dtype fp32 "
    "--moe-token-dispatcher-type "
)
FLEX = "flex --moe-flex-dispatcher-backend "


def experts(trace: dict) -> Counter:
    """Grouped products by shape, how many of each."""
    return Counter(
        (op["name"], json.dumps(op["attrs"]))
        for op in ops_of(trace)
        if op["family"] == "grouped_gemm"
    )


def sent(trace: dict, name: str, phase: str) -> list[int]:
    return [op["collective"]["bytes"] for op in ops_of(trace, phase) if op["name"] == name]


@pytest.fixture(scope="module")
def all_to_all(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return traces(tmp_path_factory.mktemp("alltoall"), 4, ARGS + "alltoall")[0]


@pytest.fixture(scope="module")
def deep_ep(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return traces(tmp_path_factory.mktemp("deepep"), 4, ARGS + FLEX + "deepep")[0]


def test_deep_ep_computes_what_all_to_all_computes(all_to_all: dict, deep_ep: dict) -> None:
    assert experts(deep_ep) == experts(all_to_all)
    assert sum(experts(deep_ep).values()) == 6 * LAYERS


def test_deep_ep_sends_a_token_once_to_a_rank(deep_ep: dict) -> None:
    local = EXPERTS // EP
    missed = math.comb(EXPERTS - local, TOPK) / math.comb(EXPERTS, TOPK)
    rows = EP * round(TOKENS * (1 - missed))
    state, weights, numbers = 2 * HIDDEN, 4 * TOPK, 8 * TOPK
    expected = {
        ("deep_ep.dispatch", "forward"): rows * (state + numbers + weights),
        ("deep_ep.combine", "forward"): rows * state,
        ("deep_ep.dispatch", "backward"): rows * state,
        ("deep_ep.combine", "backward"): rows * (state + weights),
    }
    for (name, phase), size in expected.items():
        assert sent(deep_ep, name, phase) == [size] * LAYERS
    groups = {op["collective"]["group"] for op in ops_of(deep_ep) if "deep_ep." in op["name"]
              and op["collective"]}  # fmt: skip
    assert groups == {"tp_ep"} and deep_ep["groups"]["tp_ep"] == [0, 1, 2, 3]


def test_deep_ep_buffers_are_outside_the_allocator(all_to_all: dict, deep_ep: dict) -> None:
    per_token = 2 * HIDDEN + 8 + 128 * 12 + 128 * 4
    nvlink = 10 * EP * (4 * 5 + 256 * per_token)
    assert deep_ep["static"]["libraries"] == -(-nvlink // 128) * 128 + 8 * 20 + 32 * 2**20
    assert all_to_all["static"]["libraries"] == 0
    same = ("parameters", "gradients", "optimizer")
    assert [deep_ep["static"][k] for k in same] == [all_to_all["static"][k] for k in same]


@pytest.mark.slow
def test_hybrid_ep_computes_what_all_to_all_computes(tmp_path: Path, all_to_all: dict) -> None:
    trace = traces(tmp_path, 4, ARGS + FLEX + "hybridep")[0]
    assert experts(trace) == experts(all_to_all)
    assert len(sent(trace, "deep_ep.hybrid_dispatch", "forward")) == LAYERS


@pytest.mark.parametrize(
    "dispatcher",
    [
        FLEX + "deepep",
        pytest.param("alltoall", marks=pytest.mark.slow),
        pytest.param("allgather", marks=pytest.mark.slow),
        pytest.param(FLEX + "hybridep", marks=pytest.mark.slow),
    ],
)
def test_real_routing_replayed_needs_the_same_memory(tmp_path: Path, dispatcher: str) -> None:
    """A router chooses with real tensors; its counts alone give the same bytes without values."""
    file = tmp_path / "counts.json"
    real = traces(tmp_path, 4, ARGS + dispatcher, storage="real", routing_out=str(file))[0]
    counts = json.loads(file.read_text())
    assert counts["tokens"] == TOKENS and set(counts["layers"]) == {"1", "2"}
    assert all(sum(row) == TOKENS * TOPK for row in counts["layers"].values())
    assert max(counts["layers"]["1"]) > min(counts["layers"]["1"])
    fake = traces(tmp_path, 4, ARGS + dispatcher, routing=str(file), ranks=[0])[0]
    assert [c["memory"] for c in fake["chunks"]] == [c["memory"] for c in real["chunks"]]
    assert experts(fake) == experts(real)
    assert fake["static"]["libraries"] == real["static"]["libraries"]


def test_the_rank_with_the_most_tokens_is_run(tmp_path: Path) -> None:
    hot = [TOKENS, TOKENS // 2, 0, 0, TOKENS // 2, 0, 0, 0]
    mild = [0, 0, TOKENS // 2, 0, TOKENS, TOKENS // 2, 0, 0]
    table = {"tokens": TOKENS, "layers": {"1": hot, "2": mild}}
    trace = traces(tmp_path, 4, ARGS + "alltoall", routing=table)[0]
    assert trace["rank"] == 2  # experts 4 and 5: 2 x TOKENS over both layers, others 1.5 at most
    rows = [
        sum(dict(map(tuple, op["attrs"]))["m"] for op in ops_of(trace, "forward")
            if op["family"] == "grouped_gemm")
    ]  # fmt: skip
    assert rows == [2 * EP * (TOKENS // 2 + TOKENS + TOKENS // 2)]  # two products a layer


def test_a_table_without_a_layer_is_refused(tmp_path: Path) -> None:
    table = {"tokens": TOKENS, "layers": {"1": [TOKENS // 4] * EXPERTS}}
    answer = emulate(tmp_path, 4, ARGS + "alltoall", routing=table)
    assert (answer["status"], answer["exit_code"]) == ("error", 2)
    assert "routing has no layer 2" in answer["message"]

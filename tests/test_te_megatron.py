"""Megatron's Transformer Engine layers over the stand-in: exact shapes, and real numbers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests import te_world


def gemms(ops: list) -> list[tuple[str, int, int, int]]:
    found = [attrs for name, _, attrs in ops if name == "primus_te::gemm"]
    return [(o["layout"], o["m"], o["n"], o["k"]) for o in found]


def split(ops: list) -> tuple[list, list]:
    at = next(i for i, op in enumerate(ops) if op[0] == "backward")
    return ops[:at], ops[at + 1 :]


KINDS = ("mla", "sink", "qk_norm", "cp_p2p", "cp_all_gather", "cp_a2a")


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    return te_world.run(
        "9.0", "dense", *(f"attention:{k}" for k in KINDS), "parity:float32", "parity:bfloat16")


@pytest.fixture(scope="module")
def dense(answers: dict) -> tuple[list, list]:
    return split(answers["dense"])


def test_every_gemm_of_a_sharded_layer(dense: tuple[list, list]) -> None:
    """Llama-70B, tp 8: hidden 8192, 64 heads and 8 groups of 128, ffn 28672, 8192 tokens."""
    tokens, hidden, tp = 8192, 8192, 8
    qkv, ffn = (8192 + 2 * 8 * 128) // tp, 28672 // tp
    forward, backward = dense
    linears = [(qkv, hidden), (hidden, hidden // tp), (2 * ffn, hidden), (hidden, ffn)]
    assert gemms(forward) == [("TN", tokens, out, inner) for out, inner in linears]
    expected = []
    for out, inner in reversed(linears):
        expected += [("NN", tokens, inner, out), ("NT", out, inner, tokens)]
    assert gemms(backward) == expected


def test_sequence_parallel_collectives_surround_the_gemms(dense: tuple[list, list]) -> None:
    forward, backward = dense
    kinds = [Counter(n for n, _, _ in part if n.startswith("c10d::")) for part in dense]
    assert kinds[0] == {"c10d::_allgather_base_": 2, "c10d::_reduce_scatter_base_": 2}
    # gather of each output gradient, and of each normalised input again for its weight gradient
    assert kinds[1] == {"c10d::_allgather_base_": 4, "c10d::_reduce_scatter_base_": 2}
    sizes = {tuple(map(tuple, s)) for n, s, _ in forward + backward if n.startswith("c10d::")}
    flat = {tuple(sorted(_rows(shape) for shape in pair)) for pair in sizes}
    assert flat == {(1024, 8192)}


def _rows(shape: tuple[int, ...]) -> int:
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows


def test_fused_attention_is_chosen_and_saves_what_cudnn_saves(dense: tuple[list, list]) -> None:
    forward, backward = dense
    (name, shapes, attrs), = [op for op in forward if "attn" in op[0]]
    assert name == "primus_te::fused_attn_fwd"
    assert shapes[:3] == [[8192, 1, 8, 128], [8192, 1, 1, 128], [8192, 1, 1, 128]]
    assert attrs["causal"] and attrs["seq_q"] == attrs["seq_kv"] == 8192
    assert (attrs["heads"], attrs["kv_heads"], attrs["dim_qk"], attrs["dim_v"]) == (8, 1, 128, 128)
    (_, shapes, _), = [op for op in backward if "attn" in op[0]]
    # q, k, v, o, do, log-sum-exp, random state
    assert shapes[3:7] == [[8192, 1, 8, 128], [8192, 1, 8, 128], [1, 8, 8192, 1], [2]]


def test_norms_and_rope_are_one_kernel_each(dense: tuple[list, list]) -> None:
    names = [Counter(n for n, _, _ in part) for part in dense]
    assert names[0]["primus_te::rmsnorm_fwd"] == names[1]["primus_te::rmsnorm_bwd"] == 2
    assert names[0]["primus_te::fused_rope_fwd"] == names[1]["primus_te::fused_rope_bwd"] == 2


def attention(answers: dict, kind: str) -> tuple[list[dict[str, Any]], list]:
    """Attributes of every attention forward call, and all operators of the forward pass."""
    forward, backward = split(answers[f"attention:{kind}"])
    calls = [attrs for name, _, attrs in forward if name == "primus_te::fused_attn_fwd"]
    backward_calls = [n for n, _, _ in backward if n.startswith("primus_te::fused_attn_bwd")]
    assert len(backward_calls) == len(calls)
    return calls, forward


def test_latent_attention_has_two_head_sizes(answers: dict) -> None:
    (call,), _ = attention(answers, "mla")
    assert (call["dim_qk"], call["dim_v"], call["heads"], call["kv_heads"]) == (192, 128, 16, 16)


def test_latent_attention_is_not_fused_on_an_a100() -> None:
    calls, forward = attention(te_world.run("8.0", "attention:mla"), "mla")
    assert not calls and not any("attn" in name for name, _, _ in forward)


def test_sink_window_and_bias(answers: dict) -> None:
    (call,), forward = attention(answers, "sink")
    assert call["softmax_type"] == "learnable" and call["window"] == [128, 0] and call["causal"]
    qkv = next(op for op in forward if op[0] == "primus_te::gemm")
    assert qkv[1][-1] == [768]  # its bias


def test_query_and_key_norm(answers: dict) -> None:
    _, forward = attention(answers, "qk_norm")
    rows = [shapes[0] for name, shapes, _ in forward if name == "primus_te::rmsnorm_fwd"]
    assert [1024 * 8, 128] in rows and [1024 * 4, 128] in rows


def test_context_parallel_ring(answers: dict) -> None:
    """Rank 0 of 4: its own block causal, then half of its queries on each block received."""
    calls, forward = attention(answers, "cp_p2p")
    assert [(c["mask"], c["seq_q"], c["seq_kv"]) for c in calls] == [
        ("causal", 256, 256), *[("no_mask", 128, 256)] * 3]  # fmt: skip
    sends = [shapes for name, shapes, _ in forward if name == "c10d::send"]
    assert len(sends) == 3 and all(s == [[2 * 256 * 4 * 128]] for s in sends)


def test_context_parallel_all_gather(answers: dict) -> None:
    """Rank 0 of 4 holds chunks 0 and 7 of 8."""
    calls, forward = attention(answers, "cp_all_gather")
    assert [(c["mask"], c["seq_q"], c["seq_kv"]) for c in calls] == [
        ("causal_bottom_right", 128, 128), ("causal_bottom_right", 128, 1024)]  # fmt: skip
    gathers = [shapes[0] for name, shapes, _ in forward if name == "c10d::_allgather_base_"]
    assert gathers == [[1024, 1, 4, 128]] * 2


def test_context_parallel_all_to_all(answers: dict) -> None:
    (call,), forward = attention(answers, "cp_a2a")
    assert (call["heads"], call["kv_heads"], call["seq_q"]) == (2, 1, 1024)
    assert sum(name == "c10d::alltoall_base_" for name, _, _ in forward) == 4


def test_both_layer_specs_agree_in_fp32(answers: dict) -> None:
    answer = answers["parity:float32"]
    ours, local = answer["losses"]
    assert abs(ours - local) <= 1e-5 * abs(local)
    assert max(answer["errors"].values()) <= 1e-5


def test_both_layer_specs_agree_in_bf16(answers: dict) -> None:
    """Fused against unfused attention: a few roundings of 2**-8 apart."""
    answer = answers["parity:bfloat16"]
    ours, local = answer["losses"]
    assert abs(ours - local) <= 2e-3 * abs(local)
    assert max(answer["errors"].values()) <= 4e-2

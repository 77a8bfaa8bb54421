"""Recordings as functions of microbatch and sequence: solved, refused, and equal to fresh ones."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from primus_ext import parametric
from primus_ext.parametric import (
    Condition,
    NotParametric,
    ParametricChunk,
    ParametricChunks,
    Recording,
    solve,
)
from primus_ext.trace import Family, Op, TensorSpec
from tests.emulation import emulate

POINTS = [(1, 128), (2, 128), (1, 256), (3, 384)]
HIDDEN, FFN, HEADS, KV = 256, 704, 8, 4


@given(st.integers(1, 10**6), st.integers(0, 2), st.integers(0, 2))
def test_a_monomial_is_found(factor: int, a: int, b: int) -> None:
    found = solve(POINTS, [factor * m**a * s**b for m, s in POINTS])
    assert found.at(7, 1000) == factor * 7**a * 1000**b


def test_pairs_of_causal_attention_and_offsets_of_sequences() -> None:
    pairs = solve(POINTS, [4 * m * s * (s + 1) // 2 for m, s in POINTS])
    assert pairs.at(5, 77) == 4 * 5 * 77 * 78 // 2
    offsets = solve(POINTS, [4 * (m + 1) for m, _ in POINTS])
    assert offsets.at(9, 1) == 40
    assert offsets.at(np.array([1, 2]), np.array([1, 1])).tolist() == [8, 12]


def test_what_is_not_exact_is_refused() -> None:
    with pytest.raises(NotParametric, match="no sum of two terms"):
        solve(POINTS, [-(-m * s // 100) for m, s in POINTS])
    half = solve(POINTS, [m * s // 128 for m, s in POINTS])
    with pytest.raises(NotParametric, match="no whole number"):
        half.at(1, 100)


def recording(mbs: int, seq: int, name: str = "aten.mul") -> Recording:
    tensor = TensorSpec((mbs * seq, 8), "bf16")
    op = Op(name, Family.MEMORY, (tensor,), (tensor,), 0, 32 * mbs * seq)
    size = 16 * mbs * seq
    return Recording((mbs, seq), ((op, "forward", "m"),), (size, 3 * size, -size), (-3 * size,), 0)


def test_instantiation_and_peaks() -> None:
    chunk = ParametricChunk([recording(*p) for p in POINTS])
    assert chunk.recording(5, 99) == recording(5, 99)
    memory = chunk.memory(np.array([5, 1]), np.array([99, 128]))
    assert memory["forward_peak_bytes"].tolist() == [4 * 16 * 5 * 99, 4 * 16 * 128]
    assert memory["saved_bytes"].tolist() == [3 * 16 * 5 * 99, 3 * 16 * 128]
    assert recording(5, 99).memory.saved_bytes == memory["saved_bytes"][0]


def test_another_structure_or_a_broken_condition_is_refused() -> None:
    recordings = [recording(*p) for p in POINTS]
    with pytest.raises(NotParametric, match=r"at \(3, 384\) differ"):
        ParametricChunk([*recordings[:3], recording(3, 384, "aten.add")])
    eighths = Condition(Fraction(1, 2), 8, "tokens do not divide over 8 experts")
    chunk = ParametricChunk(recordings, [eighths])
    assert chunk.recording(1, 16) == recording(1, 16)
    with pytest.raises(NotParametric, match="do not divide over 8 experts"):
        chunk.ops(1, 17)


def test_one_sequence_may_have_a_structure_of_its_own() -> None:
    points = [(1, 128), (1, 256), (1, 384), (2, 128), (4, 128), (2, 256), (6, 384)]
    family = [recording(m, s, "aten.mul" if m == 1 else "aten.add") for m, s in points]
    chunks = ParametricChunks(family)
    assert chunks.of(1).recording(1, 640) == recording(1, 640)
    assert chunks.of(5).recording(5, 640) == recording(5, 640, "aten.add")


def test_plain_values_come_back() -> None:
    one = recording(2, 64)
    assert parametric.from_plain(parametric.to_plain(one)) == one


MODEL = (
    f"--num-layers 3 --pipeline-model-parallel-size 3 --hidden-size {HIDDEN} "
    f"--ffn-hidden-size {FFN} --num-attention-heads {HEADS} --group-query-attention "
    f"--num-query-groups {KV} --seq-length 128 --max-position-embeddings 4096 "
    "--micro-batch-size 1 --vocab-size 1023 --make-vocab-size-divisible-by 128 "
    "--global-batch-size 24 "
)
MOE = (
    "--num-experts 8 --moe-router-topk 2 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall "
)
CHECKS = [(1, 512), (2, 640), (5, 128), (8, 1024), (16, 384), (7, 256)]
FULL = {
    "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
}  # fmt: skip


def recorded(tmp_path: Path, model: str, shapes: list[dict]) -> list[list[Recording]]:
    asked = [
        {"arguments": arguments, "points": [*POINTS, *CHECKS], "pp_rank": 1}
        for arguments in shapes
    ]
    answer = emulate(tmp_path, 24, MODEL + model, shapes=asked)
    assert answer["status"] == "ok", (answer, answer["stderr"][-2000:])
    return [[parametric.from_plain(r) for r in t["recordings"]] for t in answer["traces"]]


def test_a_dense_layer_equals_fresh_recordings_and_arithmetic(tmp_path: Path) -> None:
    tp2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    matrices = HIDDEN * HIDDEN * (2 + 2 * KV / HEADS) + 3 * HIDDEN * FFN
    found = recorded(tmp_path, "", [tp2, {**FULL, "context_parallel_size": 2}])
    for passes, share, recordings in zip((6, 8), (2, 2), found, strict=True):
        chunk = ParametricChunk(recordings[: len(POINTS)])
        for fresh in recordings[len(POINTS) :]:
            mbs, seq = fresh.point
            assert chunk.recording(mbs, seq) == fresh
            memory = chunk.memory(np.array([mbs]), np.array([seq]))
            assert memory["saved_bytes"] == fresh.memory.saved_bytes
            assert memory["backward_peak_bytes"] == fresh.memory.backward_peak_bytes
            gemm = sum(op.flops for op, _, _ in fresh.calls if op.family is Family.GEMM)
            assert gemm == passes * matrices * mbs * seq // share


@pytest.mark.slow
def test_a_layer_of_experts_equals_fresh_recordings(tmp_path: Path) -> None:
    ep = {"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1}
    for recordings in recorded(tmp_path, MOE, [ep, {**ep, **FULL}]):
        chunk = ParametricChunk(recordings[: len(POINTS)])
        for fresh in recordings[len(POINTS) :]:
            mbs, seq = fresh.point
            assert chunk.recording(mbs, seq) == fresh
            rows = [op.flops for op, p, _ in fresh.calls
                    if op.family is Family.GROUPED_GEMM and p == "forward"]  # fmt: skip
            assert sum(rows) == 2 * 2 * mbs * seq * 3 * HIDDEN * FFN


def test_a_process_that_was_other_ranks_before_records_what_a_fresh_one_does(
    tmp_path: Path,
) -> None:
    ep = {"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1}
    tp2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    fp8 = {"fp8": "hybrid", "fp8_recipe": "delayed"}
    last = {**ep, **tp2, **FULL}
    refused = {"tensor_model_parallel_size": 7}
    shapes = [{**ep, **fp8}, {"context_parallel_size": 2}, refused, last]
    points = [(2, 256), (1, 128), (3, 512)]
    asked = [{"arguments": a, "points": points, "pp_rank": 1} for a in shapes]
    answers = [
        emulate(tmp_path, 24, MODEL + MOE, shapes=some, processes=1)["traces"]
        for some in (asked, asked[-1:])
    ]
    assert "7" in answers[0][2]["refused"]
    again, fresh = (traces[-1] for traces in answers)
    assert len(fresh["recordings"][0]["calls"]) > 100
    assert again["recordings"] == fresh["recordings"]
    assert again["conditions"] == fresh["conditions"]

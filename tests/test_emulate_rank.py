"""One rank of a job, emulated: against arithmetic that knows nothing of the recording."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.emulation import ops_of, traces

HIDDEN, FFN, HEADS, KV, LAYERS, VOCAB, SEQ, MBS = 256, 704, 8, 2, 4, 1024, 128, 2
DENSE = (
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --ffn-hidden-size {FFN} "
    f"--num-attention-heads {HEADS} --group-query-attention --num-query-groups {KV} "
    f"--seq-length {SEQ} --max-position-embeddings {SEQ} --micro-batch-size {MBS} "
    f"--vocab-size {VOCAB - 1} --make-vocab-size-divisible-by 128 "
)
MATRICES = HIDDEN * HIDDEN * (2 + 2 * KV / HEADS) + 3 * HIDDEN * FFN
"""Matrix elements of one layer: q and o, k and v, gate, up and down."""


def flops(trace: dict, families: tuple[str, ...], phase: str | None = None) -> int:
    return sum(op["flops"] for op in ops_of(trace, phase) if op["family"] in families)


@pytest.fixture(scope="module")
def tp2_pp2(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    args = DENSE + "--global-batch-size 16 --tensor-model-parallel-size 2 --sequence-parallel "
    return traces(tmp_path_factory.mktemp("tp2pp2"), 8, args + "--pipeline-model-parallel-size 2")


def test_gemm_flops_are_six_per_matrix_element_and_token(tp2_pp2: list[dict]) -> None:
    layers = 6 * MATRICES * LAYERS // 2 // 2 * MBS * SEQ
    output = 6 * HIDDEN * VOCAB // 2 * MBS * SEQ
    assert flops(tp2_pp2[0], ("gemm",)) == layers
    assert flops(tp2_pp2[1], ("gemm",)) == layers + output


def test_attention_flops_count_the_causal_half(tp2_pp2: list[dict]) -> None:
    pairs = SEQ * (SEQ + 1) // 2
    forward = 2 * 2 * MBS * HEADS // 2 * pairs * (HIDDEN // HEADS) * LAYERS // 2
    assert flops(tp2_pp2[0], ("attention",), "forward") == forward
    assert flops(tp2_pp2[0], ("attention",), "backward") == forward * 5 // 2


def test_parameters_are_those_of_the_architecture(tp2_pp2: list[dict]) -> None:
    layer = MATRICES + 2 * HIDDEN
    ends = HIDDEN * VOCAB
    first, last = tp2_pp2
    assert first["parameters"] == LAYERS // 2 * (MATRICES // 2 + 2 * HIDDEN) + ends // 2
    assert last["parameters"] == first["parameters"] + HIDDEN
    unpadded = HIDDEN * (VOCAB - 1)
    total = first["global_parameters"] + last["global_parameters"]
    assert total == LAYERS * layer + 2 * unpadded + HIDDEN


def test_static_bytes_follow_from_the_parameters(tp2_pp2: list[dict]) -> None:
    for trace in tp2_pp2:
        static, parameters = trace["static"], trace["parameters"]
        padded = sum(b["param_bytes"] for b in trace["buckets"]) // 2
        assert parameters <= padded <= parameters + 128 * 64 * len(trace["buckets"])
        assert static["gradients"] == 4 * padded
        # weights live in the buffer; the rope frequencies come on top
        assert 2 * padded <= static["parameters"] <= 2 * padded + 4096
        # fp32 main weights and two moments of this rank's half (dp 2) of the buffer
        assert 12 * padded // 2 <= static["optimizer"] <= 12 * padded // 2 + 64


def test_sequence_parallel_collectives(tp2_pp2: list[dict]) -> None:
    activation = SEQ * MBS * HIDDEN * 2
    layer = next(s for s in tp2_pp2[0]["chunks"][0]["segments"] if s["kind"] == "dense_layer")
    ops = tp2_pp2[0]["ops"]
    for calls, expected in (
        (layer["forward"], {"all_gather": 2, "reduce_scatter": 2}),
        # both weights' inputs and both output gradients are gathered again
        (layer["backward"], {"all_gather": 4, "reduce_scatter": 2}),
    ):
        found: dict[str, int] = {}
        for call in calls:
            collective = ops[call["op"]]["collective"]
            if collective:
                assert (collective["group"], collective["bytes"]) == ("tp", activation)
                found[collective["kind"]] = found.get(collective["kind"], 0) + 1
        assert found == expected


def test_dimensions_know_where_they_come_from(tp2_pp2: list[dict]) -> None:
    gemms = [op for op in tp2_pp2[0]["ops"] if op["family"] == "gemm"]
    origins = {tuple(t["origins"]) for op in gemms for t in op["inputs"]}
    assert ("mbs*seq", "hidden_size") in origins
    assert ("2*ffn_hidden_size/tp", "hidden_size") in origins
    assert not any("?" in dims for dims in origins)


def test_boundary_is_the_sharded_activation(tp2_pp2: list[dict]) -> None:
    assert tp2_pp2[0]["chunks"][0]["boundary_bytes"] == SEQ // 2 * MBS * HIDDEN * 2
    assert tp2_pp2[1]["chunks"][0]["boundary_bytes"] == 0


def test_full_recompute_repeats_the_forward_of_the_layers(tmp_path: Path) -> None:
    args = DENSE + "--global-batch-size 8 --recompute-granularity full --recompute-method uniform "
    trace = traces(tmp_path, 2, args + "--recompute-num-layers 1")[0]
    layers = 2 * MATRICES * LAYERS * MBS * SEQ
    assert flops(trace, ("gemm",), "recompute") == layers
    assert flops(trace, ("gemm",)) == 4 * layers + 6 * HIDDEN * VOCAB * MBS * SEQ
    boundaries = LAYERS * SEQ * MBS * HIDDEN * 2
    plain = traces(tmp_path, 2, DENSE + "--global-batch-size 8")[0]
    saved = [t["chunks"][0]["memory"]["saved_bytes"] for t in (trace, plain)]
    assert boundaries < saved[0] < saved[1] / 2


def comparable(trace: dict[str, Any]) -> dict[str, Any]:
    """A trace without what the optimizer's shards make different: they cut at other places."""
    left_out = ("rank", "groups", "ops", "step", "allocations", "static_events")
    kinds = trace["allocations"]
    chunks = []
    for chunk in trace["chunks"]:
        events = {
            name: [kinds[event] if event >= 0 else event for event in chunk["events"][name]]
            for name in ("forward", "backward")
        }
        chunks.append({**chunk, "events": events})
    sync = [{**call, "op": trace["ops"][call["op"]]} for call in trace["sync"]]
    same = {k: v for k, v in trace.items() if k not in left_out}
    return {**same, "chunks": chunks, "sync": sync}


def test_all_ranks_of_a_role_agree(tmp_path: Path) -> None:
    args = DENSE + "--global-batch-size 16 --tensor-model-parallel-size 2 --sequence-parallel "
    ranks = traces(
        tmp_path, 8, args + "--pipeline-model-parallel-size 2", ranks=list(range(8))
    )
    for stage in (ranks[:4], ranks[4:]):
        for other in stage[1:]:
            assert comparable(other) == comparable(stage[0])
            assert ops_of(other) == ops_of(stage[0])
    assert [t["groups"]["tp"] for t in ranks[:4]] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_without_storage_equals_real_tensors_to_the_byte(tmp_path: Path) -> None:
    args = DENSE + "--global-batch-size 16 --tensor-model-parallel-size 2 --sequence-parallel "
    args += "--pipeline-model-parallel-size 2"
    fake = traces(tmp_path, 8, args)
    real = traces(tmp_path, 8, args, storage="real")
    for one, two in zip(fake, real, strict=True):
        assert one["static"] == two["static"]
        assert [c["memory"] for c in one["chunks"]] == [c["memory"] for c in two["chunks"]]
        assert [op["name"] for op in one["ops"]] == [op["name"] for op in two["ops"]]


def test_experts_get_every_token_topk_times(tmp_path: Path) -> None:
    experts, topk, ep = 8, 2, 4
    args = DENSE + (
        f"--global-batch-size 16 --num-experts {experts} --moe-router-topk {topk} "
        f"--expert-model-parallel-size {ep} --expert-tensor-parallel-size 1 --moe-grouped-gemm "
        "--moe-token-dispatcher-type alltoall"
    )
    trace = traces(tmp_path, 4, args)[0]
    rows = SEQ * MBS * topk
    grouped = [op for op in ops_of(trace) if op["family"] == "grouped_gemm"]
    assert len(grouped) == 6 * LAYERS
    assert sum(op["flops"] for op in grouped) == 6 * rows * 3 * HIDDEN * FFN * LAYERS
    assert {dict(map(tuple, op["attrs"]))["groups"] for op in grouped} == {experts // ep}
    sent = [
        op["collective"]["bytes"]
        for op in ops_of(trace, "forward")
        if op["collective"] and op["collective"]["kind"] == "all_to_all"
    ]
    assert sent.count(rows * HIDDEN * 2) == 2 * LAYERS  # dispatch and combine
    assert trace["global_parameters"] - trace["active_parameters"] == (
        LAYERS * (experts - topk) * 3 * HIDDEN * FFN
    )

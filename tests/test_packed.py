"""Packed documents: batches say where documents begin, and layers run on ``thd`` tensors."""

from __future__ import annotations

from pathlib import Path

import pytest

from primus_ext import trace_io
from primus_ext.cluster_data import load_cluster
from primus_ext.project import compose
from tests.emulation import emulate, ops_of

LAYERS, HIDDEN, HEADS, SEQ = 2, 128, 4, 128
MODEL = (
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads {HEADS} "
    f"--seq-length {SEQ} --max-position-embeddings {SEQ} --global-batch-size 8 --vocab-size 1023 "
)
WORLD = 2


def composed(folder: Path, args: str) -> tuple[list[int], dict]:
    answer = emulate(folder, WORLD, MODEL + args)
    assert answer["status"] == "ok", (answer, answer["stderr"][-3000:])
    projection = compose.project(
        trace_io.plan_from_plain(answer["plan"]), trace_io.traces_from_plain(answer["traces"]),
        load_cluster("h100", 1, WORLD), mode="simulate",
    )  # fmt: skip
    assert any("packed documents" in line for line in projection.not_modelled)
    return [role.peak_bytes for role in projection.memory.per_role], answer


def whole(folder: Path, args: str, ranks: list[int], **request: str) -> list[int]:
    answer = emulate(folder, WORLD, MODEL + args, whole=True, ranks=ranks, **request)
    assert answer["status"] == "ok", (answer, answer["stderr"][-3000:])
    return [trace["peak_bytes"] for trace in answer["traces"]]


@pytest.fixture(scope="module")
def sft(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[int], dict]:
    return composed(tmp_path_factory.mktemp("sft"), "--sft --micro-batch-size 2")


def test_peak_is_that_of_the_whole_rank_and_of_real_tensors(
    sft: tuple[list[int], dict], tmp_path: Path
) -> None:
    args = "--sft --micro-batch-size 2"
    assert sft[0] == whole(tmp_path, args, [0]) == whole(tmp_path, args, [0], storage="real")


def test_attention_works_on_whole_documents(sft: tuple[list[int], dict]) -> None:
    """Two documents, one a sequence, that don't see each other, as one row of tokens."""
    ops = ops_of(sft[1]["traces"][0], "forward")
    attention = [op for op in ops if op["family"] == "attention"]
    pairs = SEQ * (SEQ + 1) // 2
    assert sum(op["flops"] for op in attention) == LAYERS * 2 * 2 * 2 * pairs * HIDDEN
    for op in attention:
        assert [2 * SEQ, HEADS, HIDDEN // HEADS] in [list(i["shape"]) for i in op["inputs"]], op


def test_a_rank_that_reads_no_data_is_sent_the_boundaries(tmp_path: Path) -> None:
    args = "--sft --micro-batch-size 1 --tensor-model-parallel-size 2 --sequence-parallel"
    answer = emulate(tmp_path, WORLD, MODEL + args, ranks=[0, 1])
    assert answer["status"] == "ok", (answer, answer["stderr"][-3000:])
    first, second = answer["traces"]
    assert first["static"] == second["static"]
    assert [c["memory"] for c in first["chunks"]] == [c["memory"] for c in second["chunks"]]
    # how many boundaries there are, and these
    sent = [
        op["collective"]["bytes"] for op in ops_of(second)
        if op["collective"] and op["collective"]["kind"] == "broadcast"
    ]  # fmt: skip
    assert 4 * (SEQ + 1) in sent and 8 in sent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "ranks"),
    [
        ("--sft --micro-batch-size 1 --pipeline-model-parallel-size 2", [0, 1]),
        ("--sft --micro-batch-size 1 --context-parallel-size 2", [0]),
    ],
)
def test_peak_with_other_parallel_degrees(tmp_path: Path, args: str, ranks: list[int]) -> None:
    found = composed(tmp_path, args)[0]
    assert found == whole(tmp_path, args, ranks)
    assert found == whole(tmp_path, args, ranks, storage="real")

"""A user's own layer is traced as it is: ops, memory and parameters, without a change to us."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from primus_ext import trace_io
from primus_ext.cluster_data import load_cluster
from primus_ext.project import compose
from tests.emulation import emulate, ops_of

HIDDEN, FFN, LAYERS, SEQ, MBS = 256, 1024, 4, 128, 2
TOKENS = SEQ * MBS
ARGS = (
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --ffn-hidden-size {FFN} "
    f"--num-attention-heads 8 --seq-length {SEQ} --max-position-embeddings {SEQ} "
    f"--micro-batch-size {MBS} --vocab-size 1023 --make-vocab-size-divisible-by 128 "
    "--global-batch-size 8 --pipeline-model-parallel-size 2"
)
PROGRAM = Path(__file__).parent / "own_layer" / "train.py"


def run(tmp_path: Path, **request: Any) -> dict[str, Any]:
    answer = emulate(tmp_path, 2, ARGS, module=None, script=str(PROGRAM), **request)
    assert answer["status"] == "ok", (answer, answer["stderr"][-3000:])
    return answer


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("own"))


def test_its_ops_are_recorded_below_its_modules(answer: dict[str, Any]) -> None:
    trace = answer["traces"][0]
    layer = next(s for s in trace["chunks"][0]["segments"] if s["kind"] == "dense_layer")
    assert layer["count"] == LAYERS // 2
    names = {trace["ops"][c["op"]]["name"]: c["module"] for c in layer["forward"]}
    assert names["mine.halve"] == "mlp"
    assert names["aten.relu"] == "mlp"
    assert "mlp.own_norm" in {c["module"] for c in layer["forward"]}
    backward = [trace["ops"][c["op"]]["name"] for c in layer["backward"]]
    assert backward.count("mine.halve") == 1  # the own operator's own gradient


def test_its_matrices_and_its_norm_count(answer: dict[str, Any]) -> None:
    trace = answer["traces"][0]
    matrices = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN
    norms = 2 * HIDDEN + FFN
    assert trace["parameters"] == LAYERS // 2 * (matrices + norms) + 1024 * HIDDEN
    flops = sum(op["flops"] for op in ops_of(trace) if op["family"] == "gemm")
    assert flops == 6 * matrices * TOKENS * LAYERS // 2


def test_composition_is_the_whole_rank(answer: dict[str, Any], tmp_path: Path) -> None:
    plan = trace_io.plan_from_plain(answer["plan"])
    traces = trace_io.traces_from_plain(answer["traces"])
    projection = compose.project(plan, traces, load_cluster("h100", 1, 2), mode="simulate")
    whole = run(tmp_path, whole=True, ranks=[0, 1])["traces"]
    for role, one in zip(projection.memory.per_role, whole, strict=True):
        assert 0 <= one["peak_bytes"] - role.peak_bytes <= 8 * 8 + 64  # logged scalars


def test_an_op_that_nobody_knows_is_a_named_line(answer: dict[str, Any]) -> None:
    plan = trace_io.plan_from_plain(answer["plan"])
    traces = trace_io.traces_from_plain(answer["traces"])
    projection = compose.project(plan, traces, load_cluster("h100", 1, 2), mode="simulate")
    lines = [line for line in projection.warnings if "mine.halve" in line]
    count = 2 * LAYERS // 2
    assert lines == [
        "op mine.halve is not known: priced as one pass over its inputs and outputs "
        f"({count} in a microbatch, first in mlp)"
    ]
    assert len(projection.warnings) == 1

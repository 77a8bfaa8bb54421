"""Hybrid models: Mamba, attention, MLP and expert layers from a pattern."""

from __future__ import annotations

from pathlib import Path

import pytest

from primus_ext.trace import RankTrace, ScopeKind, Segment
from tests.breadth import HIDDEN, MBS, SEQ, SHAPE, Compared, assert_same, compared
from tests.emulation import emulate

DIM, STATE, GROUPS, CHUNK = 64, 64, 2, 128
INNER, HEADS = 2 * HIDDEN, 2 * HIDDEN // DIM
MAMBA = f"--mamba-head-dim {DIM} --mamba-state-dim {STATE} --mamba-num-groups {GROUPS} "
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel "
PP2 = "--pipeline-model-parallel-size 2 "
MOE = (
    "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 "
    "--expert-tensor-parallel-size 1 --moe-grouped-gemm --moe-token-dispatcher-type alltoall "
)


def hybrid(pattern: str) -> str:
    return SHAPE + MAMBA + f"--hybrid-layer-pattern {pattern} "


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> list[Compared]:
    return compared(tmp_path_factory.mktemp("hybrid"), 4, hybrid("M*-M|M-M*") + TP2 + PP2)


def segments(trace: RankTrace, kind: ScopeKind) -> list[Segment]:
    return [s for s in trace.chunks[0].segments if s.kind is kind]


def test_composed_is_the_whole_rank(stages: list[Compared]) -> None:
    assert_same(stages)


def test_layers_are_parts_of_their_kind(stages: list[Compared]) -> None:
    for one in stages:
        counts = {kind: sum(s.count for s in segments(one.trace, kind)) for kind in ScopeKind}
        assert counts[ScopeKind.MAMBA_LAYER] == 2
        assert counts[ScopeKind.ATTENTION_LAYER] == counts[ScopeKind.MLP_LAYER] == 1
        assert counts[ScopeKind.DENSE_LAYER] == counts[ScopeKind.MOE_LAYER] == 0
    roles = [one.composed.role for one in stages]
    assert roles == ["pp stage 0 (embedding, 4 layers)", "pp stage 1 (4 layers, output)"]


def test_mamba_layer_computes_what_the_published_algorithm_does(stages: list[Compared]) -> None:
    trace = stages[1].trace
    (layer, *_) = segments(trace, ScopeKind.MAMBA_LAYER)
    calls = [trace.ops[c.op] for c in (*layer.forward, *layer.backward)]
    gemms = sum(op.flops for op in calls if op.family == "gemm")
    columns = 2 * INNER + 2 * GROUPS * STATE + HEADS
    assert gemms == 6 * MBS * SEQ * HIDDEN * (columns + INNER) // 2
    # per step and head: states made and read; the causal half within a chunk; scores per group
    heads, groups = HEADS // 2, GROUPS // 2
    forward = MBS * SEQ * (
        heads * (2 * 2 * DIM * STATE + (CHUNK + 1) * DIM) + groups * 2 * CHUNK * STATE
    )
    scans = [op for op in calls if op.name == "primus_mamba.scan_fwd"]
    assert [op.flops for op in scans] == [forward]
    # the convolution runs once more in the backward
    assert sum(op.name == "primus_mamba.conv_fwd" for op in calls) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "args"),
    [
        pytest.param(2, hybrid("M|*-|M|*-") + PP2, id="virtual stages"),
        pytest.param(2, hybrid("MM*-") + "--context-parallel-size 2", id="cp2"),
        pytest.param(
            1, hybrid("M*-M") + "--recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 1", id="full recompute",
        ),
        pytest.param(1, hybrid("*-*-"), id="a transformer"),
        pytest.param(1, hybrid("M*-M") + "--mamba-head-dim 32 --fp8-format hybrid "
                     "--fp8-recipe tensorwise", id="fp8"),
    ],
)  # fmt: skip
def test_hybrid_composition_is_the_whole_rank(tmp_path: Path, world: int, args: str) -> None:
    assert_same(compared(tmp_path, world, args))


@pytest.mark.slow
def test_expert_layers_of_hybrid_models(tmp_path: Path) -> None:
    (one,) = found = compared(tmp_path, 2, hybrid("M*E") + MOE)
    assert_same(found)
    assert sum(s.count for s in segments(one.trace, ScopeKind.MOE_LAYER)) == 1


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("M*-M-", "hybrid_layer_pattern='M*-M-' has 5 layers, which can't be split over pp=2"),
        ("M*X-", "X"),
    ],
)
def test_patterns_that_cannot_be_split_are_refused(
    tmp_path: Path, pattern: str, words: str
) -> None:
    answer = emulate(tmp_path, 2, hybrid(pattern) + PP2)
    assert (answer["status"], answer["exit_code"]) == ("error", 2), answer
    assert words in answer["message"]

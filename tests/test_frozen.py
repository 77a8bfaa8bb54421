"""Frozen parameters: a program that trains adapters only, without any change to this package."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.breadth import FFN, HIDDEN, MBS, MODEL, PP2, SEQ, Compared, assert_same, compared

PROGRAM = Path(__file__).with_name("adapters_program.py")
RANK = 8
"""Of the adapters in that program."""
ADAPTERS = RANK * (HIDDEN + HIDDEN) + RANK * (FFN + HIDDEN)
"""Trained elements of one layer."""


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> list[Compared]:
    path = tmp_path_factory.mktemp("adapters")
    return compared(path, 2, MODEL + PP2, module=None, script=str(PROGRAM))


def test_composed_is_the_whole_rank(stages: list[Compared]) -> None:
    assert_same(stages)


def test_only_adapters_have_gradients_and_optimizer_state(stages: list[Compared]) -> None:
    for one in stages:
        trained = 2 * ADAPTERS
        assert trained <= one.composed.parts.gradients // 4 <= trained + 512
        assert 12 * trained <= one.composed.parts.optimizer <= 12 * (trained + 512) + 64
        # frozen weights stay as they are: two bytes each, beside those in the buffer
        assert one.composed.parts.parameters >= 2 * one.composed.parameters


def test_frozen_matrices_have_no_weight_gradient(stages: list[Compared]) -> None:
    """The second stage: its input needs a gradient, so every matrix has its data gradient."""
    trace, tokens = stages[1].trace, MBS * SEQ
    flops = 0
    for segment in trace.chunks[0].segments:
        for call in (*segment.forward, *segment.backward):
            op = trace.ops[call.op]
            flops += op.flops * segment.count if op.family == "gemm" else 0
    layer = HIDDEN * HIDDEN * (2 + 2 * 2 / 8) + 3 * HIDDEN * FFN
    frozen = 2 * layer + HIDDEN * 1024  # two layers and the output
    assert flops == tokens * (4 * frozen + 6 * 2 * ADAPTERS)

"""Variants of attention, activation, positions and loss: each runs, and composes as it should."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.breadth import HEADS, HIDDEN, MBS, MODEL, SEQ, assert_same, compared
from tests.emulation import COMMON, emulate

pytestmark = pytest.mark.slow
WINDOW = 31


def without(*options: str) -> list[str]:
    """What every test has, without some options and their values."""
    kept, skip = [], False
    for argument in COMMON:
        if argument.startswith("--"):
            skip = argument in options
        kept += [] if skip else [argument]
    return kept


def test_sliding_window_counts_its_pairs_in_every_second_layer(tmp_path: Path) -> None:
    args = f"--window-size {WINDOW},0 --window-attn-skip-freq 2 --qk-layernorm "
    (one,) = found = compared(tmp_path, 1, MODEL + args + "--softmax-type learnable")
    assert_same(found)
    flops = [
        one.trace.ops[call.op].flops
        for segment in one.trace.chunks[0].segments
        for call in segment.forward
        for _ in range(segment.count)
        if one.trace.ops[call.op].family == "attention"
    ]
    full = SEQ * (SEQ + 1) // 2
    near = full - (SEQ - WINDOW - 1) * (SEQ - WINDOW) // 2
    each = 4 * MBS * HIDDEN
    assert sorted(flops) == [each * near] * 2 + [each * full] * 2


@pytest.mark.parametrize(
    ("dropped", "args"),
    [
        pytest.param(
            ("--position-embedding-type", "--swiglu", "--hidden-dropout", "--attention-dropout"),
            "--position-embedding-type learned_absolute --squared-relu --hidden-dropout 0.1 "
            "--attention-dropout 0.1 --cross-entropy-loss-fusion "
            "--cross-entropy-fusion-impl native",
            id="learned positions, squared relu, dropout, fused loss",
        ),
        pytest.param(
            ("--position-embedding-type", "--normalization", "--disable-bias-linear"),
            "--position-embedding-type yarn --normalization LayerNorm --attention-backend fused",
            id="yarn, layer norm, biases, fused",
        ),
    ],
)
def test_variants_compose(tmp_path: Path, dropped: tuple[str, ...], args: str) -> None:
    assert_same(compared(tmp_path, 2, MODEL + args, common=without(*dropped)))


def test_unfused_attention_keeps_its_scores(tmp_path: Path) -> None:
    (plain,) = emulate(tmp_path, 1, MODEL)["traces"]
    (one,) = found = compared(tmp_path, 1, MODEL + "--attention-backend unfused")
    assert_same(found)
    more = one.trace.chunks[0].memory.saved_bytes - plain["chunks"][0]["memory"]["saved_bytes"]
    scores = 2 * MBS * HEADS * SEQ * SEQ
    assert more >= 4 * scores  # of four layers, the softmax's result alone


def test_flash_attention_is_the_package_s(tmp_path: Path) -> None:
    """Its backward sums in fp32, and gives k and v a gradient for every query head at first."""
    (one,) = found = compared(tmp_path, 1, MODEL + "--attention-backend flash")
    assert_same(found)
    ops = [op for op in one.trace.ops if op.family == "attention"]
    assert {op.name for op in ops} == {
        "primus_flash.fused_attn_fwd", "primus_flash.fused_attn_bwd"
    }  # fmt: skip
    pairs = SEQ * (SEQ + 1) // 2
    assert {op.flops for op in ops} == {4 * MBS * HIDDEN * pairs, 10 * MBS * HIDDEN * pairs}

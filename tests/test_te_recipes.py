"""Memory and numbers of the low-precision recipes through Transformer Engine's own modules."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests import te_world
from tests.te_world import INNER, OUTER, ROWS

CASES = [
    ("8.9", "DelayedScaling"), ("9.0", "DelayedScaling"), ("9.0", "Float8CurrentScaling"),
    ("9.0", "Float8BlockScaling"), ("10.0", "DelayedScaling"), ("10.0", "Float8CurrentScaling"),
    ("10.0", "Float8BlockScaling"), ("10.0", "MXFP8BlockScaling"), ("10.0", "NVFP4BlockScaling"),
]  # fmt: skip

KINDS = ("linear", "layernorm_linear", "grouped")


def up(value: int, multiple: int) -> int:
    return math.ceil(value / multiple) * multiple


def copies(rows: int, cols: int, capability: str, recipe: str, weight: bool) -> tuple[int, int]:
    """Bytes of the copy used by rows and of the one used by columns, scales included.

    From the formats' definitions: FP8 with one factor (and, before Blackwell, a transposed second
    copy that shares it), blocks of 128 (fp32 factors, their minor dimension padded to 4), of 32
    (one byte each, padded to tiles of 128 x 4) and of 16 (the same, two values a byte).
    """
    if recipe in ("DelayedScaling", "Float8CurrentScaling"):
        return rows * cols + 4, 0 if capability == "10.0" else rows * cols
    if recipe == "Float8BlockScaling":
        if weight:
            by_row = math.ceil(rows / 128) * up(math.ceil(cols / 128), 4)
            by_col = math.ceil(cols / 128) * up(math.ceil(rows / 128), 4)
        else:
            by_row = math.ceil(cols / 128) * up(rows, 4)
            by_col = math.ceil(rows / 128) * up(cols, 4)
        return rows * cols + 4 * by_row, rows * cols + 4 * by_col
    block, width = (32, 1) if recipe == "MXFP8BlockScaling" else (16, 2)
    amax = 4 if width == 2 else 0
    by_row = up(rows, 128) * up(cols // block, 4)
    by_col = up(cols, 128) * up(rows // block, 4)
    data = rows * cols // width
    return data + by_row + amax, data + by_col + amax


def for_weight_gradient(capability: str, recipe: str) -> int:
    """The input as the weight gradient's GEMM reads it."""
    by_row, by_col = copies(ROWS, INNER, capability, recipe, False)
    if recipe in ("DelayedScaling", "Float8CurrentScaling"):
        return by_row if capability == "10.0" else by_col + 4
    return by_col


@pytest.fixture(scope="module")
def answers() -> Any:
    cache: dict = {}

    def get(capability: str, recipe: str, kind: str) -> dict:
        if capability not in cache:
            programs = [
                f"recipes:{r}:{k}" for c, r in CASES for k in KINDS if c == capability]
            cache[capability] = te_world.run(capability, *programs)
        return cache[capability][f"recipes:{recipe}:{kind}"]

    return get


@pytest.mark.parametrize(("capability", "recipe"), CASES)
def test_bytes_that_a_linear_layer_saves(answers: Any, capability: str, recipe: str) -> None:
    saved = sum(size for size, _, _ in answers(capability, recipe, "linear")["fake"]["saved"])
    weight = 2 * OUTER * INNER + sum(copies(OUTER, INNER, capability, recipe, True))
    activation = for_weight_gradient(capability, recipe)
    if (capability, recipe) == ("9.0", "DelayedScaling") or capability == "8.9":
        # cast once with delayed scaling, the input is kept as it is and transposed when needed
        activation = ROWS * INNER + 4
    assert saved == weight + activation


@pytest.mark.parametrize(("capability", "recipe"), CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_fake_tensors_take_what_real_ones_take(
    answers: Any, capability: str, recipe: str, kind: str
) -> None:
    answer = answers(capability, recipe, kind)
    fake = answer["fake"]
    assert fake["saved"] and fake["peak"] > 0
    real = answer["real"]
    assert fake["saved"] == real["saved"]
    assert fake["peak"] == real["peak"]
    assert fake["ops"] == real["ops"]


@pytest.mark.parametrize(("capability", "recipe"), CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_stay_near(answers: Any, capability: str, recipe: str, kind: str) -> None:
    """Output, input and parameter gradients against bf16.

    E4M3 rounds to 2**-4, E5M2 to 2**-3, E2M1 to 2**-2.
    """
    errors = answers(capability, recipe, kind)["errors"]
    limits = {"DelayedScaling": 0.08, "Float8CurrentScaling": 0.08, "NVFP4BlockScaling": 0.2}
    limit = limits.get(recipe, 0.05)
    assert max(errors) <= limit
    assert sum(e > 0.01 for e in errors) >= 2  # it was quantized


def test_gemms_read_quantized_operands(answers: Any) -> None:
    ops = answers("10.0", "MXFP8BlockScaling", "linear")["fake"]["ops"]
    gemms = [attrs for name, _, attrs in ops if name == "primus_te::gemm"]
    assert [(g["layout"], g["m"], g["n"], g["k"]) for g in gemms] == [
        ("TN", ROWS, OUTER, INNER), ("NN", ROWS, INNER, OUTER), ("NT", OUTER, INNER, ROWS)]
    assert {g["a_format"] for g in gemms} == {g["b_format"] for g in gemms} == {"fp8_e4m3/mxfp8"}
    ops = answers("10.0", "NVFP4BlockScaling", "linear")["fake"]["ops"]
    kinds = [attrs["hadamard"] for name, _, attrs in ops if name == "primus_te::quantize"]
    assert True in kinds and False in kinds  # weights are not transformed

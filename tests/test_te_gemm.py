"""Matrix products of the Transformer Engine stand-in against torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from primus_ext.emulate.te import target
from primus_ext.emulate.te.enums import DType
from primus_ext.emulate.te.gemm import generic_gemm
from primus_ext.emulate.te.grouped_gemm import te_general_grouped_gemm

DTYPES = {
    torch.float32: DType.kFloat32,
    torch.bfloat16: DType.kBFloat16,
    torch.float16: DType.kFloat16,
}
SIZES = st.integers(1, 9)
LAYOUTS = ("TN", "NN", "NT")


@pytest.fixture(autouse=True)
def hopper() -> None:
    target.set_target((9, 0))


def gemm(a: torch.Tensor, b: torch.Tensor, layout: str, out: Any = None, **options: Any) -> list:
    """``generic_gemm`` with the defaults of a plain product."""
    bias = options.pop("bias", None)
    arguments = {
        "output_dtype": options.pop("output_dtype", None), "bias": bias,
        "bias_type": DTYPES[bias.dtype if bias is not None else torch.bfloat16],
        "gelu": False, "gelu_in": None, "grad": False, "workspace": torch.empty(0),
        "workspace_size": 0, "accumulate": False, "use_split_accumulator": False, **options,
    }  # fmt: skip
    return generic_gemm(a, layout[0] == "T", b, layout[1] == "T", out, None, **arguments)


def operands(layout: str, m: int, n: int, k: int, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """A, B of the layout and the product (m, n) in fp64."""
    a = torch.randn((n, k) if layout[0] == "T" else (k, n)).to(dtype)
    b = torch.randn((k, m) if layout[1] == "T" else (m, k)).to(dtype)
    left = b.double().t() if layout[1] == "T" else b.double()
    right = a.double().t() if layout[0] == "T" else a.double()
    return a, b, left @ right


def close(value: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    limit = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    assert (value.double() - expected).norm() <= limit * max(expected.norm(), 1e-6)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(LAYOUTS), SIZES, SIZES, SIZES, st.sampled_from(list(DTYPES)))
def test_every_layout_is_the_product(layout: str, m: int, n: int, k: int, dtype: Any) -> None:
    a, b, expected = operands(layout, m, n, k, dtype)
    d, bias_grad, pre_gelu, extra = gemm(a, b, layout)
    assert d.dtype == dtype and d.shape == (m, n)
    assert bias_grad is None and pre_gelu is None and extra is None
    close(d, expected, dtype)


def test_leading_dimensions_of_b_are_kept() -> None:
    a, b = torch.randn(5, 8), torch.randn(4, 3, 8)
    d = gemm(a, b, "TN")[0]
    assert d.shape == (4, 3, 5)
    close(d, b.double() @ a.double().t(), torch.float32)


def test_wrong_contraction_is_refused() -> None:
    with pytest.raises(RuntimeError, match="invalid matrix dimensions"):
        gemm(torch.randn(5, 8), torch.randn(4, 7), "TN")


def test_weight_gradient_accumulates_in_fp32_main_grad() -> None:
    a, b, expected = operands("NT", 6, 5, 32, torch.bfloat16)
    main_grad = torch.randn(6, 5)
    before = main_grad.double()
    out = gemm(a, b, "NT", main_grad, accumulate=True)[0]
    assert out is main_grad
    close(main_grad, before + expected, torch.float32)
    gemm(a, b, "NT", main_grad)
    close(main_grad, expected, torch.float32)


def test_bias_and_its_gradient() -> None:
    a, b, expected = operands("TN", 6, 5, 8, torch.bfloat16)
    bias = torch.randn(5).bfloat16()
    close(gemm(a, b, "TN", bias=bias)[0], expected + bias.double(), torch.bfloat16)
    x, dy, dw = operands("NT", 5, 8, 6, torch.bfloat16)
    d, bias_grad, _, _ = gemm(x, dy, "NT", bias=torch.empty(5).bfloat16(), grad=True)
    close(d, dw, torch.bfloat16)
    close(bias_grad, dy.double().sum(0), torch.bfloat16)


def test_gelu_epilogues_match_autograd() -> None:
    a, b, _ = operands("TN", 6, 5, 8, torch.float32)
    d, _, pre, _ = gemm(a, b, "TN", gelu=True)
    close(pre, b.double() @ a.double().t(), torch.float32)
    close(d, torch.nn.functional.gelu(pre.double(), approximate="tanh"), torch.float32)
    x = pre.double().requires_grad_()
    upstream = torch.randn(6, 5)
    torch.nn.functional.gelu(x, approximate="tanh").backward(upstream.double())
    identity = torch.eye(5)
    dx = gemm(identity, upstream, "NN", gelu=True, gelu_in=pre, grad=True)[0]
    close(dx, x.grad, torch.float32)


def grouped(
    a: list, b: list, out: list, layout: str, single: bool, accumulate: bool = False,
    bias: list | None = None, grad: bool = False,
) -> list:
    empty = [torch.empty(0)] * len(a)
    return te_general_grouped_gemm(
        a, layout[0] == "T", b, layout[1] == "T", out, DTYPES[out[0].dtype], [], bias or empty,
        DType.kBFloat16, single, empty, grad, [torch.empty(0)], 0, accumulate, False, 0,
    )  # fmt: skip


@pytest.mark.parametrize("splits", [[3, 0, 5], [4, 4, 4], [0, 0, 1]])
def test_grouped_forward_equals_a_loop(splits: list[int]) -> None:
    weights = [torch.randn(6, 8) for _ in splits]
    inputs = [torch.randn(rows, 8) for rows in splits]
    biases = [torch.randn(6) for _ in splits]
    out = torch.full((sum(splits), 6), float("nan"))
    grouped(weights, inputs, [out], "TN", single=True, bias=biases)
    expected = torch.cat(
        [x @ w.t() + bias for x, w, bias in zip(inputs, weights, biases, strict=True)]
    )
    torch.testing.assert_close(out, expected)


def test_grouped_weight_gradient_accumulates_and_leaves_idle_experts_alone() -> None:
    splits = [3, 0, 5]
    inputs = [torch.randn(rows, 8) for rows in splits]
    gradients = [torch.randn(rows, 6) for rows in splits]
    outs = [torch.randn(6, 8) for _ in splits]
    before = [o.clone() for o in outs]
    bias_grads = [torch.full((6,), float("nan")) for _ in splits]
    grouped(inputs, gradients, outs, "NT", False, accumulate=True, bias=bias_grads, grad=True)
    for x, dy, out, old, bias in zip(inputs, gradients, outs, before, bias_grads, strict=True):
        torch.testing.assert_close(out, old + dy.t() @ x)
        torch.testing.assert_close(bias, dy.sum(0))
    grouped(inputs, gradients, outs, "NT", False)
    assert torch.equal(outs[1], torch.zeros(6, 8))

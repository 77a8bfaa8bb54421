"""Activations, softmax, rope and router kernels of the stand-in against torch autograd."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from primus_ext.emulate.te import enums, rope, router, softmax
from primus_ext.emulate.te.activations import gradient_name
from primus_ext.emulate.te.bindings import BINDINGS


def _gated(function: Callable) -> Callable:
    def apply(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return function(first) * second

    return apply


def _clamped(x: torch.Tensor) -> torch.Tensor:
    """GPT-OSS: clamp both halves, quick GELU, and one added to the linear half."""
    first, second = x.chunk(2, -1)
    first, second = first.clamp(max=1.5), second.clamp(-1.5, 1.5)
    return first * torch.sigmoid(1.702 * first) * (second + 1)


def _situ(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return 4 * torch.tanh(first / 4) * torch.sigmoid(first) * 25 * torch.tanh(second / 25)


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


def _quick(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


REFERENCES: dict[str, Callable] = {
    "gelu": _gelu, "qgelu": _quick, "relu": functional.relu,
    "srelu": lambda x: functional.relu(x) ** 2, "silu": functional.silu,
    "glu": _gated(torch.sigmoid), "geglu": _gated(_gelu), "qgeglu": _gated(_quick),
    "reglu": _gated(functional.relu), "sreglu": _gated(lambda x: functional.relu(x) ** 2),
    "swiglu": _gated(functional.silu), "clamped_swiglu": _clamped, "situglu": _situ,
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFERENCES))
def test_activation(name: str) -> None:
    options = {"limit": 1.5} if name == "clamped_swiglu" else {}
    x = torch.randn(4, 3, 16, dtype=torch.float64, requires_grad=True)
    expected = REFERENCES[name](x)
    upstream = torch.randn_like(expected)
    expected.backward(upstream)
    x32 = x.detach().float()
    y = BINDINGS[name](x32, None, **options)
    torch.testing.assert_close(y.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    dx = BINDINGS[gradient_name(name)](upstream.float(), x32, None, **options)
    torch.testing.assert_close(dx.double(), x.grad, rtol=1e-4, atol=1e-5)


def test_bias_gradient_of_an_activation() -> None:
    x, upstream = torch.randn(5, 8), torch.randn(5, 8)
    bias, gradient = BINDINGS["dbias_dgelu"](upstream, x, None)
    torch.testing.assert_close(gradient, BINDINGS["dgelu"](upstream, x, None))
    torch.testing.assert_close(bias, gradient.sum(0))


@pytest.mark.parametrize("kind", ["full", "masked", "triangle", "aligned"])
def test_scaled_softmax(kind: str) -> None:
    rows, cols, scale = (8, 8, 0.5) if kind == "triangle" else (4, 8, 0.5)
    x = torch.randn(2, 3, rows, cols).bfloat16()
    hidden = torch.zeros(2, 1, rows, cols, dtype=torch.bool)
    if kind == "masked":
        hidden[:, :, 1, 3:] = True
        y = softmax.scaled_masked_softmax_forward(x, hidden, scale)
    elif kind == "triangle":
        hidden = torch.ones(rows, cols, dtype=torch.bool).triu(1)
        x = x.flatten(0, 1)
        y = softmax.scaled_upper_triang_masked_softmax_forward(x, scale)
    elif kind == "aligned":
        hidden = torch.ones(rows, cols, dtype=torch.bool).triu(1 + cols - rows)
        y = softmax.scaled_aligned_causal_masked_softmax_forward(x, scale)
    else:
        y = softmax.scaled_softmax_forward(x, scale)
    leaf = x.double().requires_grad_()
    expected = torch.softmax((leaf * scale).masked_fill(hidden, -1e9), -1)
    upstream = torch.randn(x.shape).bfloat16()
    expected.backward(upstream.double())
    torch.testing.assert_close(y.double(), expected.detach(), rtol=1e-2, atol=1e-3)
    dx = softmax.scaled_softmax_backward(upstream, y, scale)
    torch.testing.assert_close(dx.double(), leaf.grad, rtol=3e-2, atol=3e-3)


def test_softmax_refuses_fp32_as_the_real_kernel_does() -> None:
    with pytest.raises(RuntimeError, match="only fp16 and bf16"):
        softmax.scaled_softmax_forward(torch.randn(1, 1, 2, 8), 1.0)


def rotated(x: torch.Tensor, positions: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotation of pairs by complex numbers; x is (tokens, heads, dim)."""
    half = x.shape[-1] // 2
    angle = positions[:, None].double() / 10000.0 ** (torch.arange(half) / half)
    pairs = x.unflatten(-1, (half, 2)) if interleaved else x.unflatten(-1, (2, half)).mT
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(
        torch.ones_like(angle), angle)[:, None, :]
    back = torch.view_as_real(turned)
    return back.flatten(-2) if interleaved else back.mT.flatten(-2)


def frequencies(length: int, dim: int, interleaved: bool) -> torch.Tensor:
    half = dim // 2
    angle = torch.arange(length)[:, None] / 10000.0 ** (torch.arange(half) / half)
    doubled = angle.repeat_interleave(2, -1) if interleaved else torch.cat((angle, angle), -1)
    return doubled.float()[:, None, None, :]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("fmt", ["sbhd", "bshd", "thd"])
def test_rope(fmt: str, interleaved: bool) -> None:
    member = enums.NVTE_QKV_Format[f"NVTE_{fmt.upper()}"]
    x = torch.randn(6, 2, 8, dtype=torch.float64, requires_grad=True)  # tokens, heads, dim
    lengths = [6] if fmt != "thd" else [4, 2]
    positions = torch.cat([torch.arange(n) for n in lengths])
    cu = None if fmt != "thd" else torch.tensor([0, 4, 6], dtype=torch.int32)
    width = 8 if interleaved else 6  # the rest of the head passes
    expected = torch.cat((rotated(x[..., :width], positions, interleaved), x[..., width:]), -1)
    upstream = torch.randn_like(expected)
    expected.backward(upstream)
    shape = {"sbhd": (6, 1, 2, 8), "bshd": (1, 6, 2, 8), "thd": (6, 2, 8)}[fmt]
    freqs = frequencies(8, width, interleaved)
    y = rope.fused_rope_forward(
        x.detach().float().view(shape), freqs, None, member, interleaved, cu, 1, 0)
    torch.testing.assert_close(y.double().view(6, 2, 8), expected.detach(), rtol=1e-5, atol=1e-5)
    dx = rope.fused_rope_backward(
        upstream.float().view(shape), freqs, None, member, interleaved, cu, 1, 0)
    torch.testing.assert_close(dx.double().view(6, 2, 8), x.grad, rtol=1e-5, atol=1e-5)


def test_rope_of_context_parallel_ranks_covers_the_whole_sequence() -> None:
    member, cp, length = enums.NVTE_QKV_Format["NVTE_SBHD"], 2, 16
    x = torch.randn(length, 1, 2, 8)
    freqs = frequencies(length, 8, False)
    whole = rope.fused_rope_forward(x, freqs, None, member, False, None, 1, 0)
    chunks = x.chunk(2 * cp)
    for rank in range(cp):
        pair = (rank, 2 * cp - 1 - rank)
        part = torch.cat([chunks[i] for i in pair])
        y = rope.fused_rope_forward(part, freqs, None, member, False, None, cp, rank)
        torch.testing.assert_close(y, torch.cat([whole.chunk(2 * cp)[i] for i in pair]))


def test_rope_of_packed_qkv_equals_the_parts() -> None:
    member, split = enums.NVTE_QKV_Format["NVTE_SBHD"], [16, 8, 8]
    qkv = torch.randn(5, 2, 3, 32)
    freqs = frequencies(5, 8, False)
    q, k, v = rope.fused_qkv_rope_forward(qkv, freqs, freqs, None, split, member, False, 1, 0)
    parts = qkv.split(split, -1)
    q0 = parts[0].reshape(5, 2, 6, 8)
    torch.testing.assert_close(
        q, rope.fused_rope_forward(q0, freqs, None, member, False, None, 1, 0))
    assert k.shape == (5, 2, 3, 8) and torch.equal(v, parts[2])
    grads = [torch.randn_like(t) for t in (q, k, v)]
    dqkv = rope.fused_qkv_rope_backward(*grads, freqs, freqs, split, member, False, 1, 0)
    assert dqkv.shape == qkv.shape
    dq = rope.fused_rope_backward(grads[0], freqs, None, member, False, None, 1, 0)
    torch.testing.assert_close(dqkv[..., :16], dq.reshape(5, 2, 3, 16))
    assert torch.equal(dqkv[..., 24:], grads[2])


def routed(x: torch.Tensor, function: str, pre: bool, topk: int, bias: Any, scale: float) -> Any:
    """Router as Megatron's unfused code computes it."""
    if function == "softmax":
        scores = torch.softmax(x, -1) if pre else x
        value, index = scores.topk(topk, -1)
        value = value if pre else torch.softmax(value, -1)
    else:
        scores = torch.sigmoid(x) if function == "sigmoid" else functional.softplus(x).sqrt()
        index = (scores if bias is None else scores + bias).topk(topk, -1)[1]
        value = scores.gather(-1, index)
        value = value / value.sum(-1, keepdim=True)
    return torch.zeros_like(x).scatter(-1, index, value * scale)


@pytest.mark.parametrize(
    ("function", "pre", "biased"),
    [("softmax", True, False), ("softmax", False, False), ("sigmoid", False, True),
     ("sqrtsoftplus", False, True)],
)  # fmt: skip
def test_router(function: str, pre: bool, biased: bool) -> None:
    x = torch.randn(7, 8, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(8) if biased else None
    expected = routed(x, function, pre, 3, bias, 2.5)
    upstream = torch.randn_like(expected)
    expected.backward(upstream)
    probs, routing_map, saved = router.fused_topk_with_score_function_fwd(
        x.detach().float(), 3, pre, None, None, 2.5, function, bias)
    torch.testing.assert_close(probs.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(routing_map, expected.detach() != 0)
    gradient = torch.empty_like(probs)
    router.fused_topk_with_score_function_bwd(
        routing_map, saved, upstream.float(), gradient, 3, pre, 2.5, function)
    torch.testing.assert_close(gradient.double(), x.grad, rtol=1e-4, atol=1e-5)


def test_router_limits_experts_to_the_best_groups() -> None:
    logits = torch.tensor([[9.0, -9.0, 5.0, 5.0, 4.0, 4.0, -9.0, 8.0]])
    _, routing_map, _ = router.fused_topk_with_score_function_fwd(
        logits, 4, False, 4, 2, None, "sigmoid", None)
    # groups of two by their two best sigmoids: (5, 5) and (4, 4) beat (9, -9) and (-9, 8)
    assert routing_map.tolist() == [[False, False, True, True, True, True, False, False]]


def test_auxiliary_loss() -> None:
    probs = torch.rand(6, 4, dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([3, 1, 5, 3])
    expected = 4 * 0.01 / (2 * 6 * 6) * (probs.sum(0) * tokens).sum()
    expected.backward()
    loss, factor = router.fused_moe_aux_loss_fwd(
        probs.detach().float(), tokens, 6, 4, 6, 4, 2, 0.01)
    assert math.isclose(float(loss), float(expected.detach()), rel_tol=1e-6)
    gradient = router.fused_moe_aux_loss_bwd(factor, tokens, 6, 4, torch.tensor(1.0))
    torch.testing.assert_close(gradient.double(), probs.grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_scores_for_the_auxiliary_loss(function: str) -> None:
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    raw = {"softmax": lambda: torch.softmax(x, -1), "sigmoid": lambda: torch.sigmoid(x),
           "sqrtsoftplus": lambda: functional.softplus(x).sqrt()}[function]()  # fmt: skip
    expected = raw if function == "softmax" else raw / raw.sum(-1, keepdim=True)
    upstream = torch.randn_like(expected)
    expected.backward(upstream)
    scores, routing_map, saved = router.fused_score_for_moe_aux_loss_fwd(
        x.detach().float(), 2, function)
    torch.testing.assert_close(scores.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    assert routing_map.sum(-1).tolist() == [2] * 5
    gradient = torch.empty(5, 6)
    router.fused_score_for_moe_aux_loss_bwd(saved, upstream.float(), gradient, 2, function)
    torch.testing.assert_close(gradient.double(), x.grad, rtol=1e-4, atol=1e-5)

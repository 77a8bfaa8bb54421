"""Scaled and masked softmax kernels of unfused attention (bf16 and fp16)."""

from __future__ import annotations

from typing import Any

import torch

from primus_ext.emulate.te.bindings import binding
from primus_ext.emulate.te.ops import define

_MASKED = -10000.0
"""What the masked kernel puts in place of a score (``scaled_masked_softmax.cu``)."""


def _half(x: torch.Tensor) -> None:
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError(f"only fp16 and bf16 are supported, got {x.dtype}")


def _fake(x: torch.Tensor, *_args: Any, **_attrs: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


@define(
    "scaled_softmax_fwd(Tensor x, Tensor? mask, *, float scale, str kind) -> Tensor", fake=_fake
)
def _softmax_fwd(x: torch.Tensor, mask: Any, *, scale: float, kind: str) -> torch.Tensor:
    scores = x.float() * scale
    if mask is not None:
        scores = scores.masked_fill(mask.bool(), _MASKED)
        everything = mask.bool().all(-1, keepdim=True)
        return torch.softmax(scores, -1).masked_fill(everything, 0.0).to(x.dtype)
    if kind != "full":
        rows, cols = scores.shape[-2:]
        # the aligned kernel puts the diagonal into the lower right corner
        shift = cols - rows if kind == "aligned_causal" else 0
        hidden = torch.ones(rows, cols, dtype=torch.bool).triu(1 + shift)
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.softmax(scores, -1).to(x.dtype)


@define("scaled_softmax_bwd(Tensor dy, Tensor y, *, float scale) -> Tensor", fake=_fake)
def _softmax_bwd(dy: torch.Tensor, y: torch.Tensor, *, scale: float) -> torch.Tensor:
    y32, dy32 = y.float(), dy.float()
    return (scale * y32 * (dy32 - (dy32 * y32).sum(-1, keepdim=True))).to(dy.dtype)


@binding()
def scaled_softmax_forward(input: torch.Tensor, scale_factor: float) -> torch.Tensor:
    """``softmax(scale * x)`` over the last dimension of [b, h, q, k]."""
    _half(input)
    return _softmax_fwd(input, None, scale=scale_factor, kind="full")


@binding()
def scaled_masked_softmax_forward(
    input: torch.Tensor, mask: torch.Tensor, scale_factor: float
) -> torch.Tensor:
    """The same without the positions where ``mask`` is true."""
    _half(input)
    return _softmax_fwd(input.contiguous(), mask.contiguous(), scale=scale_factor, kind="masked")


@binding()
def scaled_upper_triang_masked_softmax_forward(
    input: torch.Tensor, scale_factor: float
) -> torch.Tensor:
    """The same of square scores [b * h, s, s] without the upper triangle."""
    _half(input)
    return _softmax_fwd(input, None, scale=scale_factor, kind="upper_triangle")


@binding()
def scaled_aligned_causal_masked_softmax_forward(
    input: torch.Tensor, scale_factor: float
) -> torch.Tensor:
    """The same, causal, with the diagonal in the lower right corner."""
    _half(input)
    return _softmax_fwd(input, None, scale=scale_factor, kind="aligned_causal")


@binding(
    "scaled_softmax_backward",
    "scaled_masked_softmax_backward",
    "scaled_upper_triang_masked_softmax_backward",
    "scaled_aligned_causal_masked_softmax_backward",
)
def scaled_softmax_backward(
    output_grad: torch.Tensor, softmax_results: torch.Tensor, scale_factor: float
) -> torch.Tensor:
    """Gradient of all of the above with respect to their input."""
    return _softmax_bwd(output_grad.contiguous(), softmax_results.contiguous(), scale=scale_factor)

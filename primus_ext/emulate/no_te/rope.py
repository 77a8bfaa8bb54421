"""Rotary position embedding as one fused kernel."""

from __future__ import annotations

from typing import Any

import torch

from primus_ext.emulate.te import rope as _declares  # noqa: F401  (the operators)


class _Rotate(torch.autograd.Function):
    """Keeps the angles alone."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, freqs: torch.Tensor, interleaved: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(freqs)
        ctx.attrs = {"fmt": "sbhd", "interleaved": interleaved, "cp_size": 1, "cp_rank": 0}
        return torch.ops.primus_te.fused_rope_fwd(x, freqs, None, None, **ctx.attrs)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (freqs,) = ctx.saved_tensors
        dx = torch.ops.primus_te.fused_rope_bwd(dy.contiguous(), freqs, None, None, **ctx.attrs)
        return dx, None, None


def fused_apply_rotary_pos_emb(
    t: torch.Tensor, freqs: torch.Tensor, interleaved: bool = False, **_unused: Any
) -> torch.Tensor:
    """Rotate.

    Args:
        t: ``[seq, batch, heads, dim]``.
        freqs: Angles ``[seq, 1, 1, dim]``, fp32.
        interleaved: Whether pairs are neighbours.
    """
    return _Rotate.apply(t, freqs, interleaved)  # type: ignore[return-value]

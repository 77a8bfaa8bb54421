"""Exact attention of one sequence on real tensors (fp32), forward and backward.

The scores are materialised: this is the CPU kernel; the fake kernels never come here.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """What is attended to, and how the softmax is formed."""

    mask: str
    """no_mask, padding, causal, padding_causal, causal_bottom_right, ..."""
    window: tuple[int, int]
    bottom_right: bool
    """The window's diagonal ends in the lower right corner."""
    softmax: str
    """vanilla, off-by-one, learnable."""
    bias: str
    scale: float
    dropout: float

    @classmethod
    def of(cls, attrs: dict[str, Any]) -> Rule:
        """From the scalar arguments of the operator."""
        return cls(
            attrs["mask"], tuple(attrs["window"]), attrs["bottom_right"], attrs["softmax_type"],
            attrs["bias_type"], attrs["scale"], attrs["dropout"],
        )  # fmt: skip

    def visible(self, seq_q: int, seq_kv: int, device: torch.device) -> torch.Tensor | None:
        """Boolean (seq_q, seq_kv), True where attended; None if everything is."""
        left, right = self.window
        causal = "causal" in self.mask
        if not causal and left < 0 and right < 0:
            return None
        row = torch.arange(seq_q, device=device)[:, None]
        col = torch.arange(seq_kv, device=device)[None, :]
        seen = torch.ones(seq_q, seq_kv, dtype=torch.bool, device=device)
        if causal:
            seen &= col <= row + (seq_kv - seq_q if self.mask.endswith("bottom_right") else 0)
        diagonal = row + (seq_kv - seq_q if self.bottom_right else 0)
        if left >= 0:
            seen &= col >= diagonal - left
        if right >= 0:
            seen &= col <= diagonal + right
        return seen


def _scores(q: torch.Tensor, k: torch.Tensor, bias: Any, rule: Rule) -> torch.Tensor:
    """Scaled, biased and masked scores (heads, seq_q, seq_kv)."""
    repeat = q.shape[0] // k.shape[0]
    s = q @ k.repeat_interleave(repeat, 0).transpose(1, 2)
    if rule.bias == "pre_scale_bias":
        s = s + bias
    s = s * rule.scale
    if rule.bias == "post_scale_bias":
        s = s + bias
    elif rule.bias == "alibi":
        raise NotImplementedError("ALiBi is not emulated on real tensors")
    seen = rule.visible(s.shape[1], s.shape[2], s.device)
    return s if seen is None else s.masked_fill(~seen, -math.inf)


def _dropout(shape: torch.Size, rule: Rule, rng: torch.Generator | None) -> torch.Tensor | None:
    """Kept positions over the keep probability, reproducible from the generator."""
    if rule.dropout == 0.0 or rng is None:
        return None
    keep = 1.0 - rule.dropout
    return torch.empty(shape).bernoulli_(keep, generator=rng) / keep


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, offset: Any, rule: Rule,
    rng: torch.Generator | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output (heads, seq_q, dim_v), log-sum-exp and maximum (heads, seq_q), all fp32."""
    s = _scores(q, k, bias, rule)
    lse = torch.logsumexp(s, -1)
    if rule.softmax != "vanilla":
        sink = offset[:, None] if rule.softmax == "learnable" else torch.zeros_like(lse[:, :1])
        lse = torch.logaddexp(lse, sink.expand_as(lse))
    p = _probabilities(s, lse)
    kept = _dropout(p.shape, rule, rng)
    if kept is not None:
        p = p * kept
    return p @ v.repeat_interleave(q.shape[0] // v.shape[0], 0), lse, s.amax(-1)


def _probabilities(s: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """exp(s - lse); rows that see nothing are zero."""
    return torch.exp(s - lse[..., None]).nan_to_num(0.0)


def backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, do: torch.Tensor,
    lse: torch.Tensor, bias: Any, offset: Any, rule: Rule, rng: torch.Generator | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """dq, dk, dv, gradient of the bias (heads, seq_q, seq_kv) and of the sink (heads)."""
    repeat = q.shape[0] // k.shape[0]
    p = _probabilities(_scores(q, k, bias, rule), lse)
    kept = _dropout(p.shape, rule, rng)
    dp = do @ v.repeat_interleave(repeat, 0).transpose(1, 2)
    dropped = p
    if kept is not None:
        dp, dropped = dp * kept, p * kept
    delta = (do * o).sum(-1)
    ds = p * (dp - delta[..., None])
    dbias = ds * rule.scale if rule.bias == "pre_scale_bias" else ds
    doffset = None
    if rule.softmax == "learnable":
        doffset = -(torch.exp(offset[:, None] - lse) * delta).sum(-1)
    ds = ds * rule.scale
    dk = (ds.transpose(1, 2) @ q).unflatten(0, (-1, repeat)).sum(1)
    dv = (dropped.transpose(1, 2) @ do).unflatten(0, (-1, repeat)).sum(1)
    return ds @ k.repeat_interleave(repeat, 0), dk, dv, dbias, doffset

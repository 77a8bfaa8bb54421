"""Fused attention, forward and backward, by torch's own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from primus_ext.observe.microbench.tensors import CannotRun, Run, dtype_of, make, random
from primus_ext.trace import Op


def fused(op: Op, device: torch.device) -> tuple[Run, str]:
    """``scaled_dot_product_attention`` on ``[batch, heads, seq, dim]``.

    Raises:
        CannotRun: torch has none of this kind.
    """
    attrs = dict(op.attrs)
    left, right = attrs.get("window") or (-1, -1)
    if left >= 0 or right > 0:
        raise CannotRun(f"{op.name} has a window, which torch's fused attention lacks")
    if attrs.get("causal") and attrs["seq_q"] != attrs["seq_kv"]:
        raise CannotRun(f"{op.name} masks the end of longer keys, and torch masks their beginning")
    query, key, value = _operands(attrs, device)
    options: dict[str, Any] = {
        "is_causal": bool(attrs.get("causal")), "attn_mask": _mask(op, attrs, device),
        "enable_gqa": attrs["heads"] != attrs["kv_heads"],
    }  # fmt: skip
    if attrs["direction"] == "forward":
        return (
            lambda: F.scaled_dot_product_attention(query, key, value, **options),
            "torch scaled_dot_product_attention",
        )
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    with torch.enable_grad():
        out = F.scaled_dot_product_attention(query, key, value, **options)
    gradient = random(out.shape, out.dtype, device)
    return (
        lambda: torch.autograd.grad(out, leaves, gradient, retain_graph=True),
        "torch scaled_dot_product_attention, its backward",
    )


def _operands(attrs: dict[str, Any], device: torch.device) -> list[torch.Tensor]:
    """As a training program has them: sequence first in memory, heads of one token together."""
    dtype, batch = dtype_of(attrs["dtype"]), attrs["batch"]
    shapes = (
        (attrs["seq_q"], batch, attrs["heads"], attrs["dim_qk"]),
        (attrs["seq_kv"], batch, attrs["kv_heads"], attrs["dim_qk"]),
        (attrs["seq_kv"], batch, attrs["kv_heads"], attrs["dim_v"]),
    )
    return [random(shape, dtype, device).permute(1, 2, 0, 3) for shape in shapes]


def _mask(op: Op, attrs: dict[str, Any], device: torch.device) -> torch.Tensor | None:
    if not op.name.startswith("aten."):
        return None
    tail = (attrs["seq_q"], attrs["seq_kv"])
    heads = attrs["dim_qk"], attrs["dim_v"]
    for spec in op.inputs[3:]:
        if spec.shape[-2:] == tail and spec.shape[-1] not in heads:
            return make(spec, device)
    return None

"""Ops of the stand-in of Transformer Engine's compiled extension (namespace ``primus_te``).

Each op carries its problem size as arguments (``m``, ``n``, ``k``, ``causal``, ...); nothing is
inferred from shapes that might be padded or quantized.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_iter

from primus_ext.observe.specs import dtype_name, moved_bytes, spec
from primus_ext.trace import Family, Op

# Kernels whose weight or index operand is only touched where needed, or that touch no data.
_QUANTIZE = ("quantize", "dequantize", "cast", "amax", "scale")


def arguments(func: Any, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Arguments of a dispatched op by the names in its schema."""
    names = [a.name for a in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def classify(
    name: str, func: Any, args: tuple, kwargs: dict, produced: list[torch.Tensor]
) -> Op | None:
    """The kernel behind one call of the stand-in."""
    by_name = arguments(func, args, kwargs)
    read = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
    kernel = name.split(".")[1]
    if kernel == "gemm":
        return _gemm(name, by_name, read, produced)
    if kernel.startswith("grouped_gemm"):
        return _grouped_gemm(name, by_name, read, produced)
    if kernel.startswith("fused_attn"):
        return _attention(name, by_name, read, produced)
    written = produced + [by_name[a.name] for a in func._schema.arguments
                          if a.alias_info is not None and a.alias_info.is_write
                          and isinstance(by_name.get(a.name), torch.Tensor)]  # fmt: skip
    for argument in func._schema.arguments:
        value = by_name.get(argument.name)
        if argument.alias_info is not None and isinstance(value, (list, tuple)):
            written += [t for t in value if isinstance(t, torch.Tensor)]
    family = Family.QUANTIZE if any(q in kernel for q in _QUANTIZE) else Family.MEMORY
    return Op(
        name=name,
        family=family,
        inputs=tuple(spec(t) for t in read),
        outputs=tuple(spec(t) for t in written),
        flops=0,
        bytes=moved_bytes(read) + moved_bytes(written),
    )


def _compute_dtype(by_name: dict[str, Any], operand: torch.Tensor) -> str:
    """Numeric format that the tensor cores see: the operands' own, or the quantized format."""
    found = str(by_name.get("b_format") or "")
    return dtype_name(operand.dtype) if not found or found == "plain" else found


def _gemm(
    name: str, by_name: dict[str, Any], read: list[torch.Tensor], produced: list[torch.Tensor]
) -> Op:
    m, n, k = by_name["m"], by_name["n"], by_name["k"]
    into = by_name.get("out")
    accumulate = bool(by_name.get("accumulate"))
    operands = [t for t in read if t is not into]
    written = produced if into is None else [into, *produced]
    moved = moved_bytes(operands) + moved_bytes(written) * (1 + accumulate)
    return Op(
        name=name,
        family=Family.GEMM,
        inputs=tuple(spec(t) for t in operands),
        outputs=tuple(spec(t) for t in written),
        flops=2 * m * n * k,
        bytes=moved,
        attrs=(
            ("accumulate", accumulate),
            ("batch", 1),
            ("dtype", _compute_dtype(by_name, by_name["b"])),
            ("k", k),
            ("layout", by_name["layout"].lower()),
            ("m", m),
            ("n", n),
            ("out_dtype", dtype_name(written[0].dtype)),
        ),
    )


def _grouped_gemm(
    name: str, by_name: dict[str, Any], read: list[torch.Tensor], produced: list[torch.Tensor]
) -> Op:
    ms, ns, ks = by_name["m"], by_name["n"], by_name["k"]
    accumulate = bool(by_name.get("accumulate"))
    into = by_name.get("out") or []
    targets = [t for t in into if isinstance(t, torch.Tensor)]
    written = targets + produced
    operands = [t for t in read if all(t is not target for target in targets)]
    first = operands[0]
    return Op(
        name=name,
        family=Family.GROUPED_GEMM,
        inputs=tuple(spec(t) for t in operands),
        outputs=tuple(spec(t) for t in written),
        flops=sum(2 * m * n * k for m, n, k in zip(ms, ns, ks, strict=True)),
        bytes=moved_bytes(operands) + moved_bytes(written) * (1 + accumulate),
        attrs=(
            ("accumulate", accumulate),
            ("dtype", _compute_dtype(by_name, first)),
            ("groups", len(ms)),
            ("k", max(ks)),
            ("layout", by_name["layout"].lower()),
            ("m", sum(ms) if by_name["layout"] != "NT" else max(ms)),
            ("n", max(ns)),
            ("out_dtype", dtype_name(written[0].dtype)),
        ),
    )


def computed_pairs(seq_q: int, seq_kv: int, causal: bool, window: tuple[int, int]) -> int:
    """(query, key) pairs that attention really computes in one head of one sequence.

    Args:
        seq_q: Queries.
        seq_kv: Keys.
        causal: Only keys up to the query count (aligned at the bottom right).
        window: Keys to the left and right of the query that count; -1 is unlimited.
    """
    left, right = window
    right = 0 if causal else right
    if left < 0 and right < 0:
        return seq_q * seq_kv
    shift = seq_kv - seq_q
    pairs = 0
    if left < 0 and right == 0 and shift >= 0:
        return seq_q * shift + seq_q * (seq_q + 1) // 2
    for query in range(seq_q):
        low = 0 if left < 0 else max(0, query + shift - left)
        high = seq_kv - 1 if right < 0 else min(seq_kv - 1, query + shift + right)
        pairs += max(0, high - low + 1)
    return pairs


def _attention(
    name: str, by_name: dict[str, Any], read: list[torch.Tensor], produced: list[torch.Tensor]
) -> Op:
    direction = "backward" if "bwd" in name else "forward"
    batch, heads = by_name["batch"], by_name["heads"]
    seq_q, seq_kv = by_name["seq_q"], by_name["seq_kv"]
    dim_qk, dim_v = by_name["dim_qk"], by_name["dim_v"]
    window = tuple(by_name["window"])
    pairs = computed_pairs(seq_q, seq_kv, bool(by_name["causal"]), (window[0], window[1]))
    # scores (dim_qk) and output (dim_v); backward: scores, dQ, dK over dim_qk, dP, dV over dim_v
    dims = dim_qk + dim_v if direction == "forward" else 3 * dim_qk + 2 * dim_v
    written = produced or [by_name[g] for g in ("dq", "dk", "dv") if g in by_name]
    return Op(
        name=name,
        family=Family.ATTENTION,
        inputs=tuple(spec(t) for t in read),
        outputs=tuple(spec(t) for t in written),
        flops=2 * batch * heads * pairs * dims,
        bytes=moved_bytes(read) + moved_bytes(written),
        attrs=(
            ("batch", batch),
            ("causal", bool(by_name["causal"])),
            ("dim_qk", dim_qk),
            ("dim_v", dim_v),
            ("direction", direction),
            ("dtype", dtype_name(by_name["q"].dtype)),
            ("fused", True),
            ("heads", heads),
            ("kv_heads", by_name["kv_heads"]),
            ("seq_kv", seq_kv),
            ("seq_q", seq_q),
            ("window", window),
        ),
    )

"""Ops of the stand-in of Transformer Engine's compiled extension (namespace ``primus_te``).

Each op carries its problem size as arguments (``m``, ``n``, ``k``, ``causal``, ...); nothing is
inferred from shapes that might be padded or quantized.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_iter

from primus_ext.observe.specs import attention_op, dtype_name, moved_bytes, spec
from primus_ext.trace import Family, Op

# Parts of the names of kernels that change the number format.
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
    each = ks if by_name["layout"] == "NT" else ms
    unequal = (("rows", tuple(each)),) if len(set(each)) > 1 else ()
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
            *unequal,
        ),
    )


def _attention(
    name: str, by_name: dict[str, Any], read: list[torch.Tensor], produced: list[torch.Tensor]
) -> Op:
    window = tuple(by_name["window"])
    sizes = ("batch", "heads", "kv_heads", "seq_q", "seq_kv", "dim_qk", "dim_v")
    return attention_op(
        name,
        read,
        produced or [by_name[g] for g in ("dq", "dk", "dv") if g in by_name],
        **{size: by_name[size] for size in sizes},
        causal=bool(by_name["causal"]),
        window=(window[0], window[1]),
        direction="backward" if "bwd" in name else "forward",
        dtype=dtype_name(by_name["q"].dtype),
    )

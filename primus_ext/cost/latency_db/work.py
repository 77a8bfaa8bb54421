"""Ops of imported figures: the work that they say was timed, as a trace would hold it."""

from __future__ import annotations

from primus_ext.trace import Family, Op

_ELEMENT = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8_e4m3/tensor": 1.0, "fp8_e4m3/block2d": 1.0,
            "fp4_e2m1/nvfp4": 0.5625}  # fmt: skip
"""Bytes of an operand's element; nvfp4 with a scale byte for 16 of them."""
FORMATS = tuple(_ELEMENT)
"""Number formats of products that a training recipe has."""


def product(
    m: int, n: int, k: int, dtype: str, *, layout: str = "tn", batch: int = 1, groups: int = 0,
    accumulate: bool = False, out: str = "bf16",
) -> Op:  # fmt: skip
    """A product ``[m, k] x [k, n]``, dense, batched or grouped.

    Args:
        m: Rows; in a grouped one those of each group.
        n: Columns.
        k: Contraction; in a grouped weight gradient (layout nt) that of each group.
        dtype: One of :data:`FORMATS`.
        layout: tn (forward), nn (input gradient) or nt (weight gradient).
        batch: How many, of a batched one.
        groups: How many, of a grouped one; 0 for none.
        accumulate: Into what the output holds.
        out: Number format of the output, bf16 or fp32.
    """
    count = (groups or 1) * batch
    written = (4 if out == "fp32" else 2) * m * n * (1 + accumulate)
    attrs = {"m": m, "n": n, "k": k, "layout": layout, "dtype": dtype, "out_dtype": out,
             "accumulate": accumulate}  # fmt: skip
    if groups:
        attrs |= {"groups": groups, "m": m if layout == "nt" else m * groups}
    else:
        attrs |= {"batch": batch}
    moved = count * (_ELEMENT[dtype] * (m * k + n * k) + written)
    return Op(
        "imported.grouped_gemm" if groups else "imported.gemm",
        Family.GROUPED_GEMM if groups else Family.GEMM, (), (), 2 * count * m * n * k, int(moved),
        tuple(sorted(attrs.items())),
    )  # fmt: skip


def attention(
    batch: int, seq: int, heads: int, kv_heads: int, dim_qk: int, dim_v: int, *, causal: bool,
    backward: bool = False, flops: float | None = None,
) -> Op:  # fmt: skip
    """Fused attention in bf16 over whole sequences.

    Args:
        batch: Sequences.
        seq: Tokens of each.
        heads: Query heads.
        kv_heads: Key heads.
        dim_qk: Head dimension of queries and keys.
        dim_v: Of values.
        causal: A query sees the keys up to its own.
        backward: Gradients of all three.
        flops: As their source counts them; None: two products for each pair of query and key,
            five in a backward.
    """
    pairs = seq * (seq + 1) // 2 if causal else seq * seq
    dims = 3 * dim_qk + 2 * dim_v if backward else dim_qk + dim_v
    counted = 2 * batch * heads * pairs * dims if flops is None else int(flops)
    attrs = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "seq_q": seq, "seq_kv": seq,
             "dim_qk": dim_qk, "dim_v": dim_v, "causal": causal, "window": (-1, -1),
             "direction": "backward" if backward else "forward", "dtype": "bf16",
             "fused": True}  # fmt: skip
    once = 2 * batch * seq * (heads + kv_heads) * (dim_qk + dim_v)
    return Op("imported.attention", Family.ATTENTION, (), (), counted,
              once * (2 if backward else 1), tuple(sorted(attrs.items())))  # fmt: skip

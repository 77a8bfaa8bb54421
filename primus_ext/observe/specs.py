"""Small builders that every classifier shares."""

from __future__ import annotations

import torch

from primus_ext.trace import Family, Op, TensorSpec

DTYPE_NAMES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.uint8: "uint8",
    torch.int8: "int8",
    torch.bool: "bool",
}


def dtype_name(dtype: torch.dtype) -> str:
    """Short name of a torch dtype (``bf16``); torch's own name for the rare ones."""
    return DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def spec(tensor: torch.Tensor) -> TensorSpec:
    """Shape and dtype of a tensor."""
    return TensorSpec(shape=tuple(tensor.shape), dtype=dtype_name(tensor.dtype))


def moved_bytes(tensors: list[torch.Tensor]) -> int:
    """Bytes that move if each tensor is read or written once (expanded dims are not re-read)."""
    return sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors)


def gemm_op(
    name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor], *, m: int, n: int, k: int,
    layout: str, batch: int = 1, accumulate: bool = False, dtype: str | None = None,
) -> Op:  # fmt: skip
    """A dense matrix product ``[m, k] x [k, n]``, ``batch`` times.

    With ``accumulate`` the output is read and written (wgrad into the main gradient).
    """
    written = moved_bytes(outputs)
    return Op(
        name=name,
        family=Family.GEMM,
        inputs=tuple(spec(t) for t in inputs),
        outputs=tuple(spec(t) for t in outputs),
        flops=2 * batch * m * n * k,
        bytes=moved_bytes(inputs) + (2 * written if accumulate else written),
        attrs=tuple(
            sorted(
                {
                    "m": m, "n": n, "k": k, "batch": batch, "layout": layout,
                    "accumulate": accumulate,
                    "dtype": dtype or dtype_name(inputs[0].dtype),
                    "out_dtype": dtype_name(outputs[0].dtype),
                }.items()
            )
        ),
    )  # fmt: skip


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


def attention_op(
    name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor], *, batch: int, heads: int,
    kv_heads: int, seq_q: int, seq_kv: int, dim_qk: int, dim_v: int, causal: bool,
    window: tuple[int, int], direction: str, dtype: str,
) -> Op:  # fmt: skip
    """Fused attention.  FLOPs are those of the (query, key) pairs that are computed.

    A forward makes two products for each pair (scores over ``dim_qk``, output over ``dim_v``), a
    backward five: scores again, dQ and dK over ``dim_qk``, dP and dV over ``dim_v``
    (FlashAttention-2, arXiv 2307.08691).
    """
    dims = dim_qk + dim_v if direction == "forward" else 3 * dim_qk + 2 * dim_v
    pairs = computed_pairs(seq_q, seq_kv, causal, window)
    attrs = {
        "batch": batch, "heads": heads, "kv_heads": kv_heads, "seq_q": seq_q, "seq_kv": seq_kv,
        "dim_qk": dim_qk, "dim_v": dim_v, "causal": causal, "window": window,
        "direction": direction, "dtype": dtype, "fused": True,
    }  # fmt: skip
    return Op(
        name=name,
        family=Family.ATTENTION,
        inputs=tuple(spec(t) for t in inputs),
        outputs=tuple(spec(t) for t in outputs),
        flops=2 * batch * heads * pairs * dims,
        bytes=moved_bytes(inputs) + moved_bytes(outputs),
        attrs=tuple(sorted(attrs.items())),
    )

"""``tex`` functions of fused attention and the choice of its backend.

FP8 attention, paged key/value caches and ``score_mod`` are not emulated and say so when called.
"""

from __future__ import annotations

from typing import Any

import torch

from primus_ext.emulate.te import attention_ops
from primus_ext.emulate.te.attention_layout import (
    allocate_gradients,
    convert_shape,
    formats,
    group,
    heads_and_dim,
)
from primus_ext.emulate.te.bindings import binding


def _name(member: Any, prefix: str = "NVTE_") -> str:
    """Lower-case name of an enumeration member without its affixes."""
    return member.name.removeprefix(prefix).lower()


def _mask_name(member: Any) -> str:
    name = _name(member)
    return name if name == "no_mask" else name.removesuffix("_mask")


def _softmax_name(member: Any) -> str:
    return _name(member).removesuffix("_softmax").replace("_", "-")


def _plain(*tensors: Any) -> None:
    for tensor in tensors:
        if hasattr(tensor, "_quantizer") or tensor.dtype not in (torch.bfloat16, torch.float16):
            raise NotImplementedError(
                f"fused attention on {type(tensor).__name__} of {tensor.dtype} is not emulated "
                "(only bf16 and fp16)"
            )


def _attributes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, layout: str,
    **rest: Any,
) -> dict[str, Any]:
    """Scalar arguments that forward and backward share."""
    q_format, kv_format = formats(layout)
    heads, dim_qk = heads_and_dim(q, q_format)
    kv_heads, _ = heads_and_dim(k, kv_format)
    batch = q.shape[q_format.index("b")] if "b" in q_format else cu_seqlens_q.shape[0] - 1
    return {
        "qkv_layout": layout, "heads": heads, "kv_heads": kv_heads, "dim_qk": dim_qk,
        "dim_v": v.shape[-1], "batch": batch, **rest,
    }  # fmt: skip


def _rule(
    bias_type: Any, mask_type: Any, softmax_type: Any, window: Any, bottom_right: bool,
    scale: float, dropout: float,
) -> dict[str, Any]:
    mask = _mask_name(mask_type)
    return {
        "mask": mask, "causal": "causal" in mask, "bias_type": _name(bias_type),
        "softmax_type": _softmax_name(softmax_type), "window": list(window),
        "bottom_right": bottom_right, "scale": scale, "dropout": dropout,
    }  # fmt: skip


@binding()
def fused_attn_fwd(
    max_seqlen_q: int, max_seqlen_kv: int, is_training: bool, attn_scale: float, p_dropout: float,
    set_zero: bool, qkv_layout: Any, o_format: Any, qkv_scale_inv_format: Any, bias_type: Any,
    attn_mask_type: Any, softmax_type: Any, window_size: Any, bottom_right_diagonal: bool,
    cu_seqlens_q: torch.Tensor, cu_seqlens_kv: torch.Tensor, Q: Any, K: Any, V: Any,
    fake_dtype: torch.dtype, cu_seqlens_q_padded: Any, cu_seqlens_kv_padded: Any,
    page_table_k: Any, page_table_v: Any, s_quantizer: Any, o_quantizer: Any, Bias: Any,
    SoftmaxOffset: Any, rng_gen: Any, rng_elts_per_thread: int, return_max_logit: bool,
    cuda_graph: bool,
) -> list[torch.Tensor]:
    """Returns ``[O, statistics, (maximum), rng_state, (bias), (softmax offset)]``.

    Raises:
        NotImplementedError: For FP8 and for paged key/value caches.
    """
    _plain(Q, K, V)
    layout = _name(qkv_layout)
    if page_table_k is not None or group(layout) == "paged":
        raise NotImplementedError("fused attention on paged key/value caches is not emulated")
    if o_quantizer is not None:
        raise NotImplementedError("fused attention with quantized output is not emulated")
    rule = _rule(bias_type, attn_mask_type, softmax_type, window_size, bottom_right_diagonal,
                 attn_scale, p_dropout)  # fmt: skip
    attrs = _attributes(
        Q, K, V, cu_seqlens_q, layout, **rule, o_format=_name(o_format), seq_q=max_seqlen_q,
        seq_kv=max_seqlen_kv, max_logit=return_max_logit, training=is_training,
    )  # fmt: skip
    with_bias = attrs["bias_type"] in ("pre_scale_bias", "post_scale_bias") and Bias is not None
    with_offset = attrs["softmax_type"] != "vanilla" and SoftmaxOffset is not None
    out, stats, maximum, rng_state = attention_ops.fused_attn_fwd(
        Q, K, V, Bias if with_bias else None, SoftmaxOffset if with_offset else None,
        cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded, **attrs,
    )  # fmt: skip
    results = [out, stats, maximum, rng_state, Bias if with_bias else None,
               SoftmaxOffset if with_offset else None]  # fmt: skip
    return [tensor for tensor in results if tensor is not None]


def _auxiliary(tensors: Any, rule: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    """Statistics, random state, bias and softmax offset out of the saved tensors."""
    rest = list(tensors)
    stats, rng_state = rest.pop(0), rest.pop(0)
    bias = rest.pop(0) if rule["bias_type"] in ("pre_scale_bias", "post_scale_bias") else None
    offset = rest.pop(0) if rule["softmax_type"] != "vanilla" and rest else None
    return stats, rng_state, bias, offset


@binding()
def fused_attn_bwd(
    max_seqlen_q: int, max_seqlen_kv: int, attn_scale: float, p_dropout: float, set_zero: bool,
    qkv_layout: Any, o_format: Any, do_format: Any, dqkv_layout: Any, qkv_scale_inv_format: Any,
    do_scale_inv_format: Any, bias_type: Any, attn_mask_type: Any, softmax_type: Any,
    window_size: Any, bottom_right_diagonal: bool, deterministic: bool,
    cu_seqlens_q: torch.Tensor, cu_seqlens_kv: torch.Tensor, Q: Any, K: Any, V: Any, O: Any,  # noqa: E741
    dO: Any, fake_dtype: torch.dtype, Aux_CTX_Tensors: Any, cu_seqlens_q_padded: Any,
    cu_seqlens_kv_padded: Any, s_quantizer: Any, dp_quantizer: Any, dqkv_quantizer: Any,
    cuda_graph: bool,
) -> list[Any]:
    """Returns ``[dQ, dK, dV, dBias or None, dSoftmaxOffset or None]``.

    Raises:
        NotImplementedError: For FP8.
    """
    _plain(Q, K, V, O, dO)
    if dqkv_quantizer is not None:
        raise NotImplementedError("fused attention with quantized gradients is not emulated")
    layout, gradient_layout = _name(qkv_layout), _name(dqkv_layout)
    rule = _rule(bias_type, attn_mask_type, softmax_type, window_size, bottom_right_diagonal,
                 attn_scale, p_dropout)  # fmt: skip
    attrs = _attributes(
        Q, K, V, cu_seqlens_q, layout, **rule, o_format=_name(o_format),
        do_format=_name(do_format), dqkv_layout=gradient_layout, seq_q=max_seqlen_q,
        seq_kv=max_seqlen_kv, deterministic=deterministic,
    )  # fmt: skip
    stats, rng_state, bias, offset = _auxiliary(Aux_CTX_Tensors, rule)
    inputs = (Q, K, V, O, dO, stats, rng_state, bias, offset, cu_seqlens_q, cu_seqlens_kv,
              cu_seqlens_q_padded, cu_seqlens_kv_padded)  # fmt: skip
    packed_sequences = "t" in formats(gradient_layout)[0] + formats(gradient_layout)[1]
    if group(gradient_layout) == "hd_hd_hd" and not packed_sequences:
        return list(attention_ops.fused_attn_bwd(*inputs, **attrs))
    sources, targets = formats(layout), formats(gradient_layout)
    shapes = tuple(
        convert_shape(list(tensor.shape), sources[side], targets[side])
        for tensor, side in ((Q, 0), (K, 1), (V, 1))
    )
    gradients = allocate_gradients(gradient_layout, shapes, Q, fake_dtype)  # type: ignore[arg-type]
    if packed_sequences:
        for gradient in gradients:
            gradient.fill_(0)  # padding between the sequences
    return [*gradients, *attention_ops.fused_attn_bwd_out(*inputs, *gradients, **attrs)]

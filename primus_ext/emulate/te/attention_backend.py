"""``get_fused_attn_backend``: what cuDNN supports on the target.

The rules restate ``nvte_get_fused_attn_backend`` (``transformer_engine/common/fused_attn/
fused_attn.cpp``, 2.20) for the one cuDNN version that the stand-in reports (9.24), so that all
branches for older releases are gone.  Releases after 2.20 ask cuDNN's frontend itself; whether it
refuses more than these rules do was not compared on a device.

On AMD's accelerators the kernels are those of Composable Kernel; the rules are those of
``is_ck_backend_supported`` (ROCm/TransformerEngine, ``common/fused_attn_rocm/fused_attn_ck.cpp``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from primus_ext.emulate.te.attention_layout import formats, group
from primus_ext.emulate.te.bindings import binding
from primus_ext.emulate.te.enums import DType, NVTE_Fused_Attn_Backend
from primus_ext.emulate.te.target import target

_HALF = (DType.kFloat16, DType.kBFloat16)
_FP8 = (DType.kFloat8E4M3, DType.kFloat8E5M2)


@binding()
def get_fused_attn_backend(params: Any) -> tuple[Any, str]:
    """The backend for an attention and, where there is none, the reason.

    Args:
        params: Transformer Engine's ``FusedAttentionParams``.
    """
    dtype = DType(int(params.qkv_dtype))
    if dtype in _FP8:
        reasons, backend = _fp8_objections(params), NVTE_Fused_Attn_Backend["NVTE_FP8"]
    elif dtype in _HALF:
        reasons = _ck_objections(params) if target().amd else _half_objections(params)
        backend = NVTE_Fused_Attn_Backend["NVTE_F16_arbitrary_seqlen"]
    else:
        reasons, backend = iter((f"dtype {dtype.name} is not supported",)), None
    reason = next(reasons, None)
    if reason is not None:
        return NVTE_Fused_Attn_Backend["NVTE_No_Backend"], reason
    return backend, ""


def _mask(params: Any) -> str:
    return params.attn_mask_type.name.removeprefix("NVTE_").removesuffix("_MASK").lower()


def _layout(params: Any) -> str:
    return params.qkv_layout.name.removeprefix("NVTE_").lower()


def _half_objections(params: Any) -> Iterator[str]:
    """Reasons why the F16/BF16 kernels do not apply, in the order of the real checks."""
    sm, layout, mask = target().sm_arch, _layout(params), _mask(params)
    bias = params.bias_type.name.removeprefix("NVTE_")
    q_format, kv_format = formats(layout)
    if sm < 80:
        yield f"compute capability {sm / 10} is below 8.0"
    if not _head_dims(params, sm, layout, mask):
        yield f"head dimensions {params.head_dim_qk}, {params.head_dim_v} are not supported"
    if bias == "PRE_SCALE_BIAS":
        yield "pre-scale bias is not supported"
    if bias == "ALIBI" and (mask not in ("causal", "causal_bottom_right") or sm < 90):
        yield f"ALiBi is not supported with mask {mask} on sm{sm}"
    if bias == "POST_SCALE_BIAS" and mask in ("padding", "padding_causal"):
        yield f"bias is not supported with mask {mask}"
    if mask.endswith("bottom_right") and params.max_seqlen_q > params.max_seqlen_kv:
        yield "a bottom-right mask needs seq_q <= seq_kv"
    if "padding" in mask and (bias != "NO_BIAS" or params.dropout != 0.0):
        yield f"mask {mask} is not supported with bias or dropout"
    if "thd" in (q_format, kv_format) and sm < 90:
        yield "packed sequences need compute capability 9.0"
    if not _window(params, mask, bias):
        window = (params.window_size_left, params.window_size_right)
        yield f"sliding window {window} is not supported with mask {mask}"
    if sm >= 100 and params.is_training and bias != "NO_BIAS" and (
        params.deterministic or params.dropout != 0.0
    ):
        yield "determinism or dropout with bias is not supported"
    if sm >= 100 and params.is_training and params.deterministic and params.dropout != 0.0:
        yield "determinism with dropout is not supported"
    if sm == 120 and (params.is_training and params.deterministic or layout in ("t3hd", "th3d")):
        yield "not supported on sm120"


def _ck_objections(params: Any) -> Iterator[str]:
    """Reasons why AMD's F16/BF16 kernels do not apply."""
    layout, mask = _layout(params), _mask(params)
    bias = params.bias_type.name.removeprefix("NVTE_")
    left, right = params.window_size_left, params.window_size_right
    if bias == "PRE_SCALE_BIAS":
        yield "pre-scale bias is not supported"
    if params.head_dim_qk >= 512 or params.head_dim_v >= 512:
        yield f"head dimensions {params.head_dim_qk}, {params.head_dim_v} are not supported"
    if "causal" in mask and not (left >= -1 and right == 0):
        yield f"window ({left}, {right}) is not supported with mask {mask}"
    both = (left == -1) == (right == -1) and left >= -1
    if mask in ("no_mask", "padding") and not both:
        yield f"window ({left}, {right}) is not supported with mask {mask}"
    packed = group(layout) in ("3hd", "h3d")
    if packed and params.num_attn_heads > params.num_gqa_groups:
        yield "grouped queries are not supported with a packed layout"
    if packed and params.max_seqlen_q != params.max_seqlen_kv:
        yield "a packed layout needs as many queries as keys"
    if "thd" in formats(layout) and "padding" not in mask:
        yield "packed sequences need a padding mask"
    if "padding" in mask and bias != "NO_BIAS":
        yield f"bias is not supported with mask {mask}"


def _head_dims(params: Any, sm: int, layout: str, mask: str) -> bool:
    qk, v, training = params.head_dim_qk, params.head_dim_v, params.is_training
    if qk % 8 or v % 8:
        return False
    if sm == 90 and training and qk >= 128 and v >= 128 and qk != v and (qk, v) != (192, 128):
        return False  # wrong gradients since cuDNN 9.11
    if qk <= 128 and v <= 128:
        return True
    if qk <= 256 and v <= 256 and sm == 90:
        return True
    if not training:
        single = params.max_seqlen_q == 1
        return group(layout) == "paged" or not single or mask not in ("causal", "padding_causal")
    if (qk, v) == (192, 128) and sm >= 100:
        return True
    return (qk, v) == (256, 256) and 100 <= sm < 110 and _wide_head(params, layout, mask)


def _wide_head(params: Any, layout: str, mask: str) -> bool:
    """Conditions of the backward pass with 256-wide heads on sm100 (packed only from 9.25)."""
    if "thd" in formats(layout):
        return False
    vanilla = params.softmax_type.name == "NVTE_VANILLA_SOFTMAX"
    no_bias = params.bias_type.name == "NVTE_NO_BIAS"
    left, right = params.window_size_left, params.window_size_right
    window = (left, right) == (-1, -1) or ("causal" in mask and right in (-1, 0))
    return group(layout) != "paged" and no_bias and params.dropout == 0.0 and vanilla and window


def _window(params: Any, mask: str, bias: str) -> bool:
    left, right = params.window_size_left, params.window_size_right
    if left == -1 and right in (-1, 0):
        return True
    if params.max_seqlen_q > params.max_seqlen_kv or bias != "NO_BIAS" or params.dropout != 0.0:
        return False
    if mask == "causal":
        fmt = formats(_layout(params))
        return right == 0 and "thd" not in fmt
    return left >= -1 and right >= -1


def _fp8_objections(params: Any) -> Iterator[str]:
    """Reasons why the FP8 kernels do not apply."""
    sm, mask, fmt = target().sm_arch, _mask(params), formats(_layout(params))
    qk, v = params.head_dim_qk, params.head_dim_v
    if sm < 90:
        yield f"FP8 attention needs compute capability 9.0, the target has {sm / 10}"
    if params.bias_type.name != "NVTE_NO_BIAS":
        yield "FP8 attention has no bias"
    if qk % 16 or v % 16:
        yield "FP8 attention needs head dimensions that are multiples of 16"
    hopper = (qk, v) == (128, 128) if params.is_training else qk <= 256 and v <= 256
    common = mask in ("no_mask", "causal", "padding", "padding_causal")
    blackwell = common and qk <= 128 or mask in ("no_mask", "causal", "causal_bottom_right")
    if not (hopper and common if sm < 100 else qk <= 192 and v <= 128 and blackwell):
        yield f"FP8 attention does not support head dimensions {qk}, {v} with mask {mask}"
    if "thd" in fmt:
        yield "FP8 attention does not support packed sequences"
    if params.return_max_logit:
        yield "FP8 attention does not return the maximum"

"""Core attention as one fused kernel, forward and backward."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention

from primus_ext.emulate.session import ProgramError
from primus_ext.emulate.te import attention_ops

_LAYOUT = "sbhd_sbhd_sbhd"


class _Attend(torch.autograd.Function):
    """Keeps query, key, value, output, log-sum-exp and the random state."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attrs: dict[str, Any]
    ) -> torch.Tensor:
        ends = _lengths(attrs, attrs["seq_q"]), _lengths(attrs, attrs["seq_kv"])
        out, stats, _, random = attention_ops.fused_attn_fwd(
            q, k, v, None, None, *ends, None, None, max_logit=False, training=True, **attrs
        )
        ctx.save_for_backward(q, k, v, out, stats, random)
        ctx.attrs = attrs
        return out

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        q, k, v, out, stats, random = ctx.saved_tensors
        attrs = ctx.attrs
        ends = _lengths(attrs, attrs["seq_q"]), _lengths(attrs, attrs["seq_kv"])
        dq, dk, dv, *_ = attention_ops.fused_attn_bwd(
            q, k, v, out, do.contiguous(), stats, random, None, None, *ends, None, None, **attrs,
            do_format="sbhd", dqkv_layout=_LAYOUT, deterministic=False,
        )  # fmt: skip
        return dq, dk, dv, None


def _lengths(attrs: dict[str, Any], seq: int) -> torch.Tensor:
    """Where each sequence of the batch ends, from 0."""
    return torch.arange(0, (attrs["batch"] + 1) * seq, seq, dtype=torch.int32)


class FusedAttention(MegatronModule):
    """Stands for ``TEDotProductAttention``."""

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: AttnMaskType, attention_type: str,
        attention_dropout: float | None = None, softmax_scale: float | None = None,
        k_channels: int | None = None, v_channels: int | None = None, pg_collection: Any = None,
        **_unused: Any,
    ) -> None:  # fmt: skip
        """Build the attention of one layer; the arguments are those of the original.

        Raises:
            ProgramError: For what only Transformer Engine can do.
        """
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        _refuse("context_parallel_size", groups.cp.size(), 1)
        _refuse("fp8", config.fp8, None)
        _refuse("fp4", config.fp4, None)
        _refuse("softmax_type", config.softmax_type, "vanilla")
        self.mask_type = attn_mask_type
        windowed = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        self.window = list(config.window_size) if windowed else [-1, -1]
        self.scale = softmax_scale or 1.0 / math.sqrt(k_channels or config.kv_channels)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        attention_mask: torch.Tensor | None = None, attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None, packed_seq_params: Any = None,
        **_unused: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Attend.

        Args:
            query: ``[seq, batch, heads, dim_qk]``.
            key: ``[seq, batch, groups, dim_qk]``.
            value: ``[seq, batch, groups, dim_v]``.
            attention_mask: Ignored: the mask's type says it.
            attn_mask_type: Instead of the layer's own.
            attention_bias: Must be None.
            packed_seq_params: Must be None.

        Returns:
            ``[seq, batch, heads * dim_v]``.

        Raises:
            ProgramError: With a bias or packed sequences.
        """
        _refuse("attention_bias", attention_bias, None)
        _refuse("packed_seq_params", packed_seq_params, None)
        mask = (attn_mask_type or self.mask_type).name
        attrs = {
            "qkv_layout": _LAYOUT, "o_format": "sbhd", "mask": mask, "causal": "causal" in mask,
            "bias_type": "no_bias", "softmax_type": "vanilla", "window": self.window,
            "bottom_right": False, "scale": self.scale,
            "dropout": self.dropout if self.training else 0.0,
            "batch": query.shape[1], "heads": query.shape[2], "kv_heads": key.shape[2],
            "seq_q": query.shape[0], "seq_kv": key.shape[0], "dim_qk": query.shape[3],
            "dim_v": value.shape[3],
        }  # fmt: skip
        out: Any = _Attend.apply(query, key, value, attrs)
        return out.reshape(query.shape[0], query.shape[1], -1)


def _refuse(name: str, value: Any, legal: Any) -> None:
    if value != legal:
        raise ProgramError(
            f"{name}={value} can't be projected without transformer-engine; legal: {legal}, or "
            "install transformer-engine"
        )

"""Attention of Megatron-LM and Megatron-DeepSpeed before FlashAttention, in Transformer Engine's.

Their local attention (``megatron/model/fused_softmax.py``, 2020 to 2023) masks in the kernel of the
softmax, ``scaled_upper_triang_masked_softmax``, which reads no score above the diagonal.  Releases
of Transformer Engine that are installed today build a mask and pass it to ``scaled_masked_softmax``
instead, and keep that kernel beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from primus_ext.emulate import registry

GROUP = "before_flash"
_VERSIONS = "transformer-engine 2.20"
_PLACE = "transformer_engine.pytorch.attention.dot_product_attention"


def install(_request: Mapping[str, Any]) -> None:
    """Apply the patches, before the program imports Transformer Engine."""
    registry.apply_all(GROUP)


@registry.patch(f"{_PLACE}.utils", "get_full_mask", group=GROUP, versions=_VERSIONS,
                reason="the kernel of the softmax knew the causal mask: none was built")
def _no_mask(module: Any) -> None:
    build = module.get_full_mask

    def get_full_mask(*args: Any, **named: Any) -> Any:
        if named.get("attn_mask_type") == "causal" and named.get("attention_mask") is None:
            return "causal", None, None, None
        return build(*args, **named)

    module.get_full_mask = get_full_mask


@registry.patch(f"{_PLACE}.softmax", "FusedScaleMaskSoftmax.forward_fused_softmax", group=GROUP,
                versions=_VERSIONS,
                reason="one kernel scaled, masked above the diagonal and formed the softmax")
def _upper_triangle(module: Any) -> None:
    torch, softmax = module.torch, module.FusedScaleMaskSoftmax
    other = softmax.forward_fused_softmax

    def forward_fused_softmax(self: Any, inp: Any, mask: Any, scale: float | None = None) -> Any:
        if self.attn_mask_type != "causal" or mask is not None:
            return other(self, inp, mask, scale)
        scores = inp.view(-1, *inp.shape[-2:])
        kernel = torch.ops.te_softmax.scaled_upper_triang_masked_softmax_fwd
        return kernel(scores, 1.0 if scale is None else float(scale)).view(inp.shape)

    softmax.forward_fused_softmax = forward_fused_softmax

"""Megatron-LM's mixture of experts as of December 2025 (d321026), where it held more memory.

Tokens that DeepEP brought were permuted, then copied once more to pad them for quantized experts;
0.19 pads while it permutes.  A layer kept what its experts gave out until it was back in the order
of the tokens; 0.19 drops it once it is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from primus_ext.emulate import registry

GROUP = "moe_2025"
_CORE = "megatron-core 0.19"


def install(_request: Mapping[str, Any]) -> None:
    """Apply the patches, before or after the program imports Megatron-LM."""
    registry.apply_all(GROUP)


@registry.patch("megatron.core.transformer.moe.token_dispatcher", "permute", group=GROUP,
                versions=_CORE,
                reason="tokens were not padded while they were permuted")  # fmt: skip
def _unpadded(module: Any) -> None:
    permute = module.permute

    def permute_only(*args: Any, align_size: int = 0, **named: Any) -> Any:
        del align_size
        return permute(*args, **named)

    module.permute = permute_only


@registry.patch("megatron.core.transformer.moe.moe_layer", "MoELayer.combine",
                "MoELayer.postprocess", group=GROUP, versions=_CORE,
                reason="what was sent stayed until tokens were back in their order")  # fmt: skip
def _combine_whole(module: Any) -> None:
    def combine(self: Any, output: Any) -> Any:
        received = self.token_dispatcher.token_combine(output)
        return self.token_dispatcher.combine_postprocess(received)

    def postprocess(self: Any, output: Any, shared_expert_output: Any) -> Any:
        if self.config.moe_latent_size:
            output, _ = self.fc2_latent_proj(output)
        return output if shared_expert_output is None else output + shared_expert_output

    module.MoELayer.combine = combine
    module.MoELayer.postprocess = postprocess

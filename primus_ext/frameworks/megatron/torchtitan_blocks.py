"""What torchtitan's selective checkpointing by op keeps of a layer beyond Megatron-LM's nearest.

torchtitan (``parallelize_llama.py`` at 9dec370) keeps of a layer its input, the results of
attention and of the first of every two matrix products: query, value, gate, and the down
projection.  Per token these are 4 h + v + f elements (h: hidden size, v: the values' size, f: the
MLP's).  With its MLP recomputed, Megatron-LM keeps the layer's input before and after the norm,
query, key, value, the result of attention and the MLP's input: 5 h + 2 v.  The difference,
f - h - v, is held here from a layer's MLP to its backward.  Nothing in the backward needs the
result of the down projection, so compiled layers don't keep it: h less.

Name this module (or ``torchtitan_eager_blocks``) among the ``frameworks`` of a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from primus_ext.emulate import registry

GROUP = "torchtitan_blocks"
_eager = False


def install(_request: Mapping[str, Any], *, eager: bool = False) -> None:
    """Apply the patch, before the program imports Megatron-LM.

    Args:
        eager: Whether layers were not compiled.
    """
    global _eager
    _eager = eager
    registry.apply_all(GROUP)


def elements(config: Any, eager: bool) -> int:
    """Elements per token that torchtitan keeps of a layer beyond Megatron-LM.

    Args:
        config: The transformer's configuration.
        eager: Whether the result of the down projection is kept.
    """
    values = (config.num_query_groups or config.num_attention_heads) * config.kv_channels
    kept = config.ffn_hidden_size - config.hidden_size * (1 if eager else 2) - values
    return max(kept // config.tensor_model_parallel_size, 0)


class _Held(torch.autograd.Function):
    """The identity, with a tensor that lives until its backward."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, count: int) -> torch.Tensor:
        ctx.save_for_backward(hidden.new_empty((*hidden.shape[:-1], count)))
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        del ctx
        return gradients[0], None


@registry.patch(
    "megatron.core.transformer.transformer_layer",
    "TransformerLayer._forward_mlp",
    group=GROUP,
    versions="megatron-core 0.19",
    reason="torchtitan's selective checkpointing keeps more than a recomputed MLP",
)
def _holding(module: Any) -> None:
    forward = module.TransformerLayer._forward_mlp

    def forward_mlp(self: Any, hidden_states: torch.Tensor, *rest: Any, **named: Any) -> Any:
        count = elements(self.config, _eager)
        return forward(self, _Held.apply(hidden_states, count), *rest, **named)

    module.TransformerLayer._forward_mlp = forward_mlp

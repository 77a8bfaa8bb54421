"""torchtitan's loss of 2024 in place of Megatron-LM's: torch's own cross entropy, in FP32, eager.

torchtitan (``train.py`` at 9dec370) casts all logits to FP32 and calls torch's cross entropy, whose
log-softmax is saved; its compilation was turned off for errors, also where the layers were
compiled.  In the backward three FP32 tensors of tokens x vocabulary are alive, where Megatron-LM's
fused loss has one.  Name this module among the ``frameworks`` of a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from primus_ext.emulate import registry

GROUP = "torchtitan_loss"


def install(_request: Mapping[str, Any]) -> None:
    """Apply the patch, before the program imports Megatron-LM."""
    registry.apply_all(GROUP)


@registry.patch(
    "megatron.core.fusions.fused_cross_entropy",
    "fused_vocab_parallel_cross_entropy",
    group=GROUP,
    versions="megatron-core 0.19",
    reason="torchtitan took torch's cross entropy of all logits in FP32",
)
def _eager(module: Any) -> None:
    def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, tp_group: Any) -> torch.Tensor:
        if tp_group.size() > 1:
            raise NotImplementedError("torchtitan's loss over a sharded vocabulary")
        whole = logits.flatten(0, 1).float()
        loss = torch.nn.functional.cross_entropy(whole, labels.flatten(), reduction="none")
        return loss.view_as(labels)

    module.fused_vocab_parallel_cross_entropy = cross_entropy

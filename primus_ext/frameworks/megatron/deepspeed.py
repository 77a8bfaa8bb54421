"""What Megatron-DeepSpeed's pipeline with ZeRO stage 1 does to memory, on Megatron-LM's program.

DeepSpeed 0.6, the release of the BLOOM and vTrain runs (``runtime/pipe/engine.py``,
``runtime/zero/stage_1_and_2.py``): without tensor parallelism a stage keeps the outputs that it
sent until their backward (with it they are partitioned and freed, as Megatron-LM frees them); at
the step the FP16 gradients of a rank's partition are flattened into one tensor and cast into one
FP32 tensor, where Megatron-LM casts gradient by gradient.  Name this module among the
``frameworks`` of a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from primus_ext.emulate import registry

GROUP = "deepspeed"
_CORE = "megatron-core 0.19"


def install(_request: Mapping[str, Any]) -> None:
    """Apply the patches, before the program imports Megatron-LM."""
    registry.apply_all(GROUP)


@registry.patch("megatron.training.argument_utils", "core_transformer_config_from_args",
                group=GROUP, versions=_CORE,
                reason="DeepSpeed's pipeline keeps sent outputs unless tensor-parallel")
def _outputs_stay(module: Any) -> None:
    translate = module.core_transformer_config_from_args

    def as_deepspeed(*args: Any, **named: Any) -> Any:
        config = translate(*args, **named)
        config.deallocate_pipeline_outputs = config.tensor_model_parallel_size > 1
        return config

    module.core_transformer_config_from_args = as_deepspeed


@registry.patch("megatron.core.optimizer.distrib_optimizer",
                "DistributedOptimizer._copy_model_grads_to_main_grads", group=GROUP,
                versions=_CORE,
                reason="ZeRO flattens the gradients of a partition, then casts them as a whole")
def _flat_gradients(module: Any) -> None:
    def copy(self: Any) -> None:
        if self.is_stub_optimizer:
            return
        for models, shards in (
            (self.model_float16_groups, self.shard_fp32_from_float16_groups),
            (self.model_fp32_groups, self.shard_fp32_groups),
        ):
            for model_group, shard_group in zip(models, shards, strict=True):
                _assign(self, model_group, shard_group)

    module.DistributedOptimizer._copy_model_grads_to_main_grads = copy


def _assign(optimizer: Any, model_group: list[Any], shard_group: list[Any]) -> None:
    """Gradients of a group's shards as pieces of one FP32 tensor."""
    pieces = []
    for parameter in model_group:
        own = optimizer._get_model_param_range_map(parameter)["param"]
        pieces.append(parameter.main_grad.view(-1)[own.start : own.end])
    if not pieces:
        return
    whole = torch.cat(pieces).float()
    start = 0
    for shard, piece in zip(shard_group, pieces, strict=True):
        shard.grad = whole[start : start + piece.numel()].view_as(shard)
        start += piece.numel()

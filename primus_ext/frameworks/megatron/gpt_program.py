"""A plain pre-training program over Megatron-LM, run by ``primus-ext`` where no trainer is.

``python -m primus_ext.frameworks.megatron.gpt_program MEGATRON-ARGUMENTS``: what a user's
``pretrain_gpt.py`` does, or with ``--hybrid-layer-pattern`` their ``pretrain_hybrid.py``, for
projection only: it has no data set.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import (
    gpt_config_from_args,
    hybrid_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args


def masked_loss(
    mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of the token losses that count, how many count, and what is logged."""
    flat = mask.view(-1).float()
    total = torch.sum(losses.view(-1).float() * flat)
    tokens = flat.sum().detach().to(torch.int)
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.to(total.dtype)])}


def forward_step(data: Iterator[dict[str, Any]], model: Any) -> tuple[torch.Tensor, Any]:
    """One microbatch through one model chunk."""
    batch = next(data)
    arguments: Any = get_args()
    if arguments.context_parallel_size > 1:
        group: Any = mpu.get_context_parallel_group()
        batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)
    output = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, functools.partial(masked_loss, batch["loss_mask"])


def no_data_sets(samples: Any, vp_stage: int | None = None) -> tuple[None, None, None]:
    """There is nothing to train on."""
    return None, None, None


def main() -> None:
    """Parse Megatron's arguments and hand over to its ``pretrain``."""
    args = parse_and_validate_args()
    is_hybrid = args.hybrid_layer_pattern is not None
    model = hybrid_config_from_args(args) if is_hybrid else gpt_config_from_args(args)
    config = pretrain_cfg_container_from_args(args, model)
    pretrain(config, no_data_sets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()

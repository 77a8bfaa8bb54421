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
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import (
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
    get_model_config,
)
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
    arguments: Any = get_args()
    packs = arguments.sft or arguments.dataloader_inter_document_masking
    batch = packed_batch(data, model, arguments) if packs else next(data)
    if arguments.context_parallel_size > 1:
        group: Any = mpu.get_context_parallel_group()
        batch = get_batch_on_this_cp_rank(
            batch, is_hybrid_cp=False, cp_group=group,
            use_per_sequence_balancing=packs and not arguments.sft,
        )  # fmt: skip
    output = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        packed_seq_params=boundaries(batch, arguments.seq_length) if packs else None,
    )
    return output, functools.partial(masked_loss, batch["loss_mask"])


def packed_batch(data: Iterator[dict[str, Any]], model: Any, arguments: Any) -> dict[str, Any]:
    """A batch of packed documents, as one row: ``[1, mbs * seq]``.

    Only the first rank of a tensor-parallel group reads data, and sends it to the others.
    """
    from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank

    batch: dict[str, Any] = {}
    tp_rank = mpu.get_tensor_model_parallel_rank()
    if tp_rank == 0:
        absent = ("attention_mask", "cu_seqlens_padded", "local_cp_size", "hybrid_cp_group")
        batch = {**dict.fromkeys(absent), **next(data)}
    config = get_model_config(model)
    group: Any = mpu.get_tensor_model_parallel_group()
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=True,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=False,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=group,
        cp_size=arguments.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=arguments.micro_batch_size,
        seq_length=arguments.seq_length,
        mtp_on_this_rank=mtp_on_this_rank(
            layout=config.pipeline_model_parallel_layout,
            mtp_num_layers=config.mtp_num_layers,
            ignore_virtual=False,
            vp_stage=get_attr_wrapped_model(model, "vp_stage"),
        ),
        pipeline_model_parallel_size=arguments.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    return flatten_batch_for_packed_sequences(batch)


def boundaries(batch: dict[str, Any], seq_length: int) -> PackedSeqParams:
    """Where the documents of a flattened batch begin, and the longest of them."""
    begins, longest = batch["cu_seqlens"].squeeze(0), int(batch["max_seqlen"].item())
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=begins, cu_seqlens_kv=begins, max_seqlen_q=longest,
        max_seqlen_kv=longest, tokens_per_sample=seq_length,
    )  # fmt: skip


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

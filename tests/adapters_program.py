"""A fine-tuning program of a user: a frozen GPT with low-rank adapters in plain torch.

Adapters run beside the attention's output projection and the MLP's second matrix, as LoRA does.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args

from primus_ext.frameworks.megatron.gpt_program import forward_step, no_data_sets

RANK = 8


class Adapted(torch.nn.Module):
    """A frozen linear layer and two small matrices beside it."""

    def __init__(self, base: torch.nn.Module, width_in: int, width_out: int) -> None:
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(width_in, RANK, bias=False, dtype=torch.bfloat16)
        self.up = torch.nn.Linear(RANK, width_out, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        out, bias = self.base(x)
        return out + self.up(self.down(x)), bias


def model_provider(
    pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, **_: Any
) -> GPTModel:
    """The model with everything frozen but the adapters."""
    args: Any = get_args()
    config = core_transformer_config_from_args(args)
    model = GPTModel(
        config,
        get_gpt_layer_with_transformer_engine_spec(),
        args.padded_vocab_size,
        args.seq_length,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        vp_stage=vp_stage,
    )
    for parameter in model.parameters():
        parameter.requires_grad = False
    layers: Any = model.decoder.layers
    for layer in layers:
        hidden, ffn = config.hidden_size, args.ffn_hidden_size
        layer.self_attention.linear_proj = Adapted(
            layer.self_attention.linear_proj, hidden, hidden
        )
        layer.mlp.linear_fc2 = Adapted(layer.mlp.linear_fc2, ffn, hidden)
    return model


if __name__ == "__main__":
    arguments = parse_and_validate_args()
    pretrain(
        pretrain_cfg_container_from_args(arguments),
        no_data_sets,
        ModelType.encoder_or_decoder,
        forward_step,
        model_provider,
    )

"""A user's own pre-training script: an MLP, a norm, an autograd function and an operator of theirs.

It knows nothing of projection.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.mlp import MLP
from megatron.training import pretrain
from megatron.training.argument_utils import (
    gpt_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args


@torch.library.custom_op("mine::halve", mutates_args=())
def halve(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5


@halve.register_fake
def _halve_fake(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


halve.register_autograd(lambda ctx, grad: halve(grad))


class Squared(torch.autograd.Function):
    """relu(x)^2 that keeps its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.square(torch.relu(x))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * grad * torch.relu(x)


class OwnMLP(MLP):
    """Gate with half a squared relu, normalise, go down."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        width = self.config.ffn_hidden_size // self.config.tensor_model_parallel_size
        self.own_norm = torch.nn.RMSNorm(width, dtype=self.config.params_dtype)

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        both, _bias = self.linear_fc1(hidden_states)
        gate, up = both.chunk(2, dim=-1)
        return self.linear_fc2(self.own_norm(halve(Squared.apply(gate)) * up))


def own_spec(_config: Any) -> Any:
    spec = get_gpt_layer_with_transformer_engine_spec()
    standard = spec.submodules.mlp
    spec.submodules.mlp = functools.partial(OwnMLP.as_mlp_submodule, **standard.keywords)
    return spec


def loss(mask: torch.Tensor, losses: torch.Tensor) -> Any:
    total = torch.sum(losses.float().view(-1) * mask.view(-1))
    return total, mask.sum().int(), {"lm loss": torch.stack([total.detach(), mask.sum()])}


def forward_step(data: Any, model: Any) -> Any:
    batch = next(data)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, functools.partial(loss, batch["loss_mask"])


def main() -> None:
    args = parse_and_validate_args()
    model = gpt_config_from_args(args)
    model.transformer_layer_spec = own_spec
    config = pretrain_cfg_container_from_args(args, model)
    pretrain(config, lambda *_: (None, None, None), ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()

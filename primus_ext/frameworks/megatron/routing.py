"""Balanced routing for the mixture of experts: token counts are known, tokens have no values.

A router's choice cannot be read from tensors without storage.  Megatron's own dispatcher computes
splits and counts from a real routing map in which every expert gets the same number of tokens
(as near as the division allows); the virtual peers send what this rank sends.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from primus_ext.emulate.host_tensor import host_values, keep
from primus_ext.emulate.registry import patch

_CORE = "megatron-core 0.19"
_SPLITS = ("input_splits", "output_splits", "output_splits_tp")


def balanced_map(tokens: int, experts: int, topk: int) -> torch.Tensor:
    """Routing map ``[tokens, experts]`` (bool): token i goes to the next ``topk`` experts in turn.

    Args:
        tokens: Local tokens.
        experts: Experts of the whole layer.
        topk: Experts a token goes to.
    """
    chosen = (torch.arange(tokens * topk) % experts).view(tokens, topk)
    return torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, chosen, True)


@patch("megatron.core.transformer.moe.token_dispatcher",
       "MoEAlltoAllTokenDispatcher.__init__", "MoEAlltoAllTokenDispatcher.preprocess",
       group="megatron", versions=_CORE,
       reason="token counts steer shapes and are read by the host: they need values")
def _dispatcher(module: ModuleType) -> None:
    dispatcher = module.MoEAlltoAllTokenDispatcher
    initialize, preprocess = dispatcher.__init__, dispatcher.preprocess

    def initialize_with_values(self: Any, *args: Any, **kwargs: Any) -> None:
        with host_values():
            initialize(self, *args, **kwargs)

    def preprocess_balanced(self: Any, routing_map: torch.Tensor) -> torch.Tensor:
        if not isinstance(routing_map, FakeTensor):
            return preprocess(self, routing_map)
        tokens, experts = routing_map.shape
        with host_values():
            counts = preprocess(
                self, balanced_map(tokens, experts, self.config.moe_router_topk)
            )
            for name in _SPLITS:
                value = getattr(self, name, None)
                if isinstance(value, torch.Tensor):
                    setattr(self, name, value.numpy())
            if isinstance(self.num_out_tokens, torch.Tensor):
                self.num_out_tokens = int(self.num_out_tokens)
            by_expert = getattr(self, "num_global_tokens_per_local_expert", None)
            if by_expert is not None:
                self.num_global_tokens_per_local_expert = keep(by_expert)
            return keep(counts)

    dispatcher.__init__ = initialize_with_values
    dispatcher.preprocess = preprocess_balanced


@patch("megatron.core.transformer.moe.token_dispatcher", "MoEFlexTokenDispatcher.__init__",
       group="megatron", versions=_CORE,
       reason="the flex dispatcher's kernels (DeepEP, HybridEP) have no stand-in yet")
def _flex(module: ModuleType) -> None:
    from primus_ext.emulate.session import ProgramError

    def refuse(self: Any, *_: Any, **__: Any) -> None:
        raise ProgramError(
            "moe_token_dispatcher_type=flex can't be projected by this version; "
            "legal: alltoall, allgather"
        )

    module.MoEFlexTokenDispatcher.__init__ = refuse

"""Megatron's choice of layers (``BackendSpecProvider``) without Transformer Engine."""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP

from primus_ext.emulate.no_te.attention import FusedAttention
from primus_ext.emulate.no_te.grouped import ColumnGroupedLinear, RowGroupedLinear
from primus_ext.emulate.no_te.norm import Norm


class NormColumnParallelLinear(ColumnParallelLinear):
    """A norm and the linear layer behind it, in one module as Transformer Engine has it."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        """Take the arguments of Megatron's column-parallel linear layer."""
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.norm = Norm(config, input_size, config.layernorm_epsilon)

    def forward(self, input_: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Normalise ``[seq, batch, input]``, then multiply."""
        return super().forward(self.norm(input_), *args, **kwargs)


class DuplicatedLinear(torch.nn.Module):
    """Refuses by name: a linear layer that every tensor-parallel rank holds whole."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Never builds.

        Raises:
            ProgramError: Always.
        """
        from primus_ext.emulate.session import ProgramError

        raise ProgramError(
            "multi_latent_attention=True can't be projected without transformer-engine; legal: "
            "False, or install transformer-engine"
        )


class StandInSpecProvider(LocalSpecProvider):
    """Megatron's own parallel linear layers; norm, attention, grouped experts of this package."""

    def linear(self) -> type:
        """The linear layer that is not split."""
        return DuplicatedLinear

    def fuse_layernorm_and_linear(self) -> bool:
        """Norm and linear layer are one module."""
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        """The module with both."""
        return NormColumnParallelLinear

    def layer_norm(
        self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False
    ) -> Any:
        """The norm."""
        return Norm

    def core_attention(self) -> type:
        """The attention."""
        return FusedAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        """The experts."""
        if not moe_use_grouped_gemm:
            return super().grouped_mlp_modules(moe_use_grouped_gemm)
        return functools.partial(
            TEGroupedMLP,
            submodules=GroupedMLPSubmodules(
                linear_fc1=ColumnGroupedLinear, linear_fc2=RowGroupedLinear
            ),
        )

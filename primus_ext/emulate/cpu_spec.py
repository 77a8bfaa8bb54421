"""The norm of Megatron-Core's local layers on the CPU: also under sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch


class HostNorm:
    """Stands for ``WrappedTorchNorm``, which refuses sequence parallelism.

    Its parameters are replicated over the tensor-parallel ranks, of which each normalises a part
    of the sequence (or of the heads): the attribute ``sequence_parallel`` makes Megatron sum their
    gradients over those ranks.
    """

    def __new__(  # type: ignore[misc]
        cls, config: Any, hidden_size: int, eps: float = 1e-5, **_unused: Any
    ) -> torch.nn.Module:
        """Build the norm.

        Args:
            config: Megatron's TransformerConfig.
            hidden_size: Elements to normalise over.
            eps: Added to the variance.

        Raises:
            ValueError: If the configuration asks for what torch's norms can't do.
        """
        if config.layernorm_zero_centered_gamma:
            raise ValueError("apply_layernorm_1p is not supported by the local layers")
        kinds = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
        if config.normalization not in kinds:
            raise ValueError(
                f"normalization={config.normalization!r} is not supported by the local layers; "
                f"use one of {', '.join(kinds)}"
            )
        norm = kinds[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm

"""Transformer Engine before April 2025, where it kept no stand-in of a weight's gradient.

A layer that adds its weight's gradient to the gradient buffer by itself returns an empty tensor of
the weight's shape in its place.  Releases since NVIDIA/TransformerEngine pull request 1651 (opened
2025-04-07) keep one of each shape for the life of the process; before it (pull request 507, 2023),
each was made anew and given back at once.  Of a Llama-3-8B the five that are kept take 1.4 GiB.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from primus_ext.emulate import registry

GROUP = "te_2024"


def install(_request: Mapping[str, Any]) -> None:
    """Apply the patches, before the program imports Transformer Engine."""
    registry.apply_all(GROUP)


@registry.patch("transformer_engine.pytorch.module.base", "get_dummy_wgrad", group=GROUP,
                versions="transformer-engine 2.20",
                reason="releases before April 2025 gave these tensors back at once")  # fmt: skip
def _made_anew(module: Any) -> None:
    torch = module.torch

    def get_dummy_wgrad(shape: list[int], dtype: Any, zero: bool = False) -> Any:
        make = torch.zeros if zero else torch.empty
        return make(shape, dtype=dtype, device="cuda", requires_grad=False)

    module.get_dummy_wgrad = get_dummy_wgrad

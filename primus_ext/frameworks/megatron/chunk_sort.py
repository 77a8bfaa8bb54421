"""Sorting received tokens by expert, without one tensor for each (rank, expert) pair.

Megatron splits what it received into one view for each local expert and sender, and concatenates
the views in another order: one kernel on a device, but hundreds of views with their gradients'
views, which are most of the work of emulating a layer with many experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from primus_ext.emulate.registry import patch
from primus_ext.observe import recorder

_CORE = "megatron-core 0.19"


class _Rearranged(torch.autograd.Function):
    """Rows in another order, forward and backward: a new tensor, and one kernel that fills it."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        return _concatenated(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return _concatenated(gradients[0])


def _concatenated(rows: torch.Tensor) -> torch.Tensor:
    out = rows.new_empty(rows.shape)
    active = recorder.current()
    if active is not None:
        active.kernel("aten.cat", [rows], [out])
    return out


def _sorted(rows: torch.Tensor) -> torch.Tensor:
    out: Any = _Rearranged.apply(rows)
    return out


@patch("megatron.core.transformer.moe.moe_utils", "sort_chunks_by_idxs", group="megatron",
       versions=_CORE,
       reason="a view for each expert and sender: most of the time of emulating a layer of experts")
def _sort_chunks(module: Any) -> None:
    original = module.sort_chunks_by_idxs

    def sort_chunks_by_idxs(
        input: torch.Tensor,
        split_sizes: torch.Tensor,
        sorted_idxs: torch.Tensor,
        probs: torch.Tensor | None = None,
        fused: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if fused or not isinstance(input, FakeTensor):
            return original(input, split_sizes, sorted_idxs, probs, fused)
        return _sorted(input), None if probs is None else _sorted(probs)

    module.sort_chunks_by_idxs = sort_chunks_by_idxs

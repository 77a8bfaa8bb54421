"""Offload of saved tensors: Transformer Engine leaves alone what is not on a CUDA device."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from primus_ext.emulate.registry import patch
from primus_ext.emulate.te.patches import GROUP

_TE = "transformer-engine 2.20"
_LEAST_ELEMENTS = 256 * 1024
"""Smaller tensors stay (``OffloadableLayerState._check_if_offload`` of that release)."""


@patch("transformer_engine.pytorch.cpu_offload", "OffloadableLayerState._check_if_offload",
       group=GROUP, versions=_TE,
       reason="which saved tensors are offloaded is asked of their device and of their class")
def _offloads_virtual_tensors(module: types.ModuleType) -> None:
    def check(self: Any, t: torch.Tensor) -> bool:
        movable = not isinstance(t, torch.nn.Parameter) and t.is_cuda
        if t.numel() < _LEAST_ELEMENTS or not movable or getattr(t, "_TE_do_not_offload", False):
            return False
        return t.is_contiguous() or bool(getattr(t, "offload_base_tensor", False))

    module.OffloadableLayerState._check_if_offload = check  # type: ignore[attr-defined]


@patch("transformer_engine.pytorch.cpu_offload_v1", "mark_activation_offload",
       group=GROUP, versions=_TE,
       reason="plain tensors are told from quantized ones by their exact class")
def _marks_fake_tensors(module: types.ModuleType) -> None:
    original = module.mark_activation_offload

    def mark_activation_offload(*tensors: Any, offload: bool = True) -> None:
        for tensor in tensors:
            if isinstance(tensor, FakeTensor):
                setattr(tensor, "activation_offloading" if offload else "_TE_do_not_offload", True)
        rest = [t for t in tensors if not isinstance(t, FakeTensor)]
        original(*rest, offload=offload)

    module.mark_activation_offload = mark_activation_offload  # type: ignore[attr-defined]

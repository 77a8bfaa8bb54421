"""Upkeep of FP8 scales: delayed scaling after the reduction of maxima, scales of many tensors."""

from __future__ import annotations

from typing import Any

import torch

from primus_ext.emulate.te import cast_kernels
from primus_ext.emulate.te.bindings import binding
from primus_ext.emulate.te.operands import element_name
from primus_ext.emulate.te.ops import define, nothing


@define(
    "delayed_scaling_update(Tensor reduced_amax, Tensor(a!)[] histories, Tensor(b!)[] scales, *, "
    "str algorithm, str element, float margin) -> ()",
    fake=nothing,
)
def _delayed_scaling_update(
    reduced_amax: torch.Tensor, histories: Any, scales: Any, *, algorithm: str, element: str,
    margin: float,
) -> None:
    largest = torch.finfo(cast_kernels.FP8[element]).max * 2.0**-margin
    parts = reduced_amax.split([s.numel() for s in scales])
    for reduced, history, scale in zip(parts, histories, scales, strict=True):
        latest = torch.where(reduced != 0, reduced, history[0])
        rolled = history.roll(-1, 0)
        rolled[-1] = latest
        amax = rolled.amax(0) if algorithm == "max" else latest
        kept = rolled.clone()
        kept[0] = 0
        history.copy_(torch.where(latest != 0, kept, history))
        valid = torch.isfinite(amax) & (amax > 0)
        new = torch.where(valid, largest / amax, scale)
        scale.copy_(torch.where(torch.isinf(new), torch.finfo(torch.float32).max, new))


@binding()
def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: torch.Tensor, amax_histories: list[torch.Tensor],
    scales: list[torch.Tensor], amax_compute_algo: str, fp8_dtype: Any, margin: float,
) -> None:
    """Roll the histories of maxima and derive new scales (``delayed_scaling.cu``)."""
    _delayed_scaling_update(
        amax_reduction_buffer, amax_histories, scales, algorithm=amax_compute_algo,
        element=element_name(fp8_dtype), margin=float(margin),
    )  # fmt: skip


@define(
    "multi_tensor_compute_scale(Tensor noop, Tensor[] amax, Tensor(a!)[] scale, "
    "Tensor(b!)[] scale_inv, *, float max_fp8, bool pow2_scales, float epsilon) -> ()",
    fake=nothing,
)
def _multi_tensor_compute_scale(
    noop: Any, amax: Any, scale: Any, scale_inv: Any, *, max_fp8: float, pow2_scales: bool,
    epsilon: float,
) -> None:
    element = "fp8_e4m3" if max_fp8 == 448.0 else "fp8_e5m2"
    for a, s, inverse in zip(amax, scale, scale_inv, strict=True):
        s.copy_(cast_kernels.scale_from_amax(a, element, pow2_scales, epsilon))
        inverse.copy_(s.reciprocal())


@binding()
def multi_tensor_compute_scale_and_scale_inv(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: list[list[torch.Tensor]],
    max_fp8: float, force_pow_2_scales: bool, epsilon: float,
) -> None:
    """Scales and their inverses from maxima, for ``[amax, scale, scale_inv]``."""
    _multi_tensor_compute_scale(
        noop_flag, *tensor_lists, max_fp8=max_fp8, pow2_scales=force_pow_2_scales,
        epsilon=epsilon,
    )  # fmt: skip

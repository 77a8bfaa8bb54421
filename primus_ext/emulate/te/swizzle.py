"""Rearrangement of block scales for the tensor cores, as a GEMM asks for it.

MXFP8 and NVFP4 scales that a quantizer left in plain order are rearranged into a new buffer before
each GEMM; FP8 block scales are turned into MXFP8 scales on Blackwell.  On real tensors the order
is left plain: the CPU kernels read it, and nothing else does.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from primus_ext.emulate.te.bindings import binding
from primus_ext.emulate.te.operands import Operand
from primus_ext.emulate.te.ops import define
from primus_ext.emulate.te.target import target


@define(
    "swizzle_scales(Tensor scale_inv, *, str format) -> Tensor",
    fake=lambda scale_inv, **_: scale_inv.new_empty(scale_inv.shape),
)
def _swizzle_scales(scale_inv: torch.Tensor, **_: Any) -> torch.Tensor:
    return scale_inv.clone()


def _group_bytes(scales: list[torch.Tensor]) -> int:
    """One buffer for all, each part aligned to 16 bytes."""
    total = 0
    for scale in scales:
        total = -(-total // 16) * 16 + scale.numel() * scale.element_size()
    return total


@define(
    "swizzle_scales_group(Tensor[] scale_inv, *, str format) -> Tensor",
    fake=lambda scale_inv, **_: scale_inv[0].new_empty(_group_bytes(scale_inv), dtype=torch.uint8),
)
def _swizzle_scales_group(scale_inv: list[torch.Tensor], **_: Any) -> torch.Tensor:
    return scale_inv[0].new_zeros(_group_bytes(scale_inv), dtype=torch.uint8)


def _mx_scale_shape(x: Operand) -> tuple[int, int]:
    rows, cols = (x.cols, x.rows) if x.transposed else (x.rows, x.cols)
    return -(-rows // 128) * 128, -(-math.ceil(cols / 32) // 4) * 4


@define(
    "block_scales_to_mxfp8(Tensor scale_inv, *, int rows, int cols, str format) -> Tensor",
    fake=lambda scale_inv, *, rows, cols, **_: scale_inv.new_empty((rows, cols), dtype=torch.uint8),
)
def _block_scales_to_mxfp8(
    scale_inv: torch.Tensor, *, rows: int, cols: int, format: str
) -> torch.Tensor:
    return scale_inv.new_zeros((rows, cols), dtype=torch.uint8)


def _needs_swizzle(x: Operand, tensor: Any) -> bool:
    scaled = x.format.endswith(("/mxfp8", "/nvfp4"))
    return scaled and not tensor._with_gemm_swizzled_scales


def _broadcasts(x: Operand) -> bool:
    return "/block" in x.format and target().sm_arch >= 100


def for_gemm(x: Operand, tensor: Any) -> tuple[Operand, torch.Tensor | None]:
    """The operand with scales as the GEMM reads them, and a buffer to keep until it is done."""
    if _needs_swizzle(x, tensor):
        assert x.scale_inv is not None
        return dataclasses.replace(x, scale_inv=_swizzle_scales(x.scale_inv, format=x.format)), None
    if _broadcasts(x):
        rows, cols = _mx_scale_shape(x)
        return x, _block_scales_to_mxfp8(x.scale_inv, rows=rows, cols=cols, format=x.format)
    return x, None


def group_for_gemm(
    group: list[Operand], tensors: list[Any]
) -> tuple[list[Operand], list[torch.Tensor | None]]:
    """The same for all tensors of a grouped GEMM: one kernel and one buffer.

    The CPU kernel reads the plain scales through the operands; the buffers are to be held until
    the GEMM is launched, as the extension does.
    """
    pairs = zip(group, tensors, strict=True)
    pending = [x for x, t in pairs if _needs_swizzle(x, t) and x.data.numel()]
    held: list[torch.Tensor | None] = []
    if pending:
        scales = [x.scale_inv for x in pending]
        held.append(_swizzle_scales_group(scales, format=pending[0].format))
    held += [for_gemm(x, None)[1] for x in group if _broadcasts(x) and x.data.numel()]
    return group, held


def swizzle_in_place(tensor: Any) -> None:
    """Replace the scales of a quantized tensor by rearranged ones and mark it."""
    for side in ("rowwise", "columnwise"):
        scales = getattr(tensor, f"_{side}_scale_inv")
        if scales is not None:
            setattr(tensor, f"_{side}_scale_inv", _swizzle_scales(scales, format="in place"))
    tensor._with_gemm_swizzled_scales = True


@binding()
def swizzle_scales_for_gemm_(tensor: Any) -> None:
    """Rearrange the scales of an MXFP8 or NVFP4 tensor for the GEMM, unless they are."""
    if not getattr(tensor, "_with_gemm_swizzled_scales", True):
        swizzle_in_place(tensor)

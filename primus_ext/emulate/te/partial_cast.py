"""Quantization of a rank's shard of the master weights (FP8 parameters, distributed optimizer).

A shard is a flat run of a matrix (h, w) that starts at ``start_offset``; maxima of the blocks are
taken of it, reduced over the ranks, and the shard is cast with the common scales.  Sharded NVFP4
parameters are not emulated.
"""

from __future__ import annotations

from typing import Any

import torch

from primus_ext.emulate.te import cast_kernels
from primus_ext.emulate.te.bindings import binding
from primus_ext.emulate.te.operands import element_name
from primus_ext.emulate.te.ops import define, nothing

_SHARD = "int h, int w, int start_offset"


def _matrix(shard: torch.Tensor, h: int, w: int, start: int) -> torch.Tensor:
    """The whole matrix (fp32), zero outside the shard."""
    flat = torch.zeros(h * w)
    flat[start : start + shard.numel()] = shard.reshape(-1).float()
    return flat.view(h, w)


def _cast(shard: torch.Tensor, out: torch.Tensor, factor: torch.Tensor, start: int, element: str
          ) -> None:  # fmt: skip
    """Bytes of the shard times a factor for every element of the matrix."""
    scaled = shard.reshape(-1).float() * factor.reshape(-1)[start : start + shard.numel()]
    out.copy_(cast_kernels.encode_fp8(scaled, element).reshape(out.shape))


@define(
    f"fp8_block_partial_amax(Tensor x, Tensor(a!) amax, *, {_SHARD}, int block) -> ()",
    fake=nothing,
)
def _block_amax(
    x: torch.Tensor, amax: torch.Tensor, *, h: int, w: int, start_offset: int, block: int
) -> None:
    cast_kernels.place(cast_kernels.block_amax(_matrix(x, h, w, start_offset), block, block), amax)


@binding()
def fp8_block_scaling_compute_partial_amax(
    tensor: torch.Tensor, amax: torch.Tensor, h: int, w: int, start_offset: int, block_len: int
) -> None:
    """Maxima of the blocks as far as this shard knows them."""
    _block_amax(tensor, amax, h=h, w=w, start_offset=start_offset, block=block_len)


@define(
    f"fp8_block_partial_cast(Tensor x, Tensor(a!) out, Tensor scale, *, {_SHARD}, int block, "
    "str element) -> ()",
    fake=nothing,
)
def _block_cast(
    x: torch.Tensor, out: torch.Tensor, scale: torch.Tensor, *, h: int, w: int,
    start_offset: int, block: int, element: str,
) -> None:
    factor = cast_kernels.expand(scale, block, block, (h, w))
    _cast(x, out, factor, start_offset, element)


@binding()
def fp8_block_scaling_partial_cast(
    inp: torch.Tensor, out: torch.Tensor, scale: torch.Tensor, h: int, w: int,
    start_offset: int, block_len: int, out_dtype: Any,
) -> None:
    """Cast the shard with the scale of each block."""
    _block_cast(
        inp, out, scale, h=h, w=w, start_offset=start_offset, block=block_len,
        element=element_name(out_dtype),
    )  # fmt: skip


@define(
    f"mxfp8_partial_amax(Tensor x, Tensor(a!) row, Tensor(b!) col, *, {_SHARD}) -> ()",
    fake=nothing,
)
def _mx_amax(
    x: torch.Tensor, row: torch.Tensor, col: torch.Tensor, *, h: int, w: int, start_offset: int
) -> None:
    matrix = _matrix(x, h, w, start_offset)
    cast_kernels.place(cast_kernels.block_amax(matrix, 1, cast_kernels.MX_BLOCK), row)
    cast_kernels.place(cast_kernels.block_amax(matrix, cast_kernels.MX_BLOCK, 1), col)


@binding()
def mxfp8_scaling_compute_partial_amax(
    input: torch.Tensor, amax_rowwise: torch.Tensor, amax_colwise: torch.Tensor, rows: int,
    cols: int, start_offset: int,
) -> None:
    """Maxima of runs of 32 along rows and along columns, in the padded shape of the scales."""
    _mx_amax(input, amax_rowwise, amax_colwise, h=rows, w=cols, start_offset=start_offset)


@define(
    "mxfp8_partial_cast(Tensor x, Tensor(a!) row, Tensor(b!) col, Tensor row_scale_inv, "
    f"Tensor col_scale_inv, *, {_SHARD}) -> ()",
    fake=nothing,
)
def _mx_cast(
    x: torch.Tensor, row: torch.Tensor, col: torch.Tensor, row_scale_inv: torch.Tensor,
    col_scale_inv: torch.Tensor, *, h: int, w: int, start_offset: int,
) -> None:
    sides = ((row, row_scale_inv, (1, cast_kernels.MX_BLOCK)),
             (col, col_scale_inv, (cast_kernels.MX_BLOCK, 1)))  # fmt: skip
    for out, exponent, block in sides:
        counts = -(-h // block[0]), -(-w // block[1])
        factor = torch.exp2(127 - exponent[: counts[0], : counts[1]].float())
        _cast(x, out, cast_kernels.expand(factor, *block, (h, w)), start_offset, "fp8_e4m3")


@binding()
def mxfp8_scaling_partial_cast(
    input: torch.Tensor, output_rowwise: torch.Tensor, output_colwise: torch.Tensor,
    scale_inv_rowwise: torch.Tensor, scale_inv_colwise: torch.Tensor, rows: int, cols: int,
    start_offset: int,
) -> None:
    """Cast the shard into both copies."""
    _mx_cast(
        input, output_rowwise, output_colwise, scale_inv_rowwise, scale_inv_colwise, h=rows,
        w=cols, start_offset=start_offset,
    )  # fmt: skip


@define(
    "multi_tensor_compute_scale_e8m0(Tensor[] amax, Tensor(a!)[] scale_inv) -> ()", fake=nothing
)
def _scale_e8m0(amax: Any, scale_inv: Any) -> None:
    for a, exponent in zip(amax, scale_inv, strict=True):
        exponent.copy_(cast_kernels.e8m0_exponent(a, "fp8_e4m3"))


@binding()
def multi_tensor_compute_scale_inv_e8m0(
    chunk_size: int, dummy: None, tensor_lists: list[list[torch.Tensor]]
) -> None:
    """Power-of-two scales of E4M3 blocks from their maxima."""
    _scale_e8m0(*tensor_lists)

"""Real arithmetic of quantized formats: encoding into buffers and decoding.

Formats are named as in :mod:`primus_ext.emulate.te.operands`.  Block scales are kept in the plain
order of the buffers' shapes; the rearranged order that tensor cores want exists for fake tensors
only.  NVFP4 is in :mod:`primus_ext.emulate.te.nvfp4_kernels`.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from primus_ext.emulate.te import nvfp4_kernels

FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
BLOCK = 128
"""Edge of an FP8 block (``kBlockLen``)."""
MX_BLOCK = 32
"""Elements that share one power-of-two scale in MXFP8."""


def encode_fp8(value: torch.Tensor, element: str) -> torch.Tensor:
    """Bytes of the saturating conversion to FP8."""
    dtype = FP8[element]
    limit = torch.finfo(dtype).max
    return value.float().clamp(-limit, limit).to(dtype).view(torch.uint8)


def decode_fp8(data: torch.Tensor, element: str) -> torch.Tensor:
    """fp32 values of FP8 bytes, without any scale."""
    return data.contiguous().view(FP8[element]).float()


def take_maximum(value: torch.Tensor, amax: torch.Tensor | None) -> None:
    """Raise ``amax``, if there is one (an empty one is none), to the largest absolute value."""
    if amax is not None and amax.numel() and value.numel():
        torch.maximum(amax, value.float().abs().max().reshape(amax.shape), out=amax)


def scale_from_amax(
    amax: torch.Tensor, element: str, pow2: bool, epsilon: float
) -> torch.Tensor:
    """Factor that maps ``amax`` to the largest FP8 value (``compute_scale_from_amax``)."""
    amax = amax.float().clamp(min=epsilon)
    scale = torch.finfo(FP8[element]).max / amax
    scale = torch.where(torch.isinf(scale), torch.finfo(torch.float32).max, scale)
    if pow2:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    plain = (amax == 0) | ~torch.isfinite(amax)
    return torch.where(plain, 1.0, scale)


def _pad(x: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Zero-pad a matrix to multiples of the block."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % cols, 0, -x.shape[0] % rows))


def block_amax(x: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Largest absolute value of every block of ``rows`` x ``cols`` of a matrix."""
    blocks = _pad(x.abs(), rows, cols).unflatten(0, (-1, rows)).unflatten(2, (-1, cols))
    return blocks.amax((1, 3))


def expand(scale: torch.Tensor, rows: int, cols: int, shape: Any) -> torch.Tensor:
    """Repeat a scale per block over the elements of a matrix of ``shape``."""
    full = scale.repeat_interleave(rows, 0).repeat_interleave(cols, 1)
    return full[: shape[0], : shape[1]]


def place(scale: torch.Tensor, buffer: torch.Tensor) -> None:
    """Write scales into the upper left of their padded buffer."""
    buffer.zero_()
    buffer[: scale.shape[0], : scale.shape[1]] = scale


def block_shape(scaling: str, columnwise: bool) -> tuple[int, int]:
    """Rows and columns of the logical matrix that share a scale."""
    if scaling == "block2d":
        return BLOCK, BLOCK
    length = MX_BLOCK if scaling == "mxfp8" else BLOCK
    return (length, 1) if columnwise else (1, length)


def e8m0_exponent(amax: torch.Tensor, element: str) -> torch.Tensor:
    """Biased exponent of the smallest power of two >= ``amax / max``, as bytes.

    Bit by bit as ``float_to_e8m0`` (``common/util/ptx_arch_spec.cuh``).
    """
    ratio = (amax.float() * (1.0 / torch.finfo(FP8[element]).max)).contiguous()
    bits = ratio.view(torch.int32)
    exponent, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    tiny = (exponent == 0) & (mantissa <= 0x400000)
    exponent = exponent + ((mantissa > 0) & (exponent < 0xFE) & ~tiny)
    return exponent.clamp(max=0xFE).to(torch.uint8)


def _store_side(
    x: torch.Tensor, data: Any, scale_inv: Any, element: str, scaling: str, columnwise: bool,
    pow2: bool, epsilon: float,
) -> None:
    """Quantize one copy of a matrix with block scales."""
    if data is None:
        return
    rows, cols = block_shape(scaling, columnwise)
    amax = block_amax(x, rows, cols)
    if scaling == "mxfp8":
        exponent = e8m0_exponent(amax, element)
        inverse = torch.exp2(exponent.float() - 127)
        place(exponent, scale_inv)
        encoded = encode_fp8(x / expand(inverse, rows, cols, x.shape), element)
        data.copy_(encoded.reshape(data.shape))
        return
    scale = scale_from_amax(amax, element, pow2, epsilon)
    encoded = encode_fp8(x * expand(scale, rows, cols, x.shape), element)
    inverse = scale.reciprocal()
    if scaling == "block1d":
        # one row of scales a block: the rowwise scales are stored transposed
        place(inverse if columnwise else inverse.t(), scale_inv)
    else:
        place(inverse.t() if columnwise else inverse, scale_inv)
    data.copy_((encoded.t() if columnwise else encoded).reshape(data.shape))


def store(
    value: torch.Tensor, row: Any, row_scale_inv: Any, col: Any, col_scale_inv: Any, scale: Any,
    amax: Any, *, format: str, pow2_scales: bool = False, amax_epsilon: float = 0.0,
) -> None:
    """Quantize ``value`` into the buffers that are given.

    Args:
        value: Values in their logical shape.
        row: Bytes usable by rows.
        row_scale_inv: Their factors to decode with.
        col: Bytes usable by columns (transposed, except for MXFP8).
        col_scale_inv: Their factors.
        scale: Per-tensor scale (scaling ``tensor``).
        amax: Running maximum (delayed scaling).
        format: Element type and scaling.
        pow2_scales: Round block scales down to powers of two.
        amax_epsilon: Lower bound of a block's maximum.

    Raises:
        NotImplementedError: For NVFP4, which has a function of its own.
    """
    element, _, scaling = format.partition("/")
    if element not in FP8:
        raise NotImplementedError(f"quantization to {format} on real tensors is not emulated")
    x = value.float().reshape(-1, value.shape[-1])
    if scaling != "tensor":
        sides = ((row, row_scale_inv, False), (col, col_scale_inv, True))
        for data, scales, columnwise in sides:
            _store_side(x, data, scales, element, scaling, columnwise, pow2_scales, amax_epsilon)
        return
    encoded = encode_fp8(x * scale, element)
    if row is not None:
        row.copy_(encoded.reshape(row.shape))
    if col is not None:
        col.copy_(encoded.t().reshape(col.shape))
    if row_scale_inv is not None:
        row_scale_inv.copy_(scale.reciprocal().reshape(row_scale_inv.shape))
    take_maximum(x, amax)


def _decode_scales(
    scale_inv: torch.Tensor, scaling: str, shape: tuple[int, int], columnwise: bool
) -> torch.Tensor:
    """Factors for every element of the logical matrix."""
    if scaling == "tensor":
        return scale_inv.float()
    rows, cols = block_shape(scaling, columnwise)
    scales = scale_inv
    if scaling == "mxfp8":
        scales = torch.exp2(scale_inv.float() - 127)
    elif (scaling == "block1d") != columnwise:
        scales = scale_inv.t()
    counts = math.ceil(shape[0] / rows), math.ceil(shape[1] / cols)
    return expand(scales[: counts[0], : counts[1]], rows, cols, shape)


def decode(
    data: torch.Tensor, scale_inv: torch.Tensor, format: str, *, columnwise: bool,
    transposed: bool, amax: torch.Tensor | None = None,
) -> torch.Tensor:
    """The logical matrix (fp32) of a quantized buffer.

    Args:
        data: Bytes.
        scale_inv: Factors to decode with.
        format: Element type and scaling.
        columnwise: The buffer is the copy for use by columns.
        transposed: The buffer holds the transpose.
        amax: Largest absolute value (NVFP4).
    """
    element, _, scaling = format.partition("/")
    if scaling == "nvfp4":
        assert amax is not None
        found = nvfp4_kernels.decode_rows(data, scale_inv, amax)
        return found.t() if transposed else found
    values = decode_fp8(data, element)
    if transposed:
        values = values.reshape(values.shape[0], -1).t()
    else:
        values = values.reshape(-1, values.shape[-1])
    shape = (values.shape[0], values.shape[1])
    return values * _decode_scales(scale_inv, scaling, shape, columnwise)

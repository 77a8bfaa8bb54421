"""Real arithmetic that several CPU kernels share: decoding of quantized buffers, GELU."""

from __future__ import annotations

import math
from typing import Any

import torch

_FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
BLOCK = 128
"""Edge of an FP8 block (``Float8BlockQuantizer.block_len``)."""
MX_BLOCK = 32
"""Elements that share one E8M0 scale in MXFP8."""


def dequantize(
    data: torch.Tensor, scale_inv: torch.Tensor | None, amax: torch.Tensor | None, fmt: str,
    transposed: bool,
) -> torch.Tensor:
    """The logical matrix of a buffer: as it is if plain, else decoded to fp32.

    Args:
        data: Plain tensor or raw bytes.
        scale_inv: Factors to decode with.
        amax: Global maximum (NVFP4).
        fmt: Format as in :class:`primus_ext.emulate.te.operands.Operand`.
        transposed: Whether the buffer holds the transpose.

    Raises:
        NotImplementedError: For NVFP4, whose decoding is not emulated.
    """
    if fmt == "plain":
        return data
    element, _, scaling = fmt.partition("/")
    if element not in _FP8 or scale_inv is None:
        raise NotImplementedError(f"decoding of {fmt} on real tensors is not emulated")
    matrix = data.reshape(-1, data.shape[-1]).view(_FP8[element]).float()
    matrix = matrix * _scales(scale_inv, scaling, matrix.shape)
    if transposed:
        # stored as (cols, *leading): flatten, then swap
        matrix = data_transpose(matrix, data.shape)
    elif data.dim() != 2:
        matrix = matrix.reshape(data.shape)
    return matrix


def data_transpose(matrix: torch.Tensor, stored: Any) -> torch.Tensor:
    """Turn a buffer stored as ``(cols, rows...)`` into the matrix ``(rows, cols)``."""
    return matrix.reshape(stored[0], -1).t()


def _scales(scale_inv: torch.Tensor, scaling: str, shape: torch.Size) -> torch.Tensor:
    if scaling == "tensor":
        return scale_inv
    raise NotImplementedError(f"decoding of {scaling} scales on real tensors is not emulated")


def gelu_gradient(x: torch.Tensor) -> torch.Tensor:
    """Derivative of the tanh approximation of GELU."""
    c = math.sqrt(2.0 / math.pi)
    t = torch.tanh(c * (x + 0.044715 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x)

"""Real arithmetic that several CPU kernels share: decoding of GEMM operands, GELU."""

from __future__ import annotations

import math

import torch

from primus_ext.emulate.te.cast_kernels import decode


def dequantize(
    data: torch.Tensor, scale_inv: torch.Tensor | None, amax: torch.Tensor | None, fmt: str,
    transposed: bool, columnwise: bool = False,
) -> torch.Tensor:
    """The logical matrix of a GEMM operand's buffer: as it is if plain, else decoded to fp32.

    Args:
        data: Plain tensor or raw bytes.
        scale_inv: Factors to decode with.
        amax: Global maximum (NVFP4).
        fmt: Format as in :class:`primus_ext.emulate.te.operands.Operand`.
        transposed: Whether the buffer holds the transpose.
        columnwise: Whether it is the copy for use by columns.
    """
    if fmt == "plain":
        return data
    assert scale_inv is not None
    return decode(data, scale_inv, fmt, columnwise=columnwise, transposed=transposed, amax=amax)


def gelu_gradient(x: torch.Tensor) -> torch.Tensor:
    """Derivative of the tanh approximation of GELU."""
    c = math.sqrt(2.0 / math.pi)
    t = torch.tanh(c * (x + 0.044715 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x)

"""Real arithmetic of NVFP4: two levels of scales, packed FP4 and the Hadamard transform.

Formulas as in Transformer Engine's own ``custom_recipes/reference_nvfp4.py`` (2.20).  Left out,
since nothing but single values depends on them: stochastic rounding (values are rounded to the
nearest), scales over 16 x 16 blocks of weights (every row of a block gets its own), and the random
signs of the transform (both operands of a product have the same, so they cancel).
"""

from __future__ import annotations

from typing import Any

import torch

BLOCK = 16
"""Elements that share an E4M3 scale, and the size of the Hadamard transform."""
LARGEST = 6.0
"""Of E2M1."""
LARGEST_SCALE = 448.0
"""Of E4M3."""
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def encode(value: torch.Tensor) -> torch.Tensor:
    """Codes (uint8, 0 to 15) of the saturating conversion to E2M1, ties to the even code."""
    size, code = value.abs(), torch.zeros(value.shape, dtype=torch.uint8, device=value.device)
    for index, (low, high) in enumerate(zip(_VALUES, _VALUES[1:], strict=False)):
        middle = (low + high) / 2
        code += size >= middle if index % 2 else size > middle
    return code + 8 * torch.signbit(value).to(torch.uint8)


def decode(code: torch.Tensor) -> torch.Tensor:
    """fp32 values of E2M1 codes."""
    values = torch.tensor((*_VALUES, *(-value for value in _VALUES)), device=code.device)
    return values[code.long()]


def transform(x: torch.Tensor) -> torch.Tensor:
    """The transpose of a matrix, with every 16 values of a row by the orthogonal Hadamard matrix.

    Args:
        x: ``[..., n]``; its leading dimensions together are a multiple of 16.

    Returns:
        ``[n, leading]``, fp32.
    """
    two = torch.tensor(((1.0, 1.0), (1.0, -1.0)), device=x.device)
    matrix = torch.ones((1, 1), device=x.device)
    while matrix.shape[0] < BLOCK:
        matrix = torch.kron(two, matrix)
    flat = x.reshape(-1, x.shape[-1]).float().t()
    return (flat.reshape(-1, BLOCK) @ (matrix / BLOCK**0.5)).reshape(flat.shape)


def take_maxima(x: torch.Tensor, amax: list[torch.Tensor], *, hadamard: bool) -> None:
    """Write the largest absolute value of ``x``, and of its transformed transpose.

    Args:
        x: Values.
        amax: Where to: that of ``x``, then that of the transpose.  One alone may be of either copy
            where there is a transform: the larger serves both.
        hadamard: Whether there is one.
    """
    first = x.float().abs().max()
    second = transform(x).abs().max() if hadamard else first
    found = [torch.maximum(first, second)] if len(amax) == 1 else [first, second]
    for into, value in zip(amax, found, strict=True):
        into.copy_(value.expand(into.shape))


def largest(x: torch.Tensor, buffer: torch.Tensor) -> None:
    """Write the largest absolute value into ``buffer``: of everything, or of every row."""
    rows = x.float().abs().reshape(buffer.numel(), -1)
    buffer.copy_(rows.amax(1).reshape(buffer.shape))


def _global_scale(amax: torch.Tensor) -> torch.Tensor:
    """Factor before the blocks' own scales, for one row or for all."""
    scale = (LARGEST_SCALE * LARGEST / amax.float().reshape(-1, 1)).clamp(
        max=torch.finfo(torch.float32).max
    )
    return torch.where(scale == 0, 1.0, scale)


def store_rows(
    x: torch.Tensor, data: torch.Tensor, scale_inv: torch.Tensor, amax: torch.Tensor
) -> None:
    """Quantize a matrix row by row.

    Args:
        x: ``[rows, n]``, n a multiple of 16.
        data: ``[rows, n / 2]`` bytes: two codes each, the first in the low bits.
        scale_inv: Bytes of E4M3, ``[rows, n / 16]`` padded.
        amax: The largest absolute value of ``x``, or of every row.
    """
    overall = _global_scale(amax)
    blocks = x.float().unflatten(1, (-1, BLOCK))
    wanted = blocks.abs().amax(2) * (overall * (1 / LARGEST))
    scales = wanted.clamp(max=LARGEST_SCALE).to(torch.float8_e4m3fn)
    scale_inv.zero_()
    scale_inv[: scales.shape[0], : scales.shape[1]] = scales.view(torch.uint8)
    factor = (1.0 / (scales.float() * (1.0 / overall))).clamp(max=torch.finfo(torch.float32).max)
    code = encode((blocks * factor[:, :, None]).clamp(-LARGEST, LARGEST)).flatten(1)
    data.copy_((code[:, ::2] + 16 * code[:, 1::2]).reshape(data.shape))


def store(
    x: torch.Tensor, row: Any, row_scale_inv: Any, col: Any, col_scale_inv: Any,
    col_amax: torch.Tensor | None, amax: torch.Tensor | None, *, hadamard: bool,
) -> None:
    """Quantize into the copies that are given.

    Args:
        x: Values, flattened to a matrix.
        row: Packed copy for use by rows, or None.
        row_scale_inv: Its scales.
        col: Packed transpose, or None.
        col_scale_inv: Its scales.
        col_amax: Largest value of the transpose; without the transform that of ``x`` is put there.
        amax: Largest value of ``x``.
        hadamard: Whether the transpose is transformed.
    """
    flat = x.reshape(-1, x.shape[-1])
    if row is not None and amax is not None:
        if amax.numel() > 1:  # no kernel before takes the rows' own
            largest(flat, amax)
        store_rows(flat, row, row_scale_inv, amax)
    if col is None or col_amax is None:
        return
    if amax is not None and not hadamard and amax.numel() == col_amax.numel():
        col_amax.copy_(amax)
    turned = transform(flat) if hadamard else flat.t()
    store_rows(turned, col, col_scale_inv, col_amax)


def decode_rows(
    data: torch.Tensor, scale_inv: torch.Tensor, amax: torch.Tensor
) -> torch.Tensor:
    """fp32 matrix of a packed buffer ``[..., n / 2]``, ``[rows, n]``."""
    packed = data.reshape(-1, data.shape[-1])
    values = decode(torch.stack((packed & 15, packed >> 4), 2).flatten(1))
    counts = values.shape[0], values.shape[1] // BLOCK
    scales = scale_inv.view(torch.float8_e4m3fn)[: counts[0], : counts[1]].float()
    return values * (scales / _global_scale(amax)).repeat_interleave(BLOCK, 1)

"""Formats of quantized data: encoding and decoding, shards, buffers that share an allocation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from primus_ext.emulate.te import bulk, cast_kernels, module
from primus_ext.emulate.te.bindings import BINDINGS
from primus_ext.emulate.te.cast_kernels import MX_BLOCK

module.build()

ELEMENTS = {"fp8_e4m3": (3, -6), "fp8_e5m2": (2, -14)}
"""Mantissa bits and smallest normal exponent."""
EDGES = {"tensor": (10**6, 10**6), "block2d": (128, 128), "block1d": (1, 128), "mxfp8": (1, 32)}
"""Rows and columns that share a scale in the copy for use by rows."""


def buffers(rows: int, cols: int, scaling: str) -> tuple[list[Any], list[Any]]:
    """Buffers of both copies: (data, inverse scales), with the padding of the real extension."""
    data = [torch.empty(rows, cols, dtype=torch.uint8), torch.empty(cols, rows, dtype=torch.uint8)]
    if scaling == "tensor":
        one = torch.empty(1)
        return [data[0], one], [data[1], one]
    by_row, by_col = math.ceil(rows / 128), math.ceil(cols / 128)
    if scaling == "mxfp8":
        data[1] = torch.empty(rows, cols, dtype=torch.uint8)
        shapes = (by_row * 128, by_col * 4), (by_row * 4, by_col * 128)
        scales = [torch.empty(s, dtype=torch.uint8) for s in shapes]
    elif scaling == "block2d":
        scales = [torch.empty(by_row, by_col + 3), torch.empty(by_col, by_row + 3)]
    else:
        scales = [torch.empty(by_col, rows + 3), torch.empty(by_row, cols + 3)]
    return [data[0], scales[0]], [data[1], scales[1]]


def spread(x: torch.Tensor, edges: tuple[int, int]) -> torch.Tensor:
    """For every element the maximum of those that share its scale."""
    rows, cols = min(edges[0], x.shape[0]), min(edges[1], x.shape[1])
    out = torch.empty_like(x)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], cols):
            tile = x[i : i + rows, j : j + cols]
            out[i : i + rows, j : j + cols] = tile.abs().max()
    return out


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(list(EDGES)), st.sampled_from(list(ELEMENTS)), st.booleans(),
    st.integers(1, 5), st.integers(1, 9), st.integers(0, 9),
)  # fmt: skip
def test_decoding_returns_the_value_within_a_rounding(
    scaling: str, element: str, pow2: bool, a: int, b: int, seed: int
) -> None:
    torch.manual_seed(seed)
    unit = 32 if scaling == "mxfp8" else 30  # blocks need not fill up, except MXFP8's
    x = torch.randn(a * unit, b * unit) * torch.exp(3 * torch.randn(a * unit, 1))
    (row, row_scale), (col, col_scale) = buffers(*x.shape, scaling)
    limit = torch.finfo(cast_kernels.FP8[element]).max
    scale = (limit / x.abs().max()).reshape(1)
    name, amax = f"{element}/{scaling}", torch.zeros(1)
    given_scale = scale if scaling == "tensor" else None
    cast_kernels.store(
        x, row, row_scale, col, col_scale, given_scale, amax if scaling == "tensor" else None,
        format=name, pow2_scales=pow2)  # fmt: skip
    if scaling == "tensor":
        assert amax == x.abs().max()
    mantissa, exponent = ELEMENTS[element]
    sides = ((row, row_scale, False), (col, col_scale, True))
    for data, scales, columnwise in sides:
        back = cast_kernels.decode(
            data, scales, name, columnwise=columnwise,
            transposed=columnwise and scaling != "mxfp8")
        edges = EDGES[scaling]
        if columnwise and scaling in ("mxfp8", "block1d"):
            edges = edges[::-1]
        # a power of two as scale may waste up to one bit
        step = spread(x, edges) / limit * 2 ** (exponent - mantissa) * 2
        allowed = torch.maximum(x.abs() * 2.0 ** -(mantissa + 1), step / 2)
        assert ((back - x).abs() <= allowed * (1 + 1e-5)).all()


@pytest.mark.parametrize("splits", [[4096], [1000, 96, 3000], [1, 4095]])
def test_shards_cast_with_common_scales_are_the_whole(splits: list[int]) -> None:
    """FP8 blocks: maxima of shards, their maximum, scales, casts of shards."""
    h, w, block = 32, 128, 16
    x = torch.randn(h, w)
    shape = (h // block, w // block)
    amax, starts = torch.zeros(shape), [sum(splits[:i]) for i in range(len(splits))]
    flat = x.reshape(-1)
    for start, size in zip(starts, splits, strict=True):
        part = torch.empty(shape)
        shard = flat[start : start + size]
        BINDINGS["fp8_block_scaling_compute_partial_amax"](shard, part, h, w, start, block)
        amax = torch.maximum(amax, part)
    torch.testing.assert_close(amax, cast_kernels.block_amax(x, block, block), rtol=0, atol=0)
    scale = cast_kernels.scale_from_amax(amax, "fp8_e4m3", True, 0.0)
    out = torch.empty(h * w, dtype=torch.uint8)
    for start, size in zip(starts, splits, strict=True):
        BINDINGS["fp8_block_scaling_partial_cast"](
            flat[start : start + size], out[start : start + size], scale, h, w, start, block, 7)
    factor = cast_kernels.expand(scale, block, block, (h, w))
    assert torch.equal(out.view(h, w), cast_kernels.encode_fp8(x * factor, "fp8_e4m3"))


@pytest.mark.parametrize("splits", [[64 * 96], [1000, 5144]])
def test_shards_of_mxfp8_are_the_whole(splits: list[int]) -> None:
    h, w = 64, 96
    x = torch.randn(h, w)
    sides = buffers(h, w, "mxfp8")
    cast_kernels.store(x, *sides[0], *sides[1], None, None, format="fp8_e4m3/mxfp8")
    amaxes = [torch.zeros(scales.shape) for _, scales in sides]
    starts = [sum(splits[:i]) for i in range(len(splits))]
    pieces = [x.reshape(-1)[s : s + n] for s, n in zip(starts, splits, strict=True)]
    for start, piece in zip(starts, pieces, strict=True):
        parts = [torch.empty_like(a) for a in amaxes]
        BINDINGS["mxfp8_scaling_compute_partial_amax"](piece, *parts, h, w, start)
        amaxes = [torch.maximum(a, p) for a, p in zip(amaxes, parts, strict=True)]
    scales = [torch.empty(a.shape, dtype=torch.uint8) for a in amaxes]
    BINDINGS["multi_tensor_compute_scale_inv_e8m0"](65536, None, [amaxes, scales])
    used = [(h, w // MX_BLOCK), (h // MX_BLOCK, w)]
    for ours, (_, whole), (rows, cols) in zip(scales, sides, used, strict=True):
        assert torch.equal(ours[:rows, :cols], whole[:rows, :cols])
    outs = [torch.empty(h * w, dtype=torch.uint8) for _ in range(2)]
    for start, piece in zip(starts, pieces, strict=True):
        views = [o[start : start + piece.numel()] for o in outs]
        BINDINGS["mxfp8_scaling_partial_cast"](piece, *views, *scales, h, w, start)
    for out, (whole, _) in zip(outs, sides, strict=True):
        assert torch.equal(out.view(h, w), whole)


_SHAPE = st.lists(st.integers(0, 7), min_size=1, max_size=3)
_DTYPE = st.sampled_from((torch.uint8, torch.bfloat16, torch.float32))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(_SHAPE, _DTYPE, st.sampled_from((16, 256))), min_size=1, max_size=6))
def test_tensors_of_one_allocation(fields: list[tuple[list[int], torch.dtype, int]]) -> None:
    shapes, dtypes, alignments = (list(column) for column in zip(*fields, strict=True))
    tensors = bulk.bulk_allocate(shapes, dtypes, None, alignments)
    for i, (tensor, (shape, dtype, alignment)) in enumerate(zip(tensors, fields, strict=True)):
        assert list(tensor.shape) == shape and tensor.dtype == dtype and tensor.is_contiguous()
        if tensor.numel():
            assert tensor.data_ptr() % alignment == 0
        tensor.view(torch.uint8).fill_(i + 1)
    for i, tensor in enumerate(tensors):
        assert (tensor.view(torch.uint8) == i + 1).all()
    assert len({t.untyped_storage()._cdata for t in tensors}) == 1
    with FakeTensorMode():
        fakes = bulk.bulk_allocate(shapes, dtypes, None, alignments)
    for fake, tensor in zip(fakes, tensors, strict=True):
        assert fake.shape == tensor.shape and fake.stride() == tensor.stride()
        assert fake.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()


def test_transpose_of_bytes() -> None:
    x = torch.randint(0, 256, (2, 3, 5), dtype=torch.uint8)
    out = BINDINGS["fp8_transpose"](x, 7)
    assert out.shape == (5, 2, 3) and torch.equal(out, x.permute(2, 0, 1))


def test_largest_value_of_a_block_does_not_overflow() -> None:
    """MXFP8 rounds its scale up: the largest value of a run stays below 448 times the scale."""
    for amax in (447.9, 448.0, 448.1, 3.5, 3.500001, 2.0**-130, 0.0):
        exponent = cast_kernels.e8m0_exponent(torch.tensor([amax]), "fp8_e4m3")
        largest = 448 * 2.0 ** (int(exponent) - 127)
        assert amax <= largest and (exponent == 0 or largest < 2 * amax)

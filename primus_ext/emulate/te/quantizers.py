"""Quantized tensors as the extension allocates them, of Transformer Engine's own Python classes.

Which buffers exist, and the padding of their scales, restate ``create_tensor`` and
``get_scale_shape`` of ``transformer_engine/pytorch/csrc/quantizer.cpp`` (2.20).  This is where the
memory of low-precision training is decided.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch

from primus_ext.emulate.te.target import target

_TENSOR = "transformer_engine.pytorch.tensor"
_CLASSES = {
    "Float8": ("float8_tensor", "Float8Tensor", "float8_tensor_storage", "Float8TensorStorage"),
    "MXFP8": ("mxfp8_tensor", "MXFP8Tensor", "mxfp8_tensor_storage", "MXFP8TensorStorage"),
    "Block": ("float8_blockwise_tensor", "Float8BlockwiseQTensor",
              "float8_blockwise_tensor_storage", "Float8BlockwiseQTensorStorage"),
    "NVFP4": ("nvfp4_tensor", "NVFP4Tensor", "nvfp4_tensor_storage", "NVFP4TensorStorage"),
}  # fmt: skip
_KINDS = {
    "Float8Quantizer": "Float8",
    "Float8CurrentScalingQuantizer": "Float8",
    "MXFP8Quantizer": "MXFP8",
    "Float8BlockQuantizer": "Block",
    "NVFP4Quantizer": "NVFP4",
}
FP8_BLOCK, MXFP8_BLOCK, NVFP4_BLOCK = 128, 32, 16


def kind_of(quantizer: Any) -> str:
    """Class name of a native quantizer.

    Raises:
        NotImplementedError: For a quantizer that the extension does not know.
    """
    for base in type(quantizer).__mro__:
        if base.__name__ in _KINDS:
            return base.__name__
    raise NotImplementedError(f"quantizer {type(quantizer).__name__} is not emulated")


def _build(family: str, quantizer: Any, shape: list[int], dtype: torch.dtype, device: Any,
           **fields: Any) -> Any:  # fmt: skip
    """Call the tensor class, or the storage class for tensors that stay inside the library."""
    module, name, storage_module, storage_name = _CLASSES[family]
    if quantizer.internal:
        module = f"storage.{storage_module}"
        storage = getattr(importlib.import_module(f"{_TENSOR}.{module}"), storage_name)
        return storage(**fields, fake_dtype=dtype, quantizer=quantizer)
    tensor = getattr(importlib.import_module(f"{_TENSOR}.{module}"), name)
    stride = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return tensor(
        shape=shape, stride=stride, dtype=dtype, device=device, quantizer=quantizer, **fields)


def _roundup(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _matrix(shape: Any) -> tuple[int, int]:
    """Rows and columns with the leading dimensions flattened."""
    cols = shape[-1] if len(shape) else 1
    return math.prod(shape[:-1]), cols


def _check_blocks(shape: Any, block: int, name: str) -> None:
    rows, cols = _matrix(shape)
    if rows % block or cols % block:
        raise RuntimeError(
            f"{name} requires tensor dims that are divisible by {block} (got shape={tuple(shape)})"
        )


def scale_shape(quantizer: Any, shape: Any, columnwise: bool) -> tuple[int, int]:
    """Shape of the scales of one copy, padding included.

    Raises:
        RuntimeError: If MXFP8 or NVFP4 cannot divide the tensor into blocks.
    """
    kind = kind_of(quantizer)
    rows, cols = _matrix(shape)
    if columnwise and kind != "MXFP8Quantizer":
        rows, cols = cols, rows  # the copy is transposed
    if kind == "MXFP8Quantizer":
        _check_blocks(shape, MXFP8_BLOCK, "MXFP8")
        if columnwise:
            return _roundup(rows // MXFP8_BLOCK, 4), _roundup(cols, 128)
        return _roundup(rows, 128), _roundup(cols // MXFP8_BLOCK, 4)
    if kind == "NVFP4Quantizer":
        _check_blocks(shape, NVFP4_BLOCK, "NVFP4")
        return _roundup(rows, 128), _roundup(cols // NVFP4_BLOCK, 4)
    blocks = math.ceil(cols / FP8_BLOCK)
    if quantizer.block_scaling_dim == 2:
        return math.ceil(rows / FP8_BLOCK), _roundup(blocks, 4)
    return blocks, _roundup(rows, 4)


def hadamard_cast_fusion(shape: Any) -> bool:
    """Whether transform, cast and rearrangement of the scales are one kernel for this shape."""
    rows, cols = _matrix(shape)
    return rows % 64 == 0 and cols % 128 == 0 and 100 <= target().sm_arch <= 110


def _nvfp4_swizzles(quantizer: Any, shape: Any) -> bool:
    """Whether the NVFP4 cast itself writes scales in the GEMM's order."""
    if not quantizer.optimize_for_gemm:
        return False
    if quantizer.with_rht:
        return hadamard_cast_fusion(shape)
    rows, cols = _matrix(shape)
    plain = not quantizer.row_scaled_nvfp4 and not quantizer.nvfp4_use_4over6
    aligned = rows % 128 == 0 and cols % 128 == 0 and 100 <= target().sm_arch <= 110
    return quantizer.with_2d_quantization and plain and aligned


class _Empty:
    """Allocates buffers on one device."""

    def __init__(self, device: Any) -> None:
        kind = torch.device(device) if device is not None else torch.device("cpu")
        self.device = torch.device("cpu") if kind.type == "cuda" else kind

    def __call__(self, shape: Any, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)


def create_tensor(
    quantizer: Any, shape: list[int], dtype: torch.dtype, device: Any = None, for_gemm: bool = True
) -> Any:
    """A quantized tensor with empty buffers.

    Args:
        quantizer: One of Transformer Engine's native quantizers.
        shape: Logical shape.
        dtype: High-precision type that the tensor stands for.
        device: Where; the virtual device by default.
        for_gemm: False where the kernel that fills it cannot write rearranged scales.

    Raises:
        NotImplementedError: For another quantizer.
        RuntimeError: If the shape does not fit the format's blocks.
    """
    kind, empty = kind_of(quantizer), _Empty(device)
    if kind in ("Float8Quantizer", "Float8CurrentScalingQuantizer"):
        return _float8(quantizer, shape, dtype, empty)
    if kind == "NVFP4Quantizer":
        return _nvfp4(quantizer, shape, dtype, empty)
    row, col = quantizer.rowwise_usage, quantizer.columnwise_usage
    col_shape = shape if kind == "MXFP8Quantizer" else [shape[-1], *shape[:-1]]
    scale_dtype = torch.uint8 if kind == "MXFP8Quantizer" else torch.float32
    if kind == "MXFP8Quantizer":
        _check_blocks(shape, MXFP8_BLOCK, "MXFP8")
    buffers = {
        "rowwise_data": empty(shape) if row else None,
        "rowwise_scale_inv": empty(scale_shape(quantizer, shape, False), scale_dtype)
        if row else None,
        "columnwise_data": empty(col_shape) if col else None,
        "columnwise_scale_inv": empty(scale_shape(quantizer, shape, True), scale_dtype)
        if col else None,
        "fp8_dtype": quantizer.dtype,
    }  # fmt: skip
    if kind == "MXFP8Quantizer":
        swizzled = quantizer.optimize_for_gemm and for_gemm
        return _build("MXFP8", quantizer, shape, dtype, empty.device, **buffers,
                      with_gemm_swizzled_scales=swizzled)  # fmt: skip
    return _build("Block", quantizer, shape, dtype, empty.device, **buffers,
                  is_2D_scaled=quantizer.block_scaling_dim == 2)  # fmt: skip


def _float8(quantizer: Any, shape: list[int], dtype: torch.dtype, empty: _Empty) -> Any:
    any_layout = target().non_tn_fp8_gemm
    with_data = quantizer.rowwise_usage or any_layout
    with_transpose = quantizer.columnwise_usage and not any_layout
    data = empty(shape) if with_data else None
    transpose = empty([shape[-1], *shape[:-1]] if shape else []) if with_transpose else None
    return _build(
        "Float8", quantizer, shape, dtype, empty.device, data=data,
        fp8_scale_inv=empty((1,), torch.float32), fp8_dtype=quantizer.dtype,
        data_transpose=transpose,
    )  # fmt: skip


def _nvfp4(quantizer: Any, shape: list[int], dtype: torch.dtype, empty: _Empty) -> Any:
    _check_blocks(shape, NVFP4_BLOCK, "NVFP4")
    rows, cols = _matrix(shape)
    row, col = quantizer.rowwise_usage, quantizer.columnwise_usage
    row_scaled = quantizer.row_scaled_nvfp4
    if row_scaled and not row:
        raise RuntimeError("row-scaled NVFP4 quantization requires rowwise usage")
    return _build(
        "NVFP4", quantizer, shape, dtype, empty.device,
        rowwise_data=empty([*shape[:-1], cols // 2]) if row else None,
        rowwise_scale_inv=empty(scale_shape(quantizer, shape, False)) if row else None,
        amax_rowwise=empty((rows if row_scaled else 1,), torch.float32) if row else None,
        columnwise_data=empty((cols, rows // 2)) if col else None,
        columnwise_scale_inv=empty(scale_shape(quantizer, shape, True)) if col else None,
        amax_columnwise=empty((cols if row_scaled else 1,), torch.float32) if col else None,
        fp4_dtype=quantizer.dtype, with_gemm_swizzled_scales=_nvfp4_swizzles(quantizer, shape),
        row_scaled_nvfp4=row_scaled, nvfp4_use_4over6=quantizer.nvfp4_use_4over6,
        nvfp4_e4m3_max=quantizer.nvfp4_e4m3_max,
    )  # fmt: skip


def prepare_output(out: Any, quantizer: Any) -> Any:
    """Give an existing tensor the buffers that the quantizer's usages ask for, and drop others.

    As ``convert_and_update_tensor``; the tensor itself is returned.
    """
    kind = kind_of(quantizer)
    fresh = None

    def template() -> Any:
        nonlocal fresh
        if fresh is None:
            device = next(t for t in _buffers(out) if t is not None).device
            fresh = create_tensor(quantizer, list(out.size()), out._dtype, device=device)
        return fresh

    if kind in ("Float8Quantizer", "Float8CurrentScalingQuantizer"):
        any_layout = target().non_tn_fp8_gemm
        wanted = {
            "_data": quantizer.rowwise_usage or any_layout,
            "_transpose": quantizer.columnwise_usage and not any_layout,
        }
        out._transpose_invalid = not wanted["_transpose"]
        out._fp8_dtype = quantizer.dtype
    else:
        sides = {"rowwise": quantizer.rowwise_usage, "columnwise": quantizer.columnwise_usage}
        fields = ("data", "scale_inv")
        wanted = {f"_{side}_{field}": use for side, use in sides.items() for field in fields}
        if kind == "NVFP4Quantizer":
            wanted |= {f"_amax_{side}": use for side, use in sides.items()}
        if hasattr(out, "_with_gemm_swizzled_scales"):
            out._with_gemm_swizzled_scales = (
                quantizer.optimize_for_gemm
                if kind == "MXFP8Quantizer"
                else _nvfp4_swizzles(quantizer, list(out.size()))
            )
    for field, use in wanted.items():
        if not use:
            setattr(out, field, None)
        elif getattr(out, field) is None:
            setattr(out, field, getattr(template(), field))
    return out


def _buffers(out: Any) -> list[Any]:
    names = ("_data", "_transpose", "_rowwise_data", "_columnwise_data")
    return [getattr(out, name, None) for name in names]

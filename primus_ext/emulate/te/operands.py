"""What a GEMM reads of a tensor: the raw buffer, its scales, and how they are to be understood.

Transformer Engine keeps a quantized tensor as up to two copies, one usable row by row and one
column by column.  Which of them a GEMM reads depends on the operand's place and on the
architecture; this module makes that choice as ``CanonicalizeGemmInput`` does in
``transformer_engine/common/gemm/cublaslt_gemm.cu`` (Transformer Engine 2.20).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from primus_ext.emulate.te.target import target

PLAIN = "plain"
"""Format of a tensor that is not quantized; its dtype says it all."""


@dataclasses.dataclass(frozen=True, slots=True)
class Operand:
    """One GEMM operand as the kernel sees it."""

    data: torch.Tensor
    scale_inv: torch.Tensor | None
    amax: torch.Tensor | None
    format: str
    """``plain``, or element type and scaling: ``fp8_e4m3/tensor``, ``fp8_e5m2/mxfp8``,
    ``fp8_e4m3/block1d``, ``fp8_e4m3/block2d``, ``fp4_e2m1/nvfp4``."""
    transposed: bool
    """The buffer holds the transpose of the logical matrix."""
    shape: tuple[int, ...]
    """Logical shape (elements, not bytes)."""
    dtype: torch.dtype
    """High-precision type that the tensor stands for."""

    @property
    def rows(self) -> int:
        """Rows of the logical matrix (all leading dimensions flattened)."""
        return math.prod(self.shape[:-1])

    @property
    def cols(self) -> int:
        """Columns of the logical matrix."""
        return self.shape[-1]


def element_name(dtype: Any) -> str:
    """Short name of a quantized element type, from Transformer Engine's ``DType``."""
    names = {7: "fp8_e4m3", 8: "fp8_e5m2", 10: "fp4_e2m1"}
    return names[int(dtype)]


def operand(tensor: Any, rowwise: bool) -> Operand:
    """The buffers of ``tensor`` that a GEMM reads.

    Args:
        tensor: A torch tensor or one of Transformer Engine's quantized tensors.
        rowwise: Whether the contraction runs along the last dimension.

    Raises:
        RuntimeError: If the tensor lacks the copy that the GEMM needs.
        NotImplementedError: For a kind of tensor that native GEMMs do not take.
    """
    storage = _storage_kind(tensor)
    if storage is None:
        with torch._C.DisableTorchFunction():  # other modes needn't see what is looked at here
            return Operand(tensor, None, None, PLAIN, False, tuple(tensor.shape), tensor.dtype)
    if storage == "Float8TensorStorage":
        return _per_tensor(tensor, rowwise)
    return _block_scaled(tensor, rowwise, storage)


_STORAGES = (
    "Float8TensorStorage",
    "MXFP8TensorStorage",
    "Float8BlockwiseQTensorStorage",
    "NVFP4TensorStorage",
)


def _storage_kind(tensor: Any) -> str | None:
    """Which of Transformer Engine's storage classes ``tensor`` is, None for a plain tensor."""
    kind = type(tensor)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return None
    for base in kind.__mro__:
        if base.__name__ in _STORAGES:
            return base.__name__
    if isinstance(tensor, torch.Tensor) and not hasattr(tensor, "_quantizer"):
        return None
    raise NotImplementedError(f"GEMM on {kind.__name__} is not emulated")


def _per_tensor(tensor: Any, rowwise: bool) -> Operand:
    data, transpose = tensor._data, tensor._transpose
    if transpose is not None and tensor._transpose_invalid:
        transpose = None
    use_data = rowwise or target().non_tn_fp8_gemm
    if data is None and target().non_tn_fp8_gemm:
        use_data = False
    buffer = data if use_data else transpose
    if buffer is None:
        raise RuntimeError(f"FP8 GEMM needs {'rowwise' if use_data else 'transposed'} data")
    shape = tuple(buffer.shape)
    if not use_data:
        shape = (*shape[1:], shape[0])
    name = f"{element_name(tensor._fp8_dtype)}/tensor"
    return Operand(buffer, tensor._scale_inv, None, name, not use_data, shape, tensor._dtype)


def _block_scaled(tensor: Any, rowwise: bool, storage: str) -> Operand:
    side = "rowwise" if rowwise else "columnwise"
    buffer = getattr(tensor, f"_{side}_data")
    if buffer is None:
        raise RuntimeError(f"{storage} lacks the {side} copy that the GEMM needs")
    scale_inv = getattr(tensor, f"_{side}_scale_inv")
    shape, amax, transposed = tuple(buffer.shape), None, False
    if storage == "MXFP8TensorStorage":
        name = f"{element_name(tensor._fp8_dtype)}/mxfp8"
    elif storage == "NVFP4TensorStorage":
        name = f"{element_name(tensor._fp4_dtype)}/nvfp4"
        amax = getattr(tensor, f"_amax_{side}")
        transposed = not rowwise
        shape = (*shape[:-1], 2 * shape[-1])
    else:
        name = f"{element_name(tensor._fp8_dtype)}/block{'2d' if tensor._is_2D_scaled else '1d'}"
        transposed = not rowwise
    if transposed:
        shape = (*shape[1:], shape[0])
    return Operand(buffer, scale_inv, amax, name, transposed, shape, tensor._dtype)

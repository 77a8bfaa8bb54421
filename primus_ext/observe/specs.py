"""Small builders that every classifier shares."""

from __future__ import annotations

import torch

from primus_ext.trace import Family, Op, TensorSpec

DTYPE_NAMES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.uint8: "uint8",
    torch.int8: "int8",
    torch.bool: "bool",
}


def dtype_name(dtype: torch.dtype) -> str:
    """Short name of a torch dtype (``bf16``); torch's own name for the rare ones."""
    return DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def spec(tensor: torch.Tensor) -> TensorSpec:
    """Shape and dtype of a tensor."""
    return TensorSpec(shape=tuple(tensor.shape), dtype=dtype_name(tensor.dtype))


def moved_bytes(tensors: list[torch.Tensor]) -> int:
    """Bytes that move if each tensor is read or written once (expanded dims are not re-read)."""
    return sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors)


def gemm_op(
    name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor], *, m: int, n: int, k: int,
    layout: str, batch: int = 1, accumulate: bool = False, dtype: str | None = None,
) -> Op:  # fmt: skip
    """A dense matrix product ``[m, k] x [k, n]``, ``batch`` times.

    With ``accumulate`` the output is read and written (wgrad into the main gradient).
    """
    written = moved_bytes(outputs)
    return Op(
        name=name,
        family=Family.GEMM,
        inputs=tuple(spec(t) for t in inputs),
        outputs=tuple(spec(t) for t in outputs),
        flops=2 * batch * m * n * k,
        bytes=moved_bytes(inputs) + (2 * written if accumulate else written),
        attrs=tuple(
            sorted(
                {
                    "m": m, "n": n, "k": k, "batch": batch, "layout": layout,
                    "accumulate": accumulate,
                    "dtype": dtype or dtype_name(inputs[0].dtype),
                    "out_dtype": dtype_name(outputs[0].dtype),
                }.items()
            )
        ),
    )  # fmt: skip

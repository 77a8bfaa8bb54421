"""``tex`` functions that quantize, dequantize and transpose quantized data.

Each kernel of the real extension is one operator: taking the maximum, forming the scale, the cast
itself, the Hadamard transform of NVFP4.  What is launched follows ``quantizer.cpp`` (2.20).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from primus_ext.emulate.te import cast_kernels, nvfp4_kernels
from primus_ext.emulate.te.bindings import binding
from primus_ext.emulate.te.dtypes import torch_dtype
from primus_ext.emulate.te.operands import element_name, operand
from primus_ext.emulate.te.ops import define, nothing
from primus_ext.emulate.te.quantizers import create_tensor, kind_of, prepare_output

SINK = (
    "Tensor(a!)? row, Tensor(b!)? row_scale_inv, Tensor(c!)? col, Tensor(d!)? col_scale_inv, "
    "Tensor(f!)? scale, Tensor(e!)? amax"
)
"""Arguments that name the buffers a kernel quantizes into; ``scale`` of NVFP4 is the maximum of the
copy for columns."""


@define(
    f"quantize(Tensor x, Tensor? noop, {SINK}, *, str format, bool pow2_scales, "
    "float amax_epsilon, bool hadamard, bool stochastic_rounding) -> ()",
    fake=nothing,
)
def _quantize(
    x: torch.Tensor, noop: Any, *sink: Any, hadamard: bool, stochastic_rounding: bool, **attrs: Any
) -> None:
    if noop is not None and float(noop) == 1.0:
        return
    if attrs["format"].endswith("/nvfp4"):
        nvfp4_kernels.store(x, *sink, hadamard=hadamard)
    else:
        cast_kernels.store(x, *sink, **attrs)


@define("compute_amax(Tensor x, Tensor(a!)[] amax, *, str kind) -> ()", fake=nothing)
def _compute_amax(x: torch.Tensor, amax: list[torch.Tensor], *, kind: str) -> None:
    nvfp4_kernels.take_maxima(x, amax, hadamard=kind == "hadamard")


@define(
    "compute_scale(Tensor amax, Tensor(a!) scale, *, str element, bool pow2_scales, "
    "float amax_epsilon) -> ()",
    fake=nothing,
)
def _compute_scale(
    amax: torch.Tensor, scale: torch.Tensor, *, element: str, pow2_scales: bool,
    amax_epsilon: float,
) -> None:
    scale.copy_(cast_kernels.scale_from_amax(amax, element, pow2_scales, amax_epsilon))


@define(
    "hadamard_transform(Tensor x) -> Tensor",
    fake=lambda x: x.new_empty((x.shape[-1], x.numel() // x.shape[-1])),
)
def _hadamard_transform(x: torch.Tensor) -> torch.Tensor:
    return nvfp4_kernels.transform(x).to(x.dtype)


@define("fp8_transpose(Tensor x, Tensor(a!) out) -> ()", fake=nothing)
def transpose_into(x: torch.Tensor, out: torch.Tensor) -> None:
    """Transpose of bytes, flattened to a matrix."""
    out.copy_(x.reshape(-1, x.shape[-1]).t().reshape(out.shape))


@define(
    "dequantize(Tensor x, Tensor scale_inv, Tensor? amax, *, str format, bool columnwise, "
    "bool transposed, int[] shape, ScalarType dtype) -> Tensor",
    fake=lambda x, scale_inv, amax, *, shape, dtype, **_: x.new_empty(shape, dtype=dtype),
)
def _dequantize(
    x: torch.Tensor, scale_inv: torch.Tensor, amax: Any, *, shape: list[int], dtype: torch.dtype,
    **attrs: Any,
) -> torch.Tensor:
    values = cast_kernels.decode(x, scale_inv, amax=amax, **attrs)
    return values.reshape(shape).to(dtype).contiguous()


@dataclasses.dataclass(frozen=True, slots=True)
class Sink:
    """Buffers of a quantized tensor and how a kernel fills them."""

    tensors: tuple[torch.Tensor | None, ...]
    """row, row_scale_inv, col, col_scale_inv, scale, amax."""
    format: str
    pow2_scales: bool = False
    amax_epsilon: float = 0.0

    @property
    def attributes(self) -> dict[str, Any]:
        """Scalar arguments of the operators."""
        return {"format": self.format, "pow2_scales": self.pow2_scales,
                "amax_epsilon": self.amax_epsilon}  # fmt: skip


def sink_of(out: Any, quantizer: Any, scale: Any = None, amax: Any = None) -> Sink:
    """The buffers of ``out``, which ``quantizer`` made."""
    kind = kind_of(quantizer)
    element = element_name(quantizer.dtype)
    if kind in ("Float8Quantizer", "Float8CurrentScalingQuantizer"):
        tensors = (out._data, out._scale_inv, out._transpose, None, scale, amax)
        return Sink(tensors, f"{element}/tensor")
    tensors = (out._rowwise_data, out._rowwise_scale_inv, out._columnwise_data,
               out._columnwise_scale_inv, None, None)  # fmt: skip
    if kind == "MXFP8Quantizer":
        return Sink(tensors, f"{element}/mxfp8")
    if kind == "NVFP4Quantizer":
        maxima = out._amax_columnwise, out._amax_rowwise
        return Sink((*tensors[:4], *maxima), f"{element}/nvfp4")
    return Sink(
        tensors, f"{element}/block{quantizer.block_scaling_dim}d", quantizer.force_pow_2_scales,
        quantizer.amax_epsilon,
    )  # fmt: skip


def _launch(
    x: torch.Tensor, sink: Sink, noop: Any, hadamard: bool = False, sr: bool = False
) -> None:
    _quantize(x, noop, *sink.tensors, **sink.attributes, hadamard=hadamard, stochastic_rounding=sr)


def _current_scaling(x: Any, out: Any, quantizer: Any, noop: Any, amax: Any) -> None:
    if amax is None:
        buffers = x.new_empty((2,), dtype=torch.float32)
        amax, scale = buffers[0:1], buffers[1:2]
        _compute_amax(x, [amax], kind="plain")
    else:
        scale = x.new_empty((1,), dtype=torch.float32)
    if quantizer.with_amax_reduction:
        group = quantizer._canonicalized_amax_reduction_group()
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
    _compute_scale(
        amax, scale, element=element_name(quantizer.dtype),
        pow2_scales=quantizer.force_pow_2_scales, amax_epsilon=quantizer.amax_epsilon,
    )  # fmt: skip
    _launch(x, sink_of(out, quantizer, scale), noop)


def _nvfp4(x: Any, out: Any, quantizer: Any, noop: Any, with_amax: bool) -> None:
    """NVFP4: maximum (after the transform where it is used), then one fused or two casts."""
    amaxes = [t for t in (out._amax_rowwise, out._amax_columnwise) if t is not None]
    if not with_amax and not quantizer.row_scaled_nvfp4:
        # with the transform both maxima differ and one kernel takes them
        wanted = amaxes if quantizer.with_rht else amaxes[:1]
        _compute_amax(x, wanted, kind="hadamard" if quantizer.with_rht else "plain")
    if quantizer.with_amax_reduction:
        group = quantizer._canonicalized_amax_reduction_group()
        dist.all_reduce_coalesced(amaxes, op=dist.ReduceOp.MAX, group=group)
    sink, sr = sink_of(out, quantizer), quantizer.stochastic_rounding
    rng_state = x.new_empty((2,), dtype=torch.int64) if sr else None
    if not quantizer.with_rht or quantizers_fuse_hadamard(x):
        _launch(x, sink, noop, quantizer.with_rht, sr)
        del rng_state
        return
    transformed = _hadamard_transform(x)
    if quantizer.rowwise_usage:
        row = (*sink.tensors[:2], None, None, None, sink.tensors[5])
        _launch(x, dataclasses.replace(sink, tensors=row), noop, sr=sr)
    if quantizer.columnwise_usage:
        col = (sink.tensors[2], sink.tensors[3], None, None, None, out._amax_columnwise)
        _launch(transformed, dataclasses.replace(sink, tensors=col), noop, sr=sr)


def quantizers_fuse_hadamard(x: torch.Tensor) -> bool:
    """Whether transform and cast are one kernel (``is_eligible_for_rht_cast_fusion``)."""
    from primus_ext.emulate.te.quantizers import hadamard_cast_fusion

    return x.dtype == torch.bfloat16 and hadamard_cast_fusion(tuple(x.shape))


def amax_buffer(like: torch.Tensor, out: Any, quantizer: Any) -> torch.Tensor | None:
    """Zeroed maximum for a kernel that computes in high precision before a quantization.

    None where the quantization takes the maximum itself or needs none.
    """
    kind = kind_of(quantizer)
    if kind == "Float8CurrentScalingQuantizer":
        return like.new_zeros((1,), dtype=torch.float32)
    if kind == "NVFP4Quantizer" and not quantizer.with_rht and not quantizer.row_scaled_nvfp4:
        amax = out._amax_rowwise if out._amax_rowwise is not None else out._amax_columnwise
        return amax.zero_()
    return None


def quantize_into(
    x: torch.Tensor, out: Any, quantizer: Any, noop: Any = None, amax: Any = None
) -> None:
    """Quantize ``x`` into ``out``.

    Args:
        x: High-precision tensor.
        out: Quantized tensor that ``quantizer`` made.
        quantizer: One of Transformer Engine's native quantizers.
        noop: Flag tensor: 1 skips the work.
        amax: Maximum, if the kernel before has taken it already (an NVFP4 tensor holds its own).

    Raises:
        NotImplementedError: If only the transposed copy of a per-tensor FP8 tensor is wanted.
    """
    if x.numel() == 0:
        return
    kind = kind_of(quantizer)
    if kind in ("Float8Quantizer", "Float8CurrentScalingQuantizer") and out._data is None:
        raise NotImplementedError("columnwise-only per-tensor FP8 quantization is not implemented")
    if kind == "Float8Quantizer":
        _launch(x, sink_of(out, quantizer, quantizer.scale, quantizer.amax), noop)
    elif kind == "Float8CurrentScalingQuantizer":
        _current_scaling(x, out, quantizer, noop, amax)
    elif kind == "NVFP4Quantizer":
        _nvfp4(x, out, quantizer, noop, with_amax=amax is not None)
    else:
        _launch(x, sink_of(out, quantizer), noop)


@binding()
def quantize(
    tensor: torch.Tensor, quantizer: Any, output: Any = None, noop: torch.Tensor | None = None
) -> Any:
    """Quantize into a new tensor or into ``output``."""
    x = tensor.contiguous()
    if output is None:
        out = create_tensor(quantizer, list(x.shape), x.dtype)
    else:
        out = prepare_output(output, quantizer)
    quantize_into(x, out, quantizer, noop)
    _swizzle_if_wanted(out, quantizer)
    return out


def _swizzle_if_wanted(out: Any, quantizer: Any) -> None:
    """Rearrange the scales for the GEMM where the cast did not do it itself."""
    from primus_ext.emulate.te.swizzle import swizzle_in_place

    if quantizer.optimize_for_gemm and not getattr(out, "_with_gemm_swizzled_scales", True):
        swizzle_in_place(out)


@binding()
def dequantize(input: Any, otype: Any) -> torch.Tensor:
    """High-precision copy of a quantized tensor."""
    rowwise = getattr(input, "_data", None) is not None or (
        getattr(input, "_rowwise_data", None) is not None
    )
    x = operand(input, rowwise)
    return _dequantize(
        x.data, x.scale_inv, x.amax, format=x.format, columnwise=not rowwise,
        transposed=x.transposed, shape=list(x.shape), dtype=torch_dtype(otype),
    )  # fmt: skip


@binding()
def fp8_transpose(
    input: torch.Tensor, dtype: Any, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Transpose of FP8 bytes: ``[..., n]`` to ``[n, ...]``."""
    if out is None:
        out = input.new_empty((input.shape[-1], *input.shape[:-1]), dtype=torch.uint8)
    transpose_into(input, out)
    return out


@binding()
def compute_amax(input: torch.Tensor, amax: torch.Tensor) -> None:
    """Largest absolute value of ``input`` into ``amax``."""
    _compute_amax(input.contiguous(), [amax], kind="plain")


@binding()
def create_empty_quantized_tensor(
    quantizer: Any, shape: Any, dtype: torch.dtype, device: Any, pin_memory: bool
) -> Any:
    """A quantized tensor whose buffers hold nothing yet."""
    return create_tensor(quantizer, [int(size) for size in shape], dtype, device=device)


@binding()
def bgrad_quantize(input: torch.Tensor, quantizer: Any) -> list[Any]:
    """Bias gradient and quantized gradient; one kernel where the extension fuses them."""
    x = input.contiguous()
    flat = x.reshape(-1, x.shape[-1])
    bias = x.new_empty((x.shape[-1],))
    if quantizer is None:
        torch.sum(flat, 0, out=bias)
        return [bias, x]
    out = create_tensor(quantizer, list(x.shape), x.dtype)
    torch.sum(flat, 0, out=bias)
    quantize_into(x, out, quantizer)
    return [bias, out]

"""``generic_gemm``: one matrix product with its epilogues.

Conventions of the extension (row-major): ``D = op(B) @ op(A)``.  Layout ``TN`` is a forward pass
(``A`` = weight, ``B`` = input), ``NN`` the gradient of the input, ``NT`` that of the weight.
Here ``m`` are the rows and ``n`` the columns of ``D``, ``k`` the contraction: ``2 m n k`` FLOPs.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from primus_ext.emulate.te import numerics, swizzle
from primus_ext.emulate.te.bindings import binding
from primus_ext.emulate.te.dtypes import torch_dtype
from primus_ext.emulate.te.operands import PLAIN, Operand, operand
from primus_ext.emulate.te.ops import define

_ARGUMENTS = (
    "Tensor a, Tensor? a_scale_inv, Tensor? a_amax, "
    "Tensor b, Tensor? b_scale_inv, Tensor? b_amax, "
    "Tensor? bias, Tensor? gelu_in"
)
_ATTRIBUTES = (
    "*, str layout, int m, int n, int k, str a_format, str b_format, "
    "bool a_transposed, bool b_transposed, ScalarType out_dtype, ScalarType aux_dtype, "
    "int[] out_shape, bool bias_grad, bool gelu, bool grad, bool split_accumulator, float alpha"
)


def _epilogue_outputs(
    d: torch.Tensor, *, m: int, n: int, attrs: dict[str, Any]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Empty bias gradient and pre-activation, as far as this call has them."""
    width = m if attrs["layout"][1] == "T" else attrs["k"]
    bias_grad = d.new_empty((width,), dtype=attrs["out_dtype"]) if attrs["bias_grad"] else None
    pre_gelu = None
    if attrs["gelu"] and not attrs["grad"]:
        pre_gelu = d.new_empty(attrs["out_shape"], dtype=attrs["aux_dtype"])
    return bias_grad, pre_gelu


def _gemm_fake(
    a: Any, a_scale_inv: Any, a_amax: Any, b: Any, b_scale_inv: Any, b_amax: Any, bias: Any,
    gelu_in: Any, *, m: int, n: int, **attrs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    d = a.new_empty(attrs["out_shape"], dtype=attrs["out_dtype"])
    return (d, *_epilogue_outputs(d, m=m, n=n, attrs=attrs))


def _gemm_out_fake(
    a: Any, a_scale_inv: Any, a_amax: Any, b: Any, b_scale_inv: Any, b_amax: Any, bias: Any,
    gelu_in: Any, out: torch.Tensor, *, m: int, n: int, accumulate: bool, beta: float, **attrs: Any,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return _epilogue_outputs(out, m=m, n=n, attrs=attrs)


def _product(
    a: torch.Tensor, a_scale_inv: Any, a_amax: Any, b: torch.Tensor, b_scale_inv: Any, b_amax: Any,
    *, layout: str, n: int, k: int, m: int, attrs: dict[str, Any], exact: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``op(B) @ op(A)`` of shape (m, n), and the logical matrix B.

    Computed in fp32 where the hardware rounds only once (``exact``), else in the operands' type.
    """
    a2 = numerics.dequantize(
        a, a_scale_inv, a_amax, attrs["a_format"], attrs["a_transposed"], layout[0] == "N")
    b2 = numerics.dequantize(
        b, b_scale_inv, b_amax, attrs["b_format"], attrs["b_transposed"], layout[1] == "T")
    a2, b2 = a2.reshape(-1, a2.shape[-1]), b2.reshape(-1, b2.shape[-1])
    if exact or a2.dtype != b2.dtype:
        a2, b2 = a2.float(), b2.float()
    left = b2.t() if layout[1] == "T" else b2
    right = a2.t() if layout[0] == "T" else a2
    if left.shape != (m, k) or right.shape != (k, n):
        raise RuntimeError(f"GEMM {layout}: {tuple(left.shape)} @ {tuple(right.shape)}")
    return left @ right, b2


def _compute(
    operands: tuple[Any, ...], bias: Any, gelu_in: Any, m: int, n: int, attrs: dict[str, Any],
    exact: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """D before conversion and accumulation, bias gradient, pre-activation."""
    layout, grad, gelu = attrs["layout"], attrs["grad"], attrs["gelu"]
    exact = exact or gelu or bias is not None or attrs["out_dtype"] != operands[0].dtype
    d, b2 = _product(*operands, layout=layout, m=m, n=n, k=attrs["k"], attrs=attrs, exact=exact)
    if attrs["alpha"] != 1.0:
        d = d * attrs["alpha"]
    pre_gelu = None
    if bias is not None and not grad:
        d = d + bias.to(d.dtype)
    if gelu and grad:
        if gelu_in is not None:
            d = d * numerics.gelu_gradient(gelu_in.reshape(d.shape).float())
    elif gelu:
        pre_gelu = d.to(attrs["aux_dtype"]).reshape(attrs["out_shape"])
        d = torch.nn.functional.gelu(d, approximate="tanh")
    bias_grad = None
    if attrs["bias_grad"]:
        bias_grad = b2.sum(0, dtype=torch.float32).to(attrs["out_dtype"])
    return d, bias_grad, pre_gelu


@define(f"gemm({_ARGUMENTS}, {_ATTRIBUTES}) -> (Tensor, Tensor?, Tensor?)", fake=_gemm_fake)
def _gemm(
    a: Any, a_scale_inv: Any, a_amax: Any, b: Any, b_scale_inv: Any, b_amax: Any, bias: Any,
    gelu_in: Any, *, m: int, n: int, **attrs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    operands = (a, a_scale_inv, a_amax, b, b_scale_inv, b_amax)
    d, bias_grad, pre_gelu = _compute(operands, bias, gelu_in, m, n, attrs, exact=False)
    return d.to(attrs["out_dtype"]).reshape(attrs["out_shape"]), bias_grad, pre_gelu


@define(
    f"gemm.out({_ARGUMENTS}, Tensor(a!) out, {_ATTRIBUTES}, bool accumulate, float beta)"
    " -> (Tensor?, Tensor?)",
    fake=_gemm_out_fake,
)
def _gemm_out(
    a: Any, a_scale_inv: Any, a_amax: Any, b: Any, b_scale_inv: Any, b_amax: Any, bias: Any,
    gelu_in: Any, out: torch.Tensor, *, m: int, n: int, accumulate: bool, beta: float, **attrs: Any,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    operands = (a, a_scale_inv, a_amax, b, b_scale_inv, b_amax)
    d, bias_grad, pre_gelu = _compute(operands, bias, gelu_in, m, n, attrs, exact=accumulate)
    if accumulate:
        d = d.float() + beta * out.reshape(d.shape).float()
    out.copy_(d.reshape(out.shape))
    return bias_grad, pre_gelu


def gemm_shape(a: Operand, transa: bool, b: Operand, transb: bool) -> tuple[int, ...]:
    """Shape of ``op(B) @ op(A)``: leading dimensions of B are kept unless it is transposed.

    Raises:
        RuntimeError: If the contractions differ.
    """
    inner_a = a.cols if transa else a.rows
    inner_b = b.rows if transb else b.cols
    if inner_a != inner_b:
        raise RuntimeError(
            f"invalid matrix dimensions for GEMM (A={a.shape}, transa={transa}, "
            f"B={b.shape}, transb={transb})"
        )
    leading = (b.cols,) if transb else b.shape[:-1]
    return (*leading, a.rows if transa else a.cols)


@binding()
def generic_gemm(
    A: Any, transA: bool, B: Any, transB: bool, D: torch.Tensor | None, quantizer: Any,
    output_dtype: Any, bias: torch.Tensor | None, bias_type: Any, gelu: bool,
    gelu_in: torch.Tensor | None, grad: bool, workspace: torch.Tensor, workspace_size: int,
    accumulate: bool, use_split_accumulator: bool, comm_overlap: Any = None, comm_type: Any = None,
    extra_output: torch.Tensor | None = None, bulk_overlap: bool = False, alpha: float = 1.0,
    beta: float | None = None,
) -> list[Any]:
    """``D = alpha op(B) @ op(A) + beta D`` with bias, GELU, bias gradient and output cast.

    The cuBLAS workspace is Transformer Engine's own tensor; the operator does not read it.

    Returns:
        ``[D, bias gradient, pre-GELU output, extra output]``, None where there is none.

    Raises:
        RuntimeError: If the dimensions do not fit.
        NotImplementedError: For communication overlap (userbuffers), for an FP8 output that the
            GEMM itself would write, and for GELU and bias gradient in one epilogue.
    """
    if comm_overlap is not None:
        raise NotImplementedError("overlap of GEMM and communication (userbuffers) isn't emulated")
    if grad and gelu and bias is not None:
        raise NotImplementedError("GEMM with gradients of GELU and of a bias is not emulated")
    a, b = operand(A, transA), operand(B, not transB)
    shape = gemm_shape(a, transA, b, transB)
    out_dtype = torch_dtype(output_dtype) if output_dtype is not None else a.dtype
    if D is not None:
        if tuple(D.shape) != shape:
            raise RuntimeError(f"GEMM output has shape {tuple(D.shape)}, expected {shape}")
        out_dtype = D.dtype
    low_precision = a.format != PLAIN or b.format != PLAIN
    attrs: dict[str, Any] = {
        "layout": f"{'T' if transA else 'N'}{'T' if transB else 'N'}",
        "m": math.prod(shape[:-1]), "n": shape[-1], "k": b.rows if transB else b.cols,
        "a_format": a.format, "b_format": b.format,
        "a_transposed": a.transposed, "b_transposed": b.transposed,
        "out_dtype": out_dtype, "out_shape": list(shape),
        "aux_dtype": torch_dtype(bias_type) if low_precision else out_dtype,
        "bias_grad": grad and bias is not None, "gelu": gelu, "grad": grad,
        "split_accumulator": use_split_accumulator, "alpha": alpha,
    }  # fmt: skip
    # scales rearranged for this GEMM live until it is launched, i.e. as long as these names
    (a, _held_a), (b, _held_b) = swizzle.for_gemm(a, A), swizzle.for_gemm(b, B)
    operands = (a.data, a.scale_inv, a.amax, b.data, b.scale_inv, b.amax)
    epilogue = (None if grad else bias, gelu_in)
    if quantizer is not None:
        return _with_quantized_output(operands, epilogue, attrs, quantizer, extra_output)
    if D is None:
        d, bias_grad, pre_gelu = _gemm(*operands, *epilogue, **attrs)
        return [d, bias_grad, pre_gelu, extra_output]
    factor = (1.0 if beta is None else beta) if accumulate else 0.0
    results = _gemm_out(*operands, *epilogue, D, **attrs, accumulate=accumulate, beta=factor)
    return [D, *results, extra_output]


def _with_quantized_output(
    operands: tuple[Any, ...], epilogue: tuple[Any, ...], attrs: dict[str, Any], quantizer: Any,
    extra_output: torch.Tensor | None,
) -> list[Any]:
    """GEMM in high precision, then quantization of its output (the unfused path)."""
    from primus_ext.emulate.te.cast import quantize_into
    from primus_ext.emulate.te.quantizers import create_tensor

    low_precision = attrs["a_format"] != PLAIN or attrs["b_format"] != PLAIN
    per_tensor = "/tensor" in attrs["a_format"] or "/tensor" in attrs["b_format"]
    if type(quantizer).__name__ == "Float8Quantizer" and low_precision and per_tensor:
        raise NotImplementedError("GEMM that writes FP8 with delayed scaling is not emulated")
    # the output exists before the temporary, as in the extension
    out = create_tensor(quantizer, attrs["out_shape"], attrs["out_dtype"])
    d, bias_grad, pre_gelu = _gemm(*operands, *epilogue, **attrs)
    quantize_into(d, out, quantizer)
    return [out, bias_grad, pre_gelu, extra_output]

"""``te_general_grouped_gemm``: one product per expert, launched together on several streams.

One operator for the whole group.  Per group ``i`` it computes ``op(B_i) @ op(A_i)`` of shape
``(m[i], n[i])`` with contraction ``k[i]``: a forward and a data gradient differ in their rows, a
weight gradient (layout NT) in its contraction.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from primus_ext.emulate.te import numerics, swizzle
from primus_ext.emulate.te.bindings import binding
from primus_ext.emulate.te.dtypes import torch_dtype
from primus_ext.emulate.te.gemm import gemm_shape
from primus_ext.emulate.te.operands import Operand, operand
from primus_ext.emulate.te.ops import define, nothing


@define(
    "grouped_gemm(Tensor[] a, Tensor?[] a_scale_inv, Tensor?[] a_amax, Tensor[] b, "
    "Tensor?[] b_scale_inv, Tensor?[] b_amax, Tensor[] bias, Tensor(a!)[] out, "
    "Tensor(b!)[] bias_grad, Tensor(c!)[] pre_gelu, *, str layout, int[] m, int[] n, int[] k, "
    "str a_format, str b_format, bool a_transposed, bool b_transposed, ScalarType out_dtype, "
    "bool single_output, bool gelu, bool grad, bool accumulate, bool split_accumulator) -> ()",
    fake=nothing,
)
def _grouped_gemm(
    a: Any, a_scale_inv: Any, a_amax: Any, b: Any, b_scale_inv: Any, b_amax: Any, bias: Any,
    out: Any, bias_grad: Any, pre_gelu: Any, *, layout: str, m: list[int], single_output: bool,
    gelu: bool, grad: bool, accumulate: bool, **attrs: Any,
) -> None:
    outputs = out[0].split(m) if single_output else out
    for i, target in enumerate(outputs):
        if target.numel() == 0:
            continue
        if a[i].numel() == 0 or b[i].numel() == 0:
            _clear(target, bias_grad, i, accumulate)
            continue
        a2 = numerics.dequantize(
            a[i], a_scale_inv[i], a_amax[i], attrs["a_format"], attrs["a_transposed"],
            layout[0] == "N")
        b2 = numerics.dequantize(
            b[i], b_scale_inv[i], b_amax[i], attrs["b_format"], attrs["b_transposed"],
            layout[1] == "T")
        a2, b2 = a2.reshape(-1, a2.shape[-1]).float(), b2.reshape(-1, b2.shape[-1]).float()
        d = (b2.t() if layout[1] == "T" else b2) @ (a2.t() if layout[0] == "T" else a2)
        if bias:
            d = d + bias[i].float()
        if gelu and grad:
            d = d * numerics.gelu_gradient(pre_gelu[i].reshape(d.shape).float())
        elif gelu:
            pre_gelu[i].copy_(d.reshape(pre_gelu[i].shape))
            d = torch.nn.functional.gelu(d, approximate="tanh")
        if bias_grad:
            bias_grad[i].copy_((d if gelu else b2).sum(0))
        target.copy_((d + target.float() if accumulate else d).reshape(target.shape))


def _clear(target: torch.Tensor, bias_grad: Any, index: int, accumulate: bool) -> None:
    """A group without work leaves zeros."""
    if not accumulate:
        target.zero_()
    if bias_grad:
        bias_grad[index].zero_()


def _dimensions(a: Operand, transa: bool, b: Operand, transb: bool) -> tuple[int, int, int]:
    shape = gemm_shape(a, transa, b, transb)
    return math.prod(shape[:-1]), shape[-1], b.rows if transb else b.cols


def _present(tensors: Any) -> list[torch.Tensor]:
    """Transformer Engine passes empty tensors where there is nothing."""
    with torch._C.DisableTorchFunction():  # other modes needn't see what is looked at here
        return [t for t in tensors or [] if t.numel() > 0]


@binding()
def te_general_grouped_gemm(
    A: list[Any], transa: bool, B: list[Any], transb: bool, D: list[torch.Tensor] | None,
    D_type: Any, m_splits: list[int], bias: list[torch.Tensor], bias_type: Any,
    single_output: bool, pre_gelu_out: list[torch.Tensor], grad: bool,
    workspace: list[torch.Tensor], workspaceSize: int, accumulate: bool,
    use_split_accumulator: bool, math_sm_count: int,
) -> list[torch.Tensor]:
    """Grouped GEMM; returns ``bias`` (its gradients where ``grad``).

    Raises:
        RuntimeError: If the dimensions do not fit or a single output is not given.
    """
    if single_output and D is None:
        raise RuntimeError("D should be allocated for single output case")
    a, held_a = swizzle.group_for_gemm([operand(t, transa) for t in A], A)
    b, held_b = swizzle.group_for_gemm([operand(t, not transb) for t in B], B)
    m, n, k = (
        list(values)
        for values in zip(
            *(_dimensions(x, transa, y, transb) for x, y in zip(a, b, strict=True)), strict=True
        )
    )
    out_dtype = torch_dtype(D_type)
    if D is None:
        pairs = zip(m, n, strict=True)
        D = [a[0].data.new_empty(size, dtype=out_dtype) for size in pairs]
    gelu = bool(_present(pre_gelu_out))
    _grouped_gemm(
        *([getattr(x, field) for x in side] for side in (a, b)
          for field in ("data", "scale_inv", "amax")),
        [] if grad else _present(bias), list(D), _present(bias) if grad else [],
        list(pre_gelu_out) if gelu else [],
        layout=f"{'T' if transa else 'N'}{'T' if transb else 'N'}", m=m, n=n, k=k,
        a_format=a[0].format, b_format=b[0].format, a_transposed=a[0].transposed,
        b_transposed=b[0].transposed, out_dtype=out_dtype, single_output=single_output,
        gelu=gelu, grad=grad, accumulate=accumulate, split_accumulator=use_split_accumulator,
    )  # fmt: skip
    del held_a, held_b
    return bias

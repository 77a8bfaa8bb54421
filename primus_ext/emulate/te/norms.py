"""``tex`` functions of RMSNorm and LayerNorm, with the output quantized as the recipe asks.

Which of three ways a quantized output is made in follows
``transformer_engine/pytorch/csrc/extensions/normalization.cpp`` (2.20): written by the norm itself
(no quantizer, delayed scaling), or as a high-precision temporary that is then quantized, with the
maximum taken by the norm (current scaling, NVFP4) or by the quantization.
The kernels' workspaces (partial sums of the weight gradient) are not modelled.
"""

from __future__ import annotations

from typing import Any

import torch

from primus_ext.emulate.te import norm_ops
from primus_ext.emulate.te.bindings import binding
from primus_ext.emulate.te.dtypes import torch_dtype
from primus_ext.emulate.te.operands import element_name


def _quantized(quantizer: Any, x: torch.Tensor, dtype: torch.dtype, out: Any, run: Any) -> Any:
    """Normalize and quantize; returns (output, statistics)."""
    from primus_ext.emulate.te import cast, quantizers

    kind = type(quantizer).__name__
    fused = kind == "Float8Quantizer"
    if out is None:
        out = quantizers.create_tensor(quantizer, list(x.shape), dtype, for_gemm=not fused)
    if fused:
        statistics = run.into(
            out._data, out._scale_inv, quantizer.scale, quantizer.amax,
            element_name(quantizer.dtype))
        if out._transpose is not None:
            cast.transpose_into(out._data, out._transpose)
        return out, statistics
    amax = cast.amax_buffer(x, out, quantizer)
    temporary, *statistics = run(dtype, amax)
    cast.quantize_into(temporary, out, quantizer, amax=amax)
    return out, tuple(statistics)


class _Rms:
    """One RMSNorm call with its inputs bound."""

    def __init__(self, *inputs: Any, **attributes: Any) -> None:
        self.inputs, self.attributes = inputs, attributes

    def __call__(self, dtype: torch.dtype, amax: torch.Tensor | None = None) -> Any:
        """Into a new tensor of ``dtype``."""
        return norm_ops.rmsnorm_fwd(*self.inputs, amax, out_dtype=dtype, **self.attributes)

    def into(self, out: torch.Tensor, *quantization: Any) -> Any:
        """Into ``out``, FP8 with scale_inv, scale, amax, element; returns the statistics."""
        *tensors, fmt = quantization or (None, None, None, "")
        return (norm_ops.rmsnorm_fwd_out(
            *self.inputs, out, *tensors, out_format=fmt, **self.attributes),)


class _Layer(_Rms):
    """One LayerNorm call with its inputs bound."""

    def __call__(self, dtype: torch.dtype, amax: torch.Tensor | None = None) -> Any:
        """Into a new tensor of ``dtype``."""
        return norm_ops.layernorm_fwd(*self.inputs, amax, out_dtype=dtype, **self.attributes)

    def into(self, out: torch.Tensor, *quantization: Any) -> Any:
        """Into ``out``, FP8 with scale_inv, scale, amax, element; returns the statistics."""
        *tensors, fmt = quantization or (None, None, None, "")
        return norm_ops.layernorm_fwd_out(
            *self.inputs, out, *tensors, out_format=fmt, **self.attributes)


def _forward(run: _Rms, x: torch.Tensor, ln_out: Any, quantizer: Any, otype: Any) -> Any:
    dtype = torch_dtype(otype)
    if quantizer is not None:
        return _quantized(quantizer, x, dtype, ln_out, run)
    if ln_out is not None:
        return ln_out, run.into(ln_out)
    out, *statistics = run(dtype)
    return out, tuple(statistics)


@binding()
def rmsnorm_fwd(
    input: torch.Tensor, weight: torch.Tensor, eps: float, ln_out: Any, quantizer: Any,
    otype: Any, sm_margin: int, zero_centered_gamma: bool,
) -> list[Any]:
    """RMSNorm; returns ``[output, None, rsigma]`` shaped as Transformer Engine unpacks it."""
    run = _Rms(input, weight, eps=eps, zero_centered_gamma=zero_centered_gamma)
    out, (rsigma,) = _forward(run, input, ln_out, quantizer, otype)
    return [out, None, rsigma]


@binding()
def layernorm_fwd(
    input: torch.Tensor, weight: torch.Tensor, bias: Any, eps: float, ln_out: Any, quantizer: Any,
    otype: Any, sm_margin: int, zero_centered_gamma: bool,
) -> list[Any]:
    """LayerNorm; returns ``[output, mu, rsigma]``."""
    run = _Layer(input, weight, bias, eps=eps, zero_centered_gamma=zero_centered_gamma)
    out, (mu, rsigma) = _forward(run, input, ln_out, quantizer, otype)
    return [out, mu, rsigma]


@binding()
def rmsnorm_bwd(
    dz: torch.Tensor, x: torch.Tensor, rsigma: torch.Tensor, gamma: torch.Tensor, sm_margin: int,
    zero_centered_gamma: bool,
) -> list[torch.Tensor]:
    """Returns ``[dx, dgamma]``."""
    return list(norm_ops.rmsnorm_bwd(
        dz.contiguous(), x.contiguous(), rsigma, gamma, zero_centered_gamma=zero_centered_gamma))


@binding()
def rmsnorm_bwd_add(
    dz: torch.Tensor, x: torch.Tensor, add: torch.Tensor, rsigma: torch.Tensor,
    gamma: torch.Tensor, sm_margin: int, zero_centered_gamma: bool,
) -> list[torch.Tensor]:
    """Returns ``[dx + add, dgamma]``."""
    return list(norm_ops.rmsnorm_bwd_add(
        dz.contiguous(), x.contiguous(), add.contiguous(), rsigma, gamma,
        zero_centered_gamma=zero_centered_gamma))


@binding()
def layernorm_bwd(
    dz: torch.Tensor, x: torch.Tensor, mu: torch.Tensor, rsigma: torch.Tensor,
    gamma: torch.Tensor, sm_margin: int, zero_centered_gamma: bool,
) -> list[torch.Tensor]:
    """Returns ``[dx, dgamma, dbeta]``."""
    return list(norm_ops.layernorm_bwd(
        dz.contiguous(), x.contiguous(), mu, rsigma, gamma,
        zero_centered_gamma=zero_centered_gamma))

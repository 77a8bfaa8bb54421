"""Operators of RMSNorm and LayerNorm: statistics and sums in fp32, as the real kernels."""

from __future__ import annotations

from typing import Any

import torch

from primus_ext.emulate.te.cast_kernels import encode_fp8, take_maximum
from primus_ext.emulate.te.ops import define

_FORWARD = "*, float eps, bool zero_centered_gamma, ScalarType out_dtype"
_BACKWARD = "*, bool zero_centered_gamma"


def _rows(x: torch.Tensor) -> int:
    return x.numel() // x.shape[-1] if x.shape[-1] else 0


def _statistic(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((_rows(x),), dtype=torch.float32)


def _gamma(weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    return weight.float() + 1 if zero_centered else weight.float()


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1]).float()


def _store(
    value: torch.Tensor, out: torch.Tensor, scale_inv: Any, scale: Any, amax: Any, kind: str
) -> None:
    """Write ``value`` into ``out``; FP8 outputs are scaled and their maximum is taken."""
    take_maximum(value, amax)
    if out.dtype == torch.uint8:
        out.copy_(encode_fp8(value.reshape(out.shape) * scale, kind))
        scale_inv.copy_(scale.reciprocal())
    else:
        out.copy_(value.reshape(out.shape))


def _empty_rms(x: torch.Tensor, weight: Any, amax: Any, *, out_dtype: torch.dtype, **_: Any) -> Any:
    return x.new_empty(x.shape, dtype=out_dtype), _statistic(x)


def _rms(x: torch.Tensor, weight: torch.Tensor, eps: float, centered: bool) -> Any:
    flat = _flat(x)
    rsigma = torch.rsqrt(flat.square().mean(-1) + eps)
    return flat * rsigma[:, None] * _gamma(weight, centered), rsigma


@define(
    f"rmsnorm_fwd(Tensor x, Tensor weight, Tensor(a!)? amax, {_FORWARD}) -> (Tensor, Tensor)",
    fake=_empty_rms,
)
def rmsnorm_fwd(
    x: torch.Tensor, weight: torch.Tensor, amax: Any, *, eps: float, zero_centered_gamma: bool,
    out_dtype: torch.dtype,
) -> Any:
    """``x * rsigma * gamma``; returns the output and rsigma (fp32, one a row).

    The maximum goes into ``amax`` if a following quantization wants it.
    """
    y, rsigma = _rms(x, weight, eps, zero_centered_gamma)
    take_maximum(y, amax)
    return y.reshape(x.shape).to(out_dtype), rsigma


@define(
    "rmsnorm_fwd.out(Tensor x, Tensor weight, Tensor(a!) out, Tensor(c!)? scale_inv, "
    "Tensor? scale, Tensor(b!)? amax, *, float eps, bool zero_centered_gamma, "
    "str out_format) -> Tensor",
    fake=lambda x, weight, out, scale_inv, scale, amax, **_: _statistic(x),
)
def rmsnorm_fwd_out(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, scale_inv: Any, scale: Any,
    amax: Any, *, eps: float, zero_centered_gamma: bool, out_format: str,
) -> torch.Tensor:
    """The same into ``out`` (also FP8 bytes); returns rsigma."""
    y, rsigma = _rms(x, weight, eps, zero_centered_gamma)
    _store(y, out, scale_inv, scale, amax, out_format)
    return rsigma


def _rms_gradients(dz: Any, x: Any, rsigma: Any, gamma: Any, centered: bool) -> Any:
    dz2, xhat = _flat(dz), _flat(x) * rsigma[:, None]
    wdz = dz2 * _gamma(gamma, centered)
    dx = rsigma[:, None] * (wdz - xhat * (wdz * xhat).mean(-1, keepdim=True))
    return dx.reshape(x.shape), (dz2 * xhat).sum(0).to(gamma.dtype)


def _like(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(t.new_empty(t.shape) for t in tensors)


@define(
    f"rmsnorm_bwd(Tensor dz, Tensor x, Tensor rsigma, Tensor gamma, {_BACKWARD})"
    " -> (Tensor, Tensor)",
    fake=lambda dz, x, rsigma, gamma, **_: _like(x, gamma),
)
def rmsnorm_bwd(
    dz: torch.Tensor, x: torch.Tensor, rsigma: torch.Tensor, gamma: torch.Tensor, *,
    zero_centered_gamma: bool,
) -> Any:
    """Gradients of input and gamma."""
    dx, dgamma = _rms_gradients(dz, x, rsigma, gamma, zero_centered_gamma)
    return dx.to(x.dtype), dgamma


@define(
    f"rmsnorm_bwd_add(Tensor dz, Tensor x, Tensor add, Tensor rsigma, Tensor gamma, {_BACKWARD})"
    " -> (Tensor, Tensor)",
    fake=lambda dz, x, add, rsigma, gamma, **_: _like(x, gamma),
)
def rmsnorm_bwd_add(
    dz: torch.Tensor, x: torch.Tensor, add: torch.Tensor, rsigma: torch.Tensor,
    gamma: torch.Tensor, *, zero_centered_gamma: bool,
) -> Any:
    """Gradients of input (plus ``add``) and gamma."""
    dx, dgamma = _rms_gradients(dz, x, rsigma, gamma, zero_centered_gamma)
    return (dx + add.float().reshape(x.shape)).to(x.dtype), dgamma


def _empty_layer(
    x: torch.Tensor, weight: Any, bias: Any, amax: Any, *, out_dtype: Any, **_: Any
) -> Any:
    return x.new_empty(x.shape, dtype=out_dtype), _statistic(x), _statistic(x)


def _layer(x: torch.Tensor, weight: Any, bias: Any, eps: float, centered: bool) -> Any:
    flat = _flat(x)
    mu = flat.mean(-1)
    rsigma = torch.rsqrt(flat.var(-1, unbiased=False) + eps)
    y = (flat - mu[:, None]) * rsigma[:, None] * _gamma(weight, centered)
    return y if bias is None else y + bias.float(), mu, rsigma


@define(
    f"layernorm_fwd(Tensor x, Tensor weight, Tensor? bias, Tensor(a!)? amax, {_FORWARD})"
    " -> (Tensor, Tensor, Tensor)",
    fake=_empty_layer,
)
def layernorm_fwd(
    x: torch.Tensor, weight: torch.Tensor, bias: Any, amax: Any, *, eps: float,
    zero_centered_gamma: bool, out_dtype: torch.dtype,
) -> Any:
    """LayerNorm; returns the output, mu and rsigma (fp32, one a row)."""
    y, mu, rsigma = _layer(x, weight, bias, eps, zero_centered_gamma)
    take_maximum(y, amax)
    return y.reshape(x.shape).to(out_dtype), mu, rsigma


@define(
    "layernorm_fwd.out(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out, "
    "Tensor(c!)? scale_inv, Tensor? scale, Tensor(b!)? amax, *, float eps, "
    "bool zero_centered_gamma, str out_format)"
    " -> (Tensor, Tensor)",
    fake=lambda x, weight, bias, out, scale_inv, scale, amax, **_: (_statistic(x), _statistic(x)),
)
def layernorm_fwd_out(
    x: torch.Tensor, weight: torch.Tensor, bias: Any, out: torch.Tensor, scale_inv: Any,
    scale: Any, amax: Any, *, eps: float, zero_centered_gamma: bool, out_format: str,
) -> Any:
    """The same into ``out`` (also FP8 bytes); returns mu and rsigma."""
    y, mu, rsigma = _layer(x, weight, bias, eps, zero_centered_gamma)
    _store(y, out, scale_inv, scale, amax, out_format)
    return mu, rsigma


@define(
    f"layernorm_bwd(Tensor dz, Tensor x, Tensor mu, Tensor rsigma, Tensor gamma, {_BACKWARD})"
    " -> (Tensor, Tensor, Tensor)",
    fake=lambda dz, x, mu, rsigma, gamma, **_: _like(x, gamma, gamma),
)
def layernorm_bwd(
    dz: torch.Tensor, x: torch.Tensor, mu: torch.Tensor, rsigma: torch.Tensor,
    gamma: torch.Tensor, *, zero_centered_gamma: bool,
) -> Any:
    """Gradients of input, gamma and beta."""
    dz2 = _flat(dz)
    xhat = (_flat(x) - mu[:, None]) * rsigma[:, None]
    wdz = dz2 * _gamma(gamma, zero_centered_gamma)
    means = wdz.mean(-1, keepdim=True) + xhat * (wdz * xhat).mean(-1, keepdim=True)
    dx = (rsigma[:, None] * (wdz - means)).reshape(x.shape).to(x.dtype)
    return dx, (dz2 * xhat).sum(0).to(gamma.dtype), dz2.sum(0).to(gamma.dtype)

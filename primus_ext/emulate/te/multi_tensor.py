"""Fused optimizer kernels over lists of tensors: Adam, SGD, L2 norm, scaling.

Each call is one operator with all its tensors; the arithmetic is fp32 as in
``transformer_engine/common/multi_tensor`` (2.20).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from primus_ext.emulate.te.bindings import binding
from primus_ext.emulate.te.operands import element_name
from primus_ext.emulate.te.ops import define, nothing

_Lists = list[list[torch.Tensor]]
_STATE = "Tensor(a!)[] params, Tensor(b!)[] exp_avg, Tensor(c!)[] exp_avg_sq, Tensor(d!)[] master"
_SCALARS = (
    "float beta1, float beta2, float eps, int mode, bool bias_correction, float weight_decay"
)


def _update(
    g: torch.Tensor, p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, *, lr: float, step: int,
    beta1: float, beta2: float, eps: float, mode: int, bias_correction: bool, weight_decay: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """New parameter and moments (fp32); mode 0 adds the decay to the gradient, 1 decouples it."""
    g, p, m, v = g.float(), p.float(), m.float(), v.float()
    if mode == 0:
        g = g + weight_decay * p
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    scale1 = 1 - beta1**step if bias_correction else 1.0
    scale2 = 1 - beta2**step if bias_correction else 1.0
    update = (m / scale1) / ((v / scale2).sqrt() + eps)
    if mode == 1:
        update = update + weight_decay * p
    return p - lr * update, m, v


def _adam(
    grads: Any, params: Any, exp_avg: Any, exp_avg_sq: Any, master: Any, **scalars: Any
) -> None:
    masters = master or params
    for g, p, m, v, full in zip(grads, params, exp_avg, exp_avg_sq, masters, strict=True):
        new, new_m, new_v = _update(g, full, m, v, **scalars)
        m.copy_(new_m)
        v.copy_(new_v)
        full.copy_(new)
        if full is not p:
            p.copy_(new)


@define(
    f"multi_tensor_adam(Tensor noop, Tensor[] grads, {_STATE}, *, float lr, int step, {_SCALARS})"
    " -> ()",
    fake=nothing,
)
def _multi_tensor_adam(noop: Any, *lists: Any, **scalars: Any) -> None:
    _adam(*lists, **scalars)


@define(
    "multi_tensor_adam_capturable(Tensor noop, Tensor(e!)[] grads, "
    f"{_STATE}, Tensor lr, Tensor step, Tensor inv_scale, *, {_SCALARS}) -> ()",
    fake=nothing,
)
def _multi_tensor_adam_capturable(
    noop: torch.Tensor, grads: Any, params: Any, exp_avg: Any, exp_avg_sq: Any, master: Any,
    lr: torch.Tensor, step: torch.Tensor, inv_scale: torch.Tensor, **scalars: Any,
) -> None:
    if int(noop) == 1:
        return
    for grad in grads:  # the kernel stores the unscaled gradient
        grad.mul_(inv_scale.to(grad.dtype))
    _adam(grads, params, exp_avg, exp_avg_sq, master, lr=float(lr), step=int(step), **scalars)


def _join(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """fp32 master from its bf16 rounding and the low 16 bits (int16)."""
    upper = high.view(torch.int16).to(torch.int32) - (low < 0).to(torch.int32)
    return ((upper << 16) | (low.to(torch.int32) & 0xFFFF)).view(torch.float32)


def _split(master: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
    bits = master.contiguous().view(torch.int32)
    low16 = (bits & 0xFFFF).to(torch.int32)
    low.copy_(torch.where(low16 >= 0x8000, low16 - 0x10000, low16).to(torch.int16))
    upper = (bits >> 16) + (low < 0).to(torch.int32)
    high.view(torch.int16).copy_(upper.to(torch.int16))


@define(
    "multi_tensor_adam_param_remainder(Tensor noop, Tensor[] grads, "
    f"{_STATE}, *, float lr, int step, {_SCALARS}) -> ()",
    fake=nothing,
)
def _multi_tensor_adam_param_remainder(
    noop: Any, grads: Any, params: Any, exp_avg: Any, exp_avg_sq: Any, remainders: Any,
    **scalars: Any,
) -> None:
    for g, p, m, v, low in zip(grads, params, exp_avg, exp_avg_sq, remainders, strict=True):
        new, new_m, new_v = _update(g, _join(p, low), m, v, **scalars)
        m.copy_(new_m)
        v.copy_(new_v)
        _split(new, p, low)


@define(
    f"multi_tensor_adam_fp8(Tensor noop, Tensor[] grads, {_STATE}, Tensor[] scale, "
    f"Tensor(e!)[] amax, Tensor(f!)[] scale_inv, *, float lr, int step, {_SCALARS}, str element)"
    " -> ()",
    fake=nothing,
)
def _multi_tensor_adam_fp8(
    noop: Any, grads: Any, params: Any, exp_avg: Any, exp_avg_sq: Any, master: Any, scale: Any,
    amax: Any, scale_inv: Any, *, element: str, **scalars: Any,
) -> None:
    from primus_ext.emulate.te.cast_kernels import encode_fp8

    lists = (grads, params, exp_avg, exp_avg_sq, master, scale, amax, scale_inv)
    for g, p, m, v, full, s, a, s_inv in zip(*lists, strict=True):
        new, new_m, new_v = _update(g, full, m, v, **scalars)
        m.copy_(new_m)
        v.copy_(new_v)
        full.copy_(new)
        p.copy_(encode_fp8(new * s, element))
        torch.maximum(a, new.abs().max().reshape(a.shape), out=a)
        s_inv.copy_(s.reciprocal())


def _scalars(
    beta1: float, beta2: float, epsilon: float, mode: int, bias_correction: int,
    weight_decay: float,
) -> dict[str, Any]:
    return {
        "beta1": beta1, "beta2": beta2, "eps": epsilon, "mode": int(mode),
        "bias_correction": bool(bias_correction), "weight_decay": weight_decay,
    }  # fmt: skip


@binding()
def multi_tensor_adam(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: _Lists, lr: float, beta1: float,
    beta2: float, epsilon: float, step: int, mode: int, bias_correction: int, weight_decay: float,
) -> None:
    """Adam on ``[grads, params, exp_avg, exp_avg_sq]`` and, as a fifth list, fp32 masters."""
    lists = tensor_lists if len(tensor_lists) == 5 else [*tensor_lists, []]
    scalars = _scalars(beta1, beta2, epsilon, mode, bias_correction, weight_decay)
    _multi_tensor_adam(noop_flag, *lists, lr=float(lr), step=int(step), **scalars)


@binding()
def multi_tensor_adam_param_remainder(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: _Lists, lr: float, beta1: float,
    beta2: float, epsilon: float, step: int, mode: int, bias_correction: int, weight_decay: float,
) -> None:
    """Adam whose fifth list holds the low 16 bits of the master parameters (int16)."""
    scalars = _scalars(beta1, beta2, epsilon, mode, bias_correction, weight_decay)
    _multi_tensor_adam_param_remainder(
        noop_flag, *tensor_lists, lr=float(lr), step=int(step), **scalars)


@binding()
def multi_tensor_adam_fp8(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: _Lists, lr: float, beta1: float,
    beta2: float, epsilon: float, step: int, mode: int, bias_correction: int, weight_decay: float,
    fp8_dtype: Any,
) -> None:
    """Adam on FP8 parameters: lists as above, then scale, amax and inverse scale."""
    scalars = _scalars(beta1, beta2, epsilon, mode, bias_correction, weight_decay)
    _multi_tensor_adam_fp8(
        noop_flag, *tensor_lists, lr=float(lr), step=int(step), element=element_name(fp8_dtype),
        **scalars,
    )  # fmt: skip


@binding("multi_tensor_adam_capturable", "multi_tensor_adam_capturable_master")
def multi_tensor_adam_capturable(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: _Lists, lr: torch.Tensor,
    beta1: float, beta2: float, epsilon: float, step: torch.Tensor, mode: int,
    bias_correction: int, weight_decay: float, inv_scale: torch.Tensor,
) -> None:
    """Adam with learning rate, step and inverse loss scale as tensors."""
    lists = tensor_lists if len(tensor_lists) == 5 else [*tensor_lists, []]
    scalars = _scalars(beta1, beta2, epsilon, mode, bias_correction, weight_decay)
    _multi_tensor_adam_capturable(noop_flag, *lists, lr, step, inv_scale, **scalars)


@define(
    "multi_tensor_sgd(Tensor noop, Tensor[] grads, Tensor(a!)[] params, Tensor(b!)[] momenta, "
    "Tensor(c!)[] copies, *, float wd, float momentum, float dampening, float lr, bool nesterov, "
    "bool first_run, bool wd_after_momentum, float scale) -> ()",
    fake=nothing,
)
def _multi_tensor_sgd(
    noop: Any, grads: Any, params: Any, momenta: Any, copies: Any, *, wd: float, momentum: float,
    dampening: float, lr: float, nesterov: bool, first_run: bool, wd_after_momentum: bool,
    scale: float,
) -> None:
    for i, (grad, p, mom) in enumerate(zip(grads, params, momenta, strict=True)):
        g = grad.float() * scale
        if wd != 0 and not wd_after_momentum:
            g = g + wd * p.float()
        if momentum != 0:
            mom.copy_(g if first_run else mom.float() * momentum + (1 - dampening) * g)
            g = g + momentum * mom.float() if nesterov else mom.float()
        if wd != 0 and wd_after_momentum:
            g = g + wd * p.float()
        p.copy_(p.float() - lr * g)
        if copies:
            copies[i].copy_(p)


@binding()
def multi_tensor_sgd(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: _Lists, wd: float, momentum: float,
    dampening: float, lr: float, nesterov: bool, first_run: bool, wd_after_momentum: bool,
    scale: float,
) -> None:
    """SGD on ``[grads, params, momenta]`` and, as a fourth list, half-precision copies."""
    lists = tensor_lists if len(tensor_lists) == 4 else [*tensor_lists, []]
    _multi_tensor_sgd(
        noop_flag, *lists, wd=wd, momentum=momentum, dampening=dampening, lr=lr,
        nesterov=nesterov, first_run=first_run, wd_after_momentum=wd_after_momentum, scale=scale,
    )  # fmt: skip


def _norm_outputs(tensors: Any, scratch: torch.Tensor, per_tensor: bool) -> Any:
    count = len(tensors) if per_tensor else 0
    return scratch.new_empty((1,)), scratch.new_empty((count,))


def _norm_fake(noop: Any, tensors: Any, inv_scale: Any, scratch: Any, *, per_tensor: bool) -> Any:
    return _norm_outputs(tensors, scratch, per_tensor)


@define(
    "multi_tensor_l2norm(Tensor noop, Tensor[] tensors, Tensor? inv_scale, Tensor(a!) scratch, *, "
    "bool per_tensor) -> (Tensor, Tensor)",
    fake=_norm_fake,
)
def _multi_tensor_l2norm(
    noop: Any, tensors: Any, inv_scale: Any, scratch: torch.Tensor, *, per_tensor: bool
) -> Any:
    total, each = _norm_outputs(tensors, scratch, per_tensor)
    factor = 1.0 if inv_scale is None else float(inv_scale)
    norms = torch.stack([t.float().mul(factor).norm() for t in tensors])
    total.copy_(norms.norm())
    if per_tensor:
        each.copy_(norms)
    return total, each


def _norm(noop: Any, lists: _Lists, inv_scale: Any, per_tensor: bool | None) -> Any:
    # 320 partial sums, as the extension allocates them
    scratch = torch.zeros(320, dtype=torch.float32, device=lists[0][0].device)
    return _multi_tensor_l2norm(noop, lists[0], inv_scale, scratch, per_tensor=bool(per_tensor))


@binding()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: _Lists, per_tensor: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """L2 norm of all tensors together [1] and, if asked, of each."""
    return _norm(noop_flag, tensor_lists, None, per_tensor)


@binding()
def multi_tensor_unscale_l2norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: _Lists, inv_scale: torch.Tensor,
    per_tensor: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of the tensors times ``inv_scale``; they are not changed."""
    return _norm(noop_flag, tensor_lists, inv_scale, per_tensor)


@define(
    "multi_tensor_scale(Tensor(b!) flag, Tensor[] sources, Tensor(a!)[] destinations, "
    "Tensor? scale_tensor, *, float scale) -> ()",
    fake=nothing,
)
def _multi_tensor_scale(
    flag: torch.Tensor, sources: Any, destinations: Any, scale_tensor: Any, *, scale: float
) -> None:
    factor = scale if scale_tensor is None else float(scale_tensor)
    for source, destination in zip(sources, destinations, strict=True):
        if not bool(torch.isfinite(source).all()):
            flag.fill_(1)
        destination.copy_(source.float() * factor)


@binding()
def multi_tensor_scale(
    chunk_size: int, is_infinite: torch.Tensor, tensor_lists: _Lists, scale: float
) -> None:
    """``destination = source * scale``; the flag becomes 1 if a source is not finite."""
    _multi_tensor_scale(is_infinite, *tensor_lists, None, scale=float(scale))


@binding()
def multi_tensor_scale_tensor(
    chunk_size: int, is_infinite: torch.Tensor, tensor_lists: _Lists, scale: torch.Tensor
) -> None:
    """The same with the factor in a tensor."""
    _multi_tensor_scale(is_infinite, *tensor_lists, scale, scale=math.nan)

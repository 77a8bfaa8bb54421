"""Kernels of Transformer Engine and fused ones on a device that has none of them.

There a program calls torch instead, and so does this: a row of the database says what ran in its
``kernel``.  What has no such counterpart is refused by name.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from primus_ext.observe.microbench.tensors import CannotRun, Run, inputs_of, make
from primus_ext.trace import Op

_FUSIONS = ("fused_bias_swiglu", "fused_bias_geglu", "fused_bias_gelu", "fused_bias_dropout")
_DROPOUT = "bias_dropout_add_fused_train"
_EPS = 1e-5


def build(op: Op, device: torch.device) -> tuple[Run, str]:
    """What stands in for a fused kernel.

    Raises:
        CannotRun: Nothing does.
    """
    if op.name.startswith("fused."):
        return _megatron(op, device)
    found = _KERNELS.get(op.name)
    if found is None:
        raise CannotRun(
            f"{op.name} is a kernel that only a device with its library runs, and nothing of "
            "torch does the same"
        )
    return found(op, device)


@functools.cache
def _fusion(name: str) -> Callable[..., Any] | None:
    """One of Megatron's functions that it fuses."""
    for module in _FUSIONS:
        found = getattr(importlib.import_module(f"megatron.core.fusions.{module}"), name, None)
        if found is not None:
            return found
    return None


def _megatron(op: Op, device: torch.device) -> tuple[Run, str]:
    name = op.name.removeprefix("fused.")
    function = _fusion(name)
    if function is None:
        raise CannotRun(f"{op.name} is no fused function of megatron.core.fusions")
    how = "compiled" if device.type != "cpu" else "eager"
    kernel, inputs = f"megatron {name}, {how}", inputs_of(op, device)
    if name == _DROPOUT:
        *data, residual = inputs
        pair = (data[0], data[1] if len(data) > 1 else None)
        return lambda: function(pair, residual, 0.0), kernel
    return lambda: function(*inputs), kernel


def _rms_norm(op: Op, device: torch.device) -> tuple[Run, str]:
    data, weight = (make(spec, device) for spec in op.inputs[:2])
    return lambda: F.rms_norm(data, weight.shape, weight, _EPS), "torch rms_norm"


def _layer_norm(op: Op, device: torch.device) -> tuple[Run, str]:
    data, *rest = (make(spec, device) for spec in op.inputs[:3])
    weight, bias = (*rest, None)[:2]
    return lambda: F.layer_norm(data, data.shape[-1:], weight, bias, _EPS), "torch layer_norm"


def _norm_backward(op: Op, device: torch.device) -> tuple[Run, str]:
    gradient, data = (make(spec, device) for spec in op.inputs[:2])
    weight = make(op.inputs[-1], device).requires_grad_()
    is_rms = "rmsnorm" in op.name
    leaves = [data.requires_grad_(), weight]
    with torch.enable_grad():
        if is_rms:
            out = F.rms_norm(data, weight.shape, weight, _EPS)
        else:
            leaves.append(torch.zeros_like(weight).requires_grad_())
            out = F.layer_norm(data, weight.shape, weight, leaves[2], _EPS)
    gradient = gradient.reshape(out.shape)
    name = f"torch {'rms' if is_rms else 'layer'}_norm, its backward"
    return lambda: torch.autograd.grad(out, leaves, gradient, retain_graph=True), name


def _rope(op: Op, device: torch.device) -> tuple[Run, str]:
    """The unfused rotation; a backward is one by the negative angle."""
    data, angles = (make(spec, device) for spec in op.inputs[:2])
    cos, sin, width = angles.cos().to(data.dtype), angles.sin().to(data.dtype), angles.shape[-1]

    def run() -> torch.Tensor:
        turned, rest = data[..., :width], data[..., width:]
        first, second = turned.chunk(2, -1)
        out = turned * cos + torch.cat((-second, first), -1) * sin
        return torch.cat((out, rest), -1) if rest.shape[-1] else out

    return run, "torch: unfused rotation"


def _adam(op: Op, device: torch.device) -> tuple[Run, str]:
    """A step of torch's AdamW whose state is what its own first step made."""
    shapes = [spec for spec in op.inputs[1:] if len(spec.shape) == 1 or spec.shape]
    count, rest = divmod(len(shapes), 4)
    if rest or not count:
        raise CannotRun(f"{op.name} has other lists than gradients, parameters and two moments")
    gradients, parameters = shapes[:count], shapes[count : 2 * count]
    made = [torch.nn.Parameter(make(spec, device)) for spec in parameters]
    for parameter, spec in zip(made, gradients, strict=True):
        parameter.grad = make(spec, device).to(parameter.dtype)
    optimizer = torch.optim.AdamW(made, lr=1e-4, fused=True)
    optimizer.step()
    return optimizer.step, "torch.optim.AdamW(fused=True)"


def _norm_of_all(op: Op, device: torch.device) -> tuple[Run, str]:
    # all but the flag before and the scratch after
    data = [make(spec, device) for spec in op.inputs[1:-1]]

    def run() -> torch.Tensor:
        norms: Any = torch._foreach_norm(data)  # pyright: ignore[reportPrivateImportUsage]
        return torch.linalg.vector_norm(torch.stack(norms))

    return run, "torch._foreach_norm"


def _scaled(op: Op, device: torch.device) -> tuple[Run, str]:
    count = (len(op.inputs) - 1) // 2
    data = [make(spec, device) for spec in op.inputs[1 : 1 + count]]
    scale: Any = torch._foreach_mul_  # pyright: ignore[reportPrivateImportUsage]
    return functools.partial(scale, data, 0.9999), "torch._foreach_mul_"


_KERNELS: dict[str, Callable[[Op, torch.device], tuple[Run, str]]] = {
    "primus_te.rmsnorm_fwd": _rms_norm,
    "primus_te.layernorm_fwd": _layer_norm,
    "primus_te.rmsnorm_bwd": _norm_backward,
    "primus_te.layernorm_bwd": _norm_backward,
    "primus_te.fused_rope_fwd": _rope,
    "primus_te.fused_rope_bwd": _rope,
    "primus_te.multi_tensor_adam": _adam,
    "primus_te.multi_tensor_l2norm": _norm_of_all,
    "primus_te.multi_tensor_scale": _scaled,
}

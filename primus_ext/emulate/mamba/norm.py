"""Stand-in of ``mamba_ssm.ops.triton.layernorm_gated``: RMS norm by groups, with an optional gate.

What is allocated and saved follows that module in mamba_ssm 2.3: input, weight, 1/rms per row and
group (fp32) and the gate are saved; the weight's gradient is reduced over as many partial rows as
the device has blocks for.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from primus_ext.emulate.mamba.ops import define, gradients


def _reference(
    x: torch.Tensor, weight: torch.Tensor, z: torch.Tensor | None, eps: float, group: int,
    norm_before_gate: bool,
) -> torch.Tensor:  # fmt: skip
    x = x.float()
    if z is not None and not norm_before_gate:
        x = x * F.silu(z.float())
    rows = x.view(x.shape[0], -1, group)
    scale = torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    out = (rows * scale).reshape(x.shape) * weight.float()
    return out * F.silu(z.float()) if z is not None and norm_before_gate else out


@define("norm_fwd(Tensor x, Tensor weight, Tensor? z, float eps, int group, bool before,"
        " int flops, Tensor(a!) out, Tensor(b!)[] workspace) -> ()")
def _norm_fwd(x: Any, weight: Any, z: Any, eps: float, group: int, before: bool, flops: int,
              out: Any, workspace: Any) -> None:  # fmt: skip
    out.copy_(_reference(x, weight, z, eps, group, before))


@define("norm_bwd(Tensor dy, Tensor x, Tensor weight, Tensor? z, Tensor rstd, float eps, int group,"
        " bool before, int flops, Tensor(a!) dx, Tensor(b!) dw, Tensor(c!)? dz,"
        " Tensor(d!)[] workspace) -> ()")
def _norm_bwd(dy: Any, x: Any, weight: Any, z: Any, rstd: Any, eps: float, group: int, before: bool,
              flops: int, dx: Any, dw: Any, dz: Any, workspace: Any) -> None:  # fmt: skip
    found = gradients(
        lambda a, w, g: _reference(a, w, g, eps, group, before), [x, weight, z], dy
    )
    for into, grad in zip((dx, dw, dz), found, strict=True):
        if into is not None and grad is not None:
            into.copy_(grad)


def _partial_rows(x: torch.Tensor, group: int) -> int:
    """Rows of the weight gradient that blocks of the backward kernel write."""
    block = min(65536 // x.element_size(), 1 << (group - 1).bit_length())
    warps = min(max(block // 256, 1), 8)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    return math.ceil(processors * math.ceil(4 / warps) / (x.shape[1] // group))


class GatedNormFn(torch.autograd.Function):
    """The norm under autograd."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, z: Any, eps: float, group: int | None,
                before: bool) -> torch.Tensor:  # fmt: skip
        """Result; what the backward needs is saved."""
        ctx.shape = x.shape
        x = x.reshape(-1, x.shape[-1])
        z = None if z is None else z.reshape(-1, z.shape[-1])
        weight = weight.contiguous()
        ctx.attributes = eps, group or x.shape[1], before
        groups = x.shape[1] // ctx.attributes[1]
        out = torch.empty_like(x)
        rstd = torch.empty(groups * x.shape[0], dtype=torch.float32)
        _norm_fwd(x, weight, z, *ctx.attributes, 4 * x.numel(), out, [rstd])
        ctx.save_for_backward(x, weight, rstd, z)
        return out.reshape(ctx.shape)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> tuple:  # type: ignore[override]
        """Gradients of the inputs, in their order."""
        x, weight, rstd, z = ctx.saved_tensors
        dy = dy.reshape(-1, dy.shape[-1])
        if dy.stride(-1) != 1:
            dy = dy.contiguous()
        dx = torch.empty_like(x)
        dz = None if z is None else torch.empty_like(z)
        rows = _partial_rows(x, ctx.attributes[1])
        partial = torch.empty((rows, x.shape[1]), dtype=torch.float32)
        total = torch.empty(x.shape[1], dtype=torch.float32)
        _norm_bwd(dy, x, weight, z, rstd, *ctx.attributes, 8 * x.numel(), dx, total, dz, [partial])
        dw = total.to(weight.dtype)
        gate = None if dz is None else dz.reshape(ctx.shape)
        return dx.reshape(ctx.shape), dw, gate, None, None, None


class RMSNorm(torch.nn.Module):
    """``mamba_ssm.ops.triton.layernorm_gated.RMSNorm``."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-5, group_size: int | None = None,
        norm_before_gate: bool = True, device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """As the original: a weight of ones and no bias."""
        super().__init__()
        self.eps, self.group_size, self.norm_before_gate = eps, group_size, norm_before_gate
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        """Norm of ``x``, gated by ``z`` where given."""
        return GatedNormFn.apply(
            x, self.weight, z, self.eps, self.group_size, self.norm_before_gate
        )

"""Stand-in of ``mamba_ssm.ops.triton.ssd_combined``: what Megatron's Mamba layers call.

Saved tensors and the order of allocations follow that module in mamba_ssm 2.3.
"""

from __future__ import annotations

from typing import Any

import torch

from primus_ext.emulate.mamba import conv, scan
from primus_ext.emulate.session import ProgramError

NO_LIMIT = (0.0, float("inf"))


def _refuse(**asked: Any) -> None:
    for name, value in asked.items():
        if value is not None and value is not False and value != NO_LIMIT:
            raise ProgramError(
                f"{name} of mamba_ssm's scan can't be projected by this version; legal: its default"
            )


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The convolution needs strides of the length dimension in multiples of 8."""
    return tensor if tensor.stride(1) % 8 == 0 else tensor.contiguous()


class MambaSplitConv1dScanCombinedFn(torch.autograd.Function):
    """Convolution, scan and gate of one Mamba layer: the convolution is computed again later."""

    @staticmethod
    def forward(ctx: Any, zxbcdt: Any, conv_weight: Any, conv_bias: Any, dt_bias: Any, a: Any,
                d: Any, chunk: int, silu: bool, heads: int, groups: int,
                state_dtype: Any) -> torch.Tensor:  # fmt: skip
        """Result; what the backward needs is saved."""
        dim, channels = _widths(zxbcdt, conv_weight, heads)
        z, xbc, dt = torch.split(zxbcdt, [dim, channels, heads], dim=-1)
        xbc_conv = conv.forward(_aligned(xbc).transpose(1, 2), conv_weight, conv_bias, silu)
        x, b, c = _parts(xbc_conv.transpose(1, 2), dim, heads, groups)
        z = z.unflatten(-1, (heads, -1))
        out, out_x, _ = scan.forward(x, dt, a, b, c, chunk, d, z, dt_bias, True, state_dtype)
        ctx.save_for_backward(zxbcdt, conv_weight, conv_bias, out_x, a, d, dt_bias)
        ctx.attributes = chunk, silu, heads, groups, state_dtype
        return out.flatten(2)

    @staticmethod
    def backward(ctx: Any, dout: Any) -> tuple:  # type: ignore[override]
        """Gradients of the inputs, in their order."""
        zxbcdt, conv_weight, conv_bias, out, a, d, dt_bias = ctx.saved_tensors
        chunk, silu, heads, groups, state_dtype = ctx.attributes
        dim, channels = _widths(zxbcdt, conv_weight, heads)
        z, xbc, dt = torch.split(zxbcdt, [dim, channels, heads], dim=-1)
        xbc_conv = conv.forward(_aligned(xbc).transpose(1, 2), conv_weight, conv_bias, silu)
        x, b, c = _parts(xbc_conv.transpose(1, 2), dim, heads, groups)
        dzxbcdt = torch.empty_like(zxbcdt)
        dz, dxbc_given, ddt = torch.split(dzxbcdt, [dim, channels, heads], dim=-1)
        dxbc = torch.empty_like(xbc)
        dx, db, dc = _parts(dxbc, dim, heads, groups)
        if dout.stride(-1) != 1:
            dout = dout.contiguous()
        grads = scan.backward(
            dout.unflatten(-1, (heads, -1)), x, dt, a, b, c, out, chunk, d,
            z.unflatten(-1, (heads, -1)), dt_bias, True,
            {"dx": dx, "ddt": ddt, "db": db, "dc": dc, "dz": dz.unflatten(-1, (heads, -1))},
            state_dtype,
        )  # fmt: skip
        given = _aligned(dxbc_given)
        made, dweight, dbias = conv.backward(
            _aligned(xbc).transpose(1, 2), conv_weight, conv_bias, _aligned(dxbc).transpose(1, 2),
            silu, given.transpose(1, 2),
        )  # fmt: skip
        if given is not dxbc_given:
            dxbc_given.copy_(made.transpose(1, 2))
        return (dzxbcdt, dweight, dbias, grads["ddt_bias"], grads["da"], grads["dd"],
                None, None, None, None, None)  # fmt: skip


def _widths(zxbcdt: torch.Tensor, conv_weight: torch.Tensor, heads: int) -> tuple[int, int]:
    """Width of x (and z), and channels of the convolution (x, B and C)."""
    channels = conv_weight.shape[0]
    return zxbcdt.shape[-1] - channels - heads, channels


def _parts(xbc: torch.Tensor, dim: int, heads: int, groups: int) -> tuple[torch.Tensor, ...]:
    """X by heads, B and C by groups."""
    state = (xbc.shape[-1] - dim) // 2
    x, b, c = torch.split(xbc, [dim, state, state], dim=-1)
    return (x.unflatten(-1, (heads, -1)), b.unflatten(-1, (groups, -1)),
            c.unflatten(-1, (groups, -1)))  # fmt: skip


def mamba_split_conv1d_scan_combined(
    zxbcdt: torch.Tensor, conv1d_weight: torch.Tensor, conv1d_bias: torch.Tensor,
    dt_bias: torch.Tensor, A: torch.Tensor, D: torch.Tensor, chunk_size: int,  # noqa: N803
    initial_states: Any = None, seq_idx: Any = None, dt_limit: Any = NO_LIMIT,
    return_final_states: bool = False, activation: str | None = "silu", rmsnorm_weight: Any = None,
    rmsnorm_eps: float = 1e-6, outproj_weight: Any = None, outproj_bias: Any = None,
    headdim: int | None = None, ngroups: int = 1, norm_before_gate: bool = True,
    state_dtype: Any = None,
) -> torch.Tensor:  # fmt: skip
    """``[batch, seq, 2 dim + 2 groups state + heads]`` to ``[batch, seq, dim]``.

    Raises:
        ProgramError: an argument is given that Megatron's training path does not use.
    """
    _refuse(initial_states=initial_states, packed_sequences=seq_idx, dt_limit=dt_limit,
            return_final_states=return_final_states, rmsnorm_weight=rmsnorm_weight,
            outproj_weight=outproj_weight, D_per_channel=D.dim() == 2)  # fmt: skip
    return MambaSplitConv1dScanCombinedFn.apply(
        zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size,
        activation in ("silu", "swish"), D.shape[0], ngroups, state_dtype,
    )  # fmt: skip


class MambaChunkScanCombinedFn(torch.autograd.Function):
    """The scan alone; its inputs are saved."""

    @staticmethod
    def forward(ctx: Any, x: Any, dt: Any, a: Any, b: Any, c: Any, chunk: int, d: Any, z: Any,
                dt_bias: Any, softplus: bool, state_dtype: Any) -> torch.Tensor:  # fmt: skip
        """Result; what the backward needs is saved."""
        out, out_x, decay = scan.forward(
            x, dt, a, b, c, chunk, d, z, dt_bias, softplus, state_dtype
        )  # the decay is saved, and computed again all the same
        kept = out if z is None else out_x
        ctx.save_for_backward(kept, x, dt, decay, a, b, c, d, z, dt_bias)
        ctx.attributes = chunk, softplus, state_dtype
        return out

    @staticmethod
    def backward(ctx: Any, dout: Any) -> tuple:  # type: ignore[override]
        """Gradients of the inputs, in their order."""
        out, x, dt, _, a, b, c, d, z, dt_bias = ctx.saved_tensors
        chunk, softplus, state_dtype = ctx.attributes
        if dout.stride(-1) != 1:
            dout = dout.contiguous()
        grads = scan.backward(
            dout, x, dt, a, b, c, out, chunk, d, z, dt_bias, softplus, {}, state_dtype
        )
        return (grads["dx"], grads["ddt"], grads["da"], grads["db"], grads["dc"], None,
                grads["dd"], grads["dz"], grads["ddt_bias"], None, None)  # fmt: skip


def mamba_chunk_scan_combined(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor,  # noqa: N803
    C: torch.Tensor, chunk_size: int, D: Any = None, z: Any = None,  # noqa: N803
    dt_bias: Any = None, initial_states: Any = None, seq_idx: Any = None, cu_seqlens: Any = None,
    dt_softplus: bool = False, dt_limit: Any = NO_LIMIT, return_final_states: bool = False,
    return_varlen_states: bool = False, state_dtype: Any = None,
) -> torch.Tensor:  # fmt: skip
    """The scan alone, ``[batch, seq, heads, head_dim]``.

    Raises:
        ProgramError: an argument is given that Megatron's training path does not use.
    """
    _refuse(initial_states=initial_states, packed_sequences=seq_idx, dt_limit=dt_limit,
            return_final_states=return_final_states, return_varlen_states=return_varlen_states,
            D_per_channel=D is not None and D.dim() == 2)  # fmt: skip
    return MambaChunkScanCombinedFn.apply(
        x, dt, A, B, C, chunk_size, D, z, dt_bias, dt_softplus, state_dtype
    )

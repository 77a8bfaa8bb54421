"""Stand-in of ``causal_conv1d``: depthwise causal convolution, optionally with SiLU.

Shapes: input ``[batch, channels, length]`` (any strides), weight ``[channels, width]``.  What is
allocated and saved follows ``causal_conv1d/cpp_functions.py`` and ``causal_conv1d_interface.py`` of
Dao-AILab/causal-conv1d 1.6: weight and bias gradients are accumulated in fp32, input, weight and
bias are saved.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from primus_ext.emulate.mamba.ops import define, gradients
from primus_ext.emulate.session import ProgramError


def _reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool
) -> torch.Tensor:
    length, width = x.shape[-1], weight.shape[-1]
    out = F.conv1d(
        x.float(), weight.float()[:, None], None if bias is None else bias.float(),
        padding=width - 1, groups=x.shape[1],
    )[..., :length]  # fmt: skip
    return F.silu(out) if silu else out


@define("conv_fwd(Tensor x, Tensor weight, Tensor? bias, bool silu, int flops, Tensor(a!) out)"
        " -> ()")
def _conv_fwd(x: Any, weight: Any, bias: Any, silu: bool, flops: int, out: Any) -> None:
    out.copy_(_reference(x, weight, bias, silu))


@define("conv_bwd(Tensor x, Tensor weight, Tensor? bias, Tensor dout, bool silu, int flops,"
        " Tensor(a!) dx, Tensor(b!) dweight, Tensor(c!)? dbias) -> ()")
def _conv_bwd(x: Any, weight: Any, bias: Any, dout: Any, silu: bool, flops: int, dx: Any,
              dweight: Any, dbias: Any) -> None:  # fmt: skip
    found = gradients(lambda a, w, b: _reference(a, w, b, silu), [x, weight, bias], dout)
    for into, grad in zip((dx, dweight, dbias), found, strict=True):
        if into is not None and grad is not None:
            into.copy_(grad)


def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool
) -> torch.Tensor:
    """The convolution; the result has the layout of ``x``."""
    out = torch.empty_like(x)
    _conv_fwd(x, weight, bias, silu, 2 * x.numel() * weight.shape[-1], out)
    return out


def backward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dout: torch.Tensor,
    silu: bool, dx: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Gradients of input (into ``dx`` where given), weight and bias."""
    dx = torch.empty_like(x) if dx is None else dx
    dweight = torch.zeros_like(weight, dtype=torch.float32)
    dbias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
    # the forward once more (its SiLU is not saved), and a product each for input and weight
    _conv_bwd(x, weight, bias, dout, silu, 6 * x.numel() * weight.shape[-1], dx, dweight, dbias)
    cast = None if bias is None or dbias is None else dbias.type_as(bias)
    return dx, dweight.type_as(weight), cast


class CausalConv1dFn(torch.autograd.Function):
    """The convolution under autograd."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, silu: bool) -> torch.Tensor:
        """Result; what the backward needs is saved."""
        if x.stride(2) != 1 and x.stride(1) != 1:
            x = x.contiguous()
        ctx.save_for_backward(x, weight, bias)
        ctx.silu = silu
        return forward(x, weight, bias, silu)

    @staticmethod
    def backward(ctx: Any, dout: Any) -> tuple:  # type: ignore[override]
        """Gradients of the inputs, in their order."""
        x, weight, bias = ctx.saved_tensors
        if dout.stride(2) != 1 and dout.stride(1) != 1:
            dout = dout.contiguous()
        return (*backward(x, weight, bias, dout, ctx.silu), None)


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """``causal_conv1d.causal_conv1d_fn`` for training.

    Raises:
        ProgramError: packed sequences or states are asked for.
    """
    if seq_idx is not None or initial_states is not None or return_final_states:
        raise ProgramError(
            "packed sequences and carried states of causal_conv1d can't be projected by this "
            "version; legal: sequences of one document"
        )
    return CausalConv1dFn.apply(x, weight, bias, activation in ("silu", "swish"))

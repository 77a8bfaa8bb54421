"""Activation functions and their gradients, gated or not, with quantized outputs.

Formulas: ``transformer_engine/common/util/math.h`` and ``vectorized_pointwise.h`` (2.20); a gated
input is ``[..., 2 n]``, the first half goes through the activation, the second multiplies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from primus_ext.emulate.te import cast_kernels
from primus_ext.emulate.te.bindings import binding
from primus_ext.emulate.te.numerics import gelu_gradient
from primus_ext.emulate.te.ops import define, nothing

_Params = list[float]
_Pair = tuple[Callable[[torch.Tensor, _Params], torch.Tensor],
              Callable[[torch.Tensor, _Params], torch.Tensor]]  # fmt: skip


def _quick(x: torch.Tensor, alpha: float) -> torch.Tensor:
    return x * torch.sigmoid(alpha * x)


def _dquick(x: torch.Tensor, alpha: float) -> torch.Tensor:
    s = torch.sigmoid(alpha * x)
    return alpha * x * s * (1 - s) + s


def _situ(x: torch.Tensor, p: _Params) -> torch.Tensor:
    return p[0] * torch.tanh(x / p[0]) * torch.sigmoid(x)


def _dsitu(x: torch.Tensor, p: _Params) -> torch.Tensor:
    t, s = torch.tanh(x / p[0]), torch.sigmoid(x)
    return (1 - t * t) * s + p[0] * t * s * (1 - s)


_FUNCTIONS: dict[str, _Pair] = {
    "gelu": (
        lambda x, _: torch.nn.functional.gelu(x, approximate="tanh"),
        lambda x, _: gelu_gradient(x),
    ),
    "qgelu": (lambda x, _: _quick(x, 1.702), lambda x, _: _dquick(x, 1.702)),
    "relu": (lambda x, _: x.relu(), lambda x, _: (x > 0).float()),
    "srelu": (lambda x, _: x.relu().square(), lambda x, _: 2 * x.relu()),
    "silu": (lambda x, _: _quick(x, 1.0), lambda x, _: _dquick(x, 1.0)),
    "sigmoid": (
        lambda x, _: torch.sigmoid(x),
        lambda x, _: torch.sigmoid(x) * (1 - torch.sigmoid(x)),
    ),
    "clamped_silu": (
        lambda x, p: _quick(x.clamp(max=p[0]), p[1]),
        lambda x, p: _dquick(x.clamp(max=p[0]), p[1]) * (x <= p[0]),
    ),
    "situ": (_situ, _dsitu),
}
"""Activation and derivative on fp32 values."""

_GATED = {"glu": "sigmoid", "geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu",
          "sreglu": "srelu", "swiglu": "silu", "clamped_swiglu": "clamped_silu",
          "situglu": "situ"}  # fmt: skip
_PLAIN = ("gelu", "qgelu", "relu", "srelu", "silu")


def _gate(gate: torch.Tensor, kind: str, p: _Params) -> tuple[torch.Tensor, torch.Tensor | float]:
    """The multiplying half and its derivative."""
    if kind == "clamped_swiglu":
        inside = (gate <= p[0]) & (gate >= -p[0])
        return gate.clamp(-p[0], p[0]) + p[2], inside.float()
    if kind == "situglu":
        t = torch.tanh(gate / p[1])
        return p[1] * t, 1 - t * t
    return gate, 1.0


def _forward(x: torch.Tensor, kind: str, params: _Params) -> torch.Tensor:
    if kind not in _GATED:
        return _FUNCTIONS[kind][0](x.float(), params)
    first, second = x.float().chunk(2, -1)
    return _FUNCTIONS[_GATED[kind]][0](first, params) * _gate(second, kind, params)[0]


def _backward(dy: torch.Tensor, x: torch.Tensor, kind: str, params: _Params) -> torch.Tensor:
    dy = dy.float()
    if kind not in _GATED:
        return dy * _FUNCTIONS[kind][1](x.float(), params)
    first, second = x.float().chunk(2, -1)
    value, derivative = _FUNCTIONS[_GATED[kind]]
    gate, dgate = _gate(second, kind, params)
    return torch.cat((derivative(first, params) * dy * gate, dgate * dy * value(first, params)), -1)


def _output_shape(x: torch.Tensor, kind: str) -> list[int]:
    return [*x.shape[:-1], x.shape[-1] // (2 if kind in _GATED else 1)]


_SINK = (
    "Tensor(a!)? row, Tensor(b!)? row_scale_inv, Tensor(c!)? col, Tensor(d!)? col_scale_inv, "
    "Tensor? scale, Tensor(e!)? amax, *, float[] params, str format, bool pow2_scales, "
    "float amax_epsilon"
)


def _define(kind: str) -> None:
    """Operators of one activation: ``kind``, ``d{kind}`` and their quantizing overloads."""

    def forward(x: torch.Tensor, amax: Any, *, params: _Params) -> torch.Tensor:
        value = _forward(x, kind, params)
        cast_kernels.take_maximum(value, amax)
        return value.to(x.dtype)

    def forward_out(x: torch.Tensor, *sink: Any, params: _Params, **attrs: Any) -> None:
        cast_kernels.store(_forward(x, kind, params), *sink, **attrs)

    def backward(
        dy: torch.Tensor, x: torch.Tensor, amax: Any, *, params: _Params
    ) -> torch.Tensor:
        value = _backward(dy, x, kind, params)
        cast_kernels.take_maximum(value, amax)
        return value.to(x.dtype)

    def backward_out(dy: Any, x: torch.Tensor, *sink: Any, params: _Params, **attrs: Any) -> None:
        cast_kernels.store(_backward(dy, x, kind, params), *sink, **attrs)

    def empty(x: torch.Tensor, amax: Any, *, params: _Params) -> torch.Tensor:
        return x.new_empty(_output_shape(x, kind))

    gradient = gradient_name(kind)
    define(f"{kind}(Tensor x, Tensor(a!)? amax, *, float[] params) -> Tensor", fake=empty)(forward)
    define(f"{kind}.out(Tensor x, {_SINK}) -> ()", fake=nothing)(forward_out)
    define(
        f"{gradient}(Tensor dy, Tensor x, Tensor(a!)? amax, *, float[] params) -> Tensor",
        fake=lambda dy, x, amax, *, params: x.new_empty(x.shape),
    )(backward)
    define(f"{gradient}.out(Tensor dy, Tensor x, {_SINK}) -> ()", fake=nothing)(backward_out)


def gradient_name(kind: str) -> str:
    """Name of the gradient of an activation in the extension."""
    return "clamped_dswiglu" if kind == "clamped_swiglu" else f"d{kind}"


for _kind in (*_PLAIN, *_GATED):
    _define(_kind)


def _run(op: str, inputs: tuple[torch.Tensor, ...], shape: list[int], quantizer: Any,
         params: _Params) -> Any:  # fmt: skip
    """Run an activation operator and quantize its output as the extension does."""
    from primus_ext.emulate.te import cast, quantizers

    packet = getattr(torch.ops.primus_te, op)
    inputs = tuple(t.contiguous() for t in inputs)
    if quantizer is None:
        return packet.default(*inputs, None, params=params)
    dtype = inputs[-1].dtype
    out = quantizers.create_tensor(quantizer, shape, dtype)
    kind = quantizers.kind_of(quantizer)
    if kind in ("Float8Quantizer", "MXFP8Quantizer"):
        scales = (quantizer.scale, quantizer.amax) if kind == "Float8Quantizer" else (None, None)
        sink = cast.sink_of(out, quantizer, *scales)
        packet.out(*inputs, *sink.tensors, params=params, **sink.attributes)
        return out
    amax = cast.amax_buffer(inputs[-1], out, quantizer)
    temporary = packet.default(*inputs, amax, params=params)
    cast.quantize_into(temporary, out, quantizer, amax=amax)
    return out


def _bind(kind: str, **defaults: float) -> None:
    """``tex.<kind>`` and its gradient; parameters keep the binding's names and order."""
    gradient = gradient_name(kind)

    def bound(args: tuple[float, ...], kwargs: dict[str, float]) -> _Params:
        values = {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}
        return [float(values[name]) for name in defaults]

    def forward(input: torch.Tensor, quantizer: Any, *args: float, **kwargs: float) -> Any:
        return _run(kind, (input,), _output_shape(input, kind), quantizer, bound(args, kwargs))

    def backward(
        grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any, *args: float, **kwargs: float
    ) -> Any:
        shape = list(fwd_input.shape)
        return _run(gradient, (grad, fwd_input), shape, quantizer, bound(args, kwargs))

    binding(kind)(forward)
    binding(gradient)(backward)


for _kind in (*_PLAIN, *_GATED):
    if _kind == "clamped_swiglu":
        _bind(_kind, limit=7.0, alpha=1.702, glu_linear_offset=1.0)
    elif _kind == "situglu":
        _bind(_kind, beta1=4.0, beta2=25.0)
    else:
        _bind(_kind)


def _bind_bias_gradient(kind: str) -> None:
    """``tex.dbias_d<kind>``: gradient of the bias before the activation, and of its input."""

    def run(grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any) -> list[Any]:
        from primus_ext.emulate.te import cast, quantizers

        x = fwd_input.contiguous()
        gradient = getattr(torch.ops.primus_te, f"d{kind}").default(
            grad.contiguous(), x, None, params=[])
        bias = gradient.new_empty((x.shape[-1],))
        torch.sum(gradient.reshape(-1, x.shape[-1]), 0, out=bias)
        if quantizer is None:
            return [bias, gradient]
        out = quantizers.create_tensor(quantizer, list(x.shape), gradient.dtype)
        cast.quantize_into(gradient, out, quantizer)
        return [bias, out]

    binding(f"dbias_d{kind}")(run)


for _kind in _PLAIN:
    _bind_bias_gradient(_kind)

"""Transformer Engine's own kernels, where its compiled library is installed.

Each is called through the function or module that a training program calls it by.  Quantized
operands are refused: their values would have to come from a recipe.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from primus_ext.observe.microbench.tensors import CannotRun, Run, dtype_of, make
from primus_ext.trace import Op

_PLAIN = ("fp32", "bf16", "fp16")
_PREFIX = "primus_te."


@functools.cache
def _engine(module: str = "") -> Any:
    return importlib.import_module(f"transformer_engine.pytorch{module}")


@functools.cache
def installed() -> bool:
    """Whether Transformer Engine can be imported here."""
    try:
        _engine()
    except (ImportError, RuntimeError, OSError):
        return False
    return True


def build(op: Op, device: torch.device) -> tuple[Run, str]:
    """One kernel of Transformer Engine.

    Raises:
        CannotRun: Nobody taught this module how it is called.
    """
    found = _KERNELS.get(op.name.removeprefix(_PREFIX))
    if found is None:
        raise CannotRun(f"{op.name} can't be run alone: how it is called is not known")
    plain = all(spec.dtype in (*_PLAIN, "int32", "int64") for spec in (*op.inputs, *op.outputs))
    if not plain or str(op.attr("dtype", "bf16")) not in _PLAIN:
        raise CannotRun(f"{op.name} has quantized operands, which only a recipe makes")
    return found(op, device)


def _gemm(op: Op, device: torch.device) -> tuple[Run, str]:
    if len(op.inputs) != 2:
        raise CannotRun(f"{op.name} with a bias or an activation in it is not known")
    a, b = (make(spec, device) for spec in op.inputs)
    out = make(op.outputs[0], device)
    options = {
        "layout": str(op.attr("layout")).upper(), "out": out, "out_dtype": out.dtype,
        "accumulate": bool(op.attr("accumulate")),
    }  # fmt: skip
    general = _engine(".cpp_extensions").general_gemm
    return lambda: general(a, b, **options), "transformer_engine general_gemm"


def _grouped(op: Op, device: torch.device) -> tuple[Run, str]:
    groups, layout = int(op.attr("groups")), str(op.attr("layout")).upper()
    if len(op.inputs) != 2 * groups:
        raise CannotRun(f"{op.name} with biases or one tensor for all groups is not known")
    made = [make(spec, device) for spec in op.inputs]
    out = [make(spec, device) for spec in op.outputs]
    a, b = made[:groups], made[groups:]
    rows = [o.shape[0] for o in out] if len(out) > 1 else [one.shape[0] for one in b]
    general = _engine(".cpp_extensions").general_grouped_gemm
    options = {
        "layout": layout, "m_splits": rows, "accumulate": bool(op.attr("accumulate")),
        "single_output": len(out) == 1 and groups > 1, "grad": layout != "TN",
    }  # fmt: skip
    none = [None] * groups
    return (
        lambda: general(a, b, out, none, out[0].dtype, **options),
        "transformer_engine general_grouped_gemm",
    )


def _attention(op: Op, device: torch.device) -> tuple[Run, str]:
    attrs = dict(op.attrs)
    backward = attrs["direction"] == "backward"
    dtype, seq, batch = dtype_of(attrs["dtype"]), attrs["seq_q"], attrs["batch"]
    sizes = (
        (seq, batch, attrs["heads"], attrs["dim_qk"]),
        (attrs["seq_kv"], batch, attrs["kv_heads"], attrs["dim_qk"]),
        (attrs["seq_kv"], batch, attrs["kv_heads"], attrs["dim_v"]),
    )
    query, key, value = (
        torch.randn(size, device=device, dtype=dtype).requires_grad_() for size in sizes
    )
    window = tuple(attrs.get("window") or (-1, -1))
    module = _engine().DotProductAttention(
        attrs["heads"], (attrs["dim_qk"], attrs["dim_v"]), num_gqa_groups=attrs["kv_heads"],
        attn_mask_type="causal" if attrs["causal"] else "no_mask", window_size=window,
    )  # fmt: skip

    def forward() -> torch.Tensor:
        with torch.enable_grad():
            return module(query, key, value)

    name = "transformer_engine DotProductAttention"
    if not backward:
        return forward, name
    return _gradients(forward(), [query, key, value]), f"{name}, back"


def _gradients(out: torch.Tensor, leaves: list[torch.Tensor]) -> Run:
    """A backward that can be repeated."""
    gradient = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, gradient, retain_graph=True)


def _norm(op: Op, device: torch.device) -> tuple[Run, str]:
    backward, is_rms = op.name.endswith("_bwd"), "rmsnorm" in op.name
    spec = op.inputs[1 if backward else 0]
    data = make(spec, device).requires_grad_()
    kind = _engine().RMSNorm if is_rms else _engine().LayerNorm
    module = kind(spec.shape[-1], params_dtype=data.dtype, device=device)

    def forward() -> torch.Tensor:
        with torch.enable_grad():
            return module(data)

    name = f"transformer_engine {kind.__name__}"
    if not backward:
        return forward, name
    return _gradients(forward(), [data, *module.parameters()]), f"{name}, back"


def _rope(op: Op, device: torch.device) -> tuple[Run, str]:
    data, angles = (make(spec, device) for spec in op.inputs[:2])
    data.requires_grad_()
    apply = _engine(".attention.rope").apply_rotary_pos_emb

    def forward() -> torch.Tensor:
        with torch.enable_grad():
            return apply(data, angles, tensor_format="sbhd", fused=True)

    name = "transformer_engine apply_rotary_pos_emb"
    if op.name.endswith("_fwd"):
        return forward, name
    return _gradients(forward(), [data]), f"{name}, back"


def _adam(op: Op, device: torch.device) -> tuple[Run, str]:
    """A step whose state is what the optimizer's own first step made."""
    count, rest = divmod(len(op.inputs) - 1, 4)
    if rest or not count:
        raise CannotRun(f"{op.name} has other lists than gradients, parameters and two moments")
    parameters = [torch.nn.Parameter(make(s, device)) for s in op.inputs[1 + count : 1 + 2 * count]]
    for parameter, spec in zip(parameters, op.inputs[1 : 1 + count], strict=True):
        parameter.grad = make(spec, device)
    optimizer = _engine(".optimizers").FusedAdam(parameters, lr=1e-4)
    optimizer.step()
    return optimizer.step, "transformer_engine FusedAdam"


_KERNELS: dict[str, Callable[[Op, torch.device], tuple[Run, str]]] = {
    "gemm": _gemm,
    "grouped_gemm": _grouped,
    "fused_attn_fwd": _attention,
    "fused_attn_bwd": _attention,
    "rmsnorm_fwd": _norm,
    "rmsnorm_bwd": _norm,
    "layernorm_fwd": _norm,
    "layernorm_bwd": _norm,
    "fused_rope_fwd": _rope,
    "fused_rope_bwd": _rope,
    "multi_tensor_adam": _adam,
}

"""Memory-bound operators of torch, called as a training program calls them.

A trace holds shapes, not scalars or strides: a dimension is taken from the shapes, a scalar is any
that costs the same, and tensors are dense.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from primus_ext.observe.microbench.tensors import CannotRun, Run, dtype_of, inputs_of, make
from primus_ext.trace import Op, TensorSpec

aten: Any = torch.ops.aten
_ONE = ("exp", "log", "neg", "abs", "sqrt", "rsqrt", "reciprocal", "sigmoid", "silu", "relu",
        "gelu", "tanh", "sin", "cos", "isnan", "isinf", "logical_not", "bitwise_not", "square",
        "ones_like", "zeros_like", "sign", "log1p", "clone")  # fmt: skip
_TWO = ("add", "sub", "mul", "div", "pow", "lt", "le", "gt", "ge", "eq", "ne", "maximum", "minimum",
        "bitwise_and", "bitwise_or", "logical_and", "logical_or", "floor_divide", "remainder",
        "silu_backward", "gelu_backward", "sigmoid_backward", "tanh_backward")  # fmt: skip
_SCALAR: dict[str, tuple[Any, ...]] = {
    "add": (1,), "sub": (1,), "mul": (2,), "div": (2,), "pow": (2,), "rsub": (1,), "lt": (1,),
    "le": (1,), "gt": (1,), "ge": (1,), "eq": (1,), "ne": (1,), "clamp": (0, 1), "clamp_min": (0,),
    "clamp_max": (1,), "floor_divide": (3,), "remainder": (3,), "bitwise_and": (1,),
    "threshold_backward": (0,), "triu": (1,), "tril": (0,), "cumsum": (0,),
}  # fmt: skip
_REDUCTIONS = ("sum", "mean", "max", "min", "amax", "amin", "any", "all", "argmax")
_FILLS = ("zeros", "ones", "full", "arange", "zero_", "fill_", "new_zeros", "new_ones", "full_like",
          "scalar_tensor", "rand", "randn", "randint")  # fmt: skip


def build(op: Op, device: torch.device) -> tuple[Run, str]:
    """One of torch's operators.

    Raises:
        CannotRun: Nobody taught this module its arguments.
    """
    name = op.name.removeprefix("aten.")
    special = _SPECIAL.get(name)
    if special is not None:
        return special(op, device), op.name
    if name in _FILLS:
        return _fill(op, name, device), op.name
    if name in _REDUCTIONS or name == "linalg_vector_norm":
        return _reduction(op, name, device), op.name
    return _elementwise(op, name, inputs_of(op, device)), op.name


def unknown(op: Op) -> CannotRun:
    """Why an op can't be run."""
    shapes = ", ".join(f"{s.dtype}{list(s.shape)}" for s in op.inputs)
    return CannotRun(f"{op.name}({shapes}) can't be run alone: its arguments are not known")


def _elementwise(op: Op, name: str, inputs: list[torch.Tensor]) -> Run:
    plain = name.rstrip("_")
    if plain not in (*_ONE, *_TWO, *_SCALAR):
        raise unknown(op)
    function = getattr(aten, name)
    count = len(inputs)
    if plain in _ONE and count == 1:
        return lambda: function(inputs[0])
    if plain in _ONE and count == 2:
        return lambda: function.out(inputs[0], out=inputs[1])
    if plain in _TWO and count == 2:
        divisor = inputs[1]
        if plain in ("div", "floor_divide", "remainder") and not divisor.is_floating_point():
            divisor = divisor.abs() + 1
        return lambda: function(inputs[0], divisor)
    if plain in _SCALAR and count == 1:
        return lambda: function(inputs[0], *_SCALAR[plain])
    raise unknown(op)


def _fill(op: Op, name: str, device: torch.device) -> Run:
    spec = op.outputs[0]
    dtype = dtype_of(spec.dtype)
    if name == "arange":
        return lambda: torch.arange(spec.shape[0], dtype=dtype, device=device)
    if name in ("rand", "randn"):
        function = getattr(torch, name)
        return lambda: function(spec.shape, dtype=dtype, device=device)
    if name == "randint":
        return lambda: torch.randint(0, 100, spec.shape, dtype=dtype, device=device)
    if name in ("zero_", "fill_"):
        target = make(spec, device)
        return lambda: target.fill_(0)
    if name in ("zeros", "new_zeros"):
        return lambda: torch.zeros(spec.shape, dtype=dtype, device=device)
    if name in ("ones", "new_ones"):
        return lambda: torch.ones(spec.shape, dtype=dtype, device=device)
    return lambda: torch.full(spec.shape, 1, dtype=dtype, device=device)


def reduced(before: Sequence[int], after: Sequence[int]) -> tuple[list[int], bool] | None:
    """Dimensions that are gone or 1 afterwards, and whether they are kept; None: no reduction."""
    if len(before) == len(after):
        dims = [d for d, (b, a) in enumerate(zip(before, after, strict=True)) if b != a]
        return (dims, True) if all(after[d] == 1 for d in dims) else None
    left, dims = list(after), []
    for dim in reversed(range(len(before))):  # the last ones are kept where several would do
        if left and left[-1] == before[dim]:
            left.pop()
        else:
            dims.append(dim)
    return (sorted(dims), False) if not left else None


def _reduction(op: Op, name: str, device: torch.device) -> Run:
    (data, *others) = inputs_of(op, device)
    found = reduced(data.shape, op.outputs[0].shape)
    if others or found is None:
        raise unknown(op)
    dims, kept = found
    if name == "linalg_vector_norm":
        return lambda: torch.linalg.vector_norm(data, dim=dims or None, keepdim=kept)
    function = getattr(torch, name)
    if len(op.outputs) == 2 or name == "argmax":  # values and where they are: one dimension
        dim = dims[0] if dims else -1
        return lambda: function(data, dim=dim, keepdim=kept)
    if len(dims) == data.dim() and not kept or not dims:
        return lambda: function(data)
    if name in ("max", "min"):
        raise unknown(op)
    return lambda: function(data, dim=dims, keepdim=kept)


def _copied(op: Op, device: torch.device) -> Run:
    source = inputs_of(op, device)[0] if op.inputs else make(op.outputs[0], device)
    target = make(op.outputs[0], device)
    return lambda: target.copy_(source)


def _converted(op: Op, device: torch.device) -> Run:
    (source,), dtype = inputs_of(op, device), dtype_of(op.outputs[0].dtype)
    return lambda: source.to(dtype, copy=True)


def _joined(op: Op, device: torch.device) -> Run:
    parts, whole = [make(spec, device) for spec in op.inputs], op.outputs[0].shape
    if len(whole) > parts[0].dim():
        dim = next((d for d, size in enumerate(whole) if size == len(parts)), 0)
        return lambda: torch.stack(parts, dim)
    for dim in range(len(whole)):
        if sum(part.shape[dim] for part in parts) == whole[dim]:
            return lambda: torch.cat(parts, dim)
    raise unknown(op)


def _indices(spec: TensorSpec, below: int, device: torch.device) -> torch.Tensor:
    return torch.randint(0, max(1, below), spec.shape, device=device, dtype=dtype_of(spec.dtype))


def _embedded(op: Op, device: torch.device) -> Run:
    table = make(op.inputs[0], device)
    rows = _indices(op.inputs[1], table.shape[0], device)
    return lambda: aten.embedding(table, rows)


def _unembedded(op: Op, device: torch.device) -> Run:
    gradient, size = make(op.inputs[0], device), op.outputs[0].shape[0]
    rows = _indices(op.inputs[1], size, device)
    return lambda: aten.embedding_dense_backward(gradient, rows, size, -1, False)


def _places(op: Op, specs: Sequence[TensorSpec], device: torch.device) -> list[torch.Tensor]:
    """Indices into the first input, each along a dimension of its own, or masks."""
    found = []
    for dim, spec in enumerate(specs):
        if spec.dtype == "bool":
            found.append(make(spec, device))
        else:
            found.append(_indices(spec, op.inputs[0].shape[dim], device))
    return found


def _indexed(op: Op, device: torch.device) -> Run:
    data, places = make(op.inputs[0], device), _places(op, op.inputs[1:], device)
    return lambda: aten.index(data, places)


def _put(op: Op, device: torch.device) -> Run:
    data, values = make(op.inputs[0], device), make(op.inputs[-1], device)
    places = _places(op, op.inputs[1:-1], device)
    name = op.name.removeprefix("aten.")
    function = getattr(aten, name)
    return lambda: function(data, places, values)


def _gathered(op: Op, device: torch.device) -> Run:
    name = op.name.removeprefix("aten.")
    data, rows = make(op.inputs[0], device), op.inputs[1]
    if name == "index_select":
        places = _indices(rows, data.shape[0], device)
        return lambda: torch.index_select(data, 0, places)
    dim = next((d for d, (a, b) in enumerate(zip(data.shape, rows.shape, strict=False))
                if a != b), 0)  # fmt: skip
    places = _indices(rows, data.shape[dim], device)
    return lambda: torch.gather(data, dim, places)


def _scattered(op: Op, device: torch.device) -> Run:
    name = op.name.removeprefix("aten.")
    if len(op.inputs) not in (2, 3):
        raise unknown(op)
    data, rows = make(op.inputs[0], device), op.inputs[1]
    values: Any = make(op.inputs[2], device) if len(op.inputs) == 3 else 1
    dim = next((d for d, (a, b) in enumerate(zip(data.shape, rows.shape, strict=False))
                if a != b), 0)  # fmt: skip
    places = _indices(rows, data.shape[dim], device)
    function = getattr(aten, name)
    return lambda: function(data, dim, places, values)


def _index_added(op: Op, device: torch.device) -> Run:
    data, values = make(op.inputs[0], device), make(op.inputs[2], device)
    places = _indices(op.inputs[1], data.shape[0], device)
    function = getattr(aten, op.name.removeprefix("aten."))
    return lambda: function(data, 0, places, values)


def _masked(op: Op, device: torch.device) -> Run:
    data, mask = make(op.inputs[0], device), make(op.inputs[1], device)
    function = getattr(aten, op.name.removeprefix("aten."))
    return lambda: function(data, mask, 0)


def _softmax(op: Op, device: torch.device) -> Run:
    name, inputs = op.name.removeprefix("aten."), inputs_of(op, device)
    if name.endswith("backward_data"):
        function, dtype = getattr(aten, name), inputs[0].dtype
        weights = inputs[1].softmax(-1)
        return lambda: function(inputs[0], weights, -1, dtype)
    function = getattr(aten, name)
    return lambda: function(inputs[0], -1, False)


def _layer_norm(op: Op, device: torch.device) -> Run:
    data, *rest = inputs_of(op, device)
    weight, bias = (*rest, None, None)[:2]
    return lambda: aten.native_layer_norm(data, [data.shape[-1]], weight, bias, 1e-5)


def _layer_norm_backward(op: Op, device: torch.device) -> Run:
    gradient, data, _mean, _rstd, *rest = inputs_of(op, device)
    weight, bias = (*rest, None, None)[:2]
    width = [data.shape[-1]]
    _, mean, rstd = aten.native_layer_norm(data, width, weight, bias, 1e-5)
    needed = [True, weight is not None, bias is not None]
    return lambda: aten.native_layer_norm_backward(
        gradient, data, width, mean, rstd, weight, bias, needed
    )


def _selected(op: Op, device: torch.device) -> Run:
    inputs = inputs_of(op, device)
    if len(inputs) != 3 or inputs[0].dtype is not torch.bool:
        raise unknown(op)
    return lambda: torch.where(*inputs)


def _slice_gradient(op: Op, device: torch.device) -> Run:
    (gradient,), whole = inputs_of(op, device), list(op.outputs[0].shape)
    dims = [d for d, size in enumerate(gradient.shape) if size != whole[d]]
    dim = dims[0] if dims else 0
    end = gradient.shape[dim]
    return lambda: aten.slice_backward(gradient, whole, dim, 0, end, 1)


def _sorted(op: Op, device: torch.device) -> Run:
    (data,) = inputs_of(op, device)
    if op.name == "aten.topk":
        count = op.outputs[0].shape[-1]
        return lambda: torch.topk(data, count, dim=-1)
    return lambda: torch.sort(data, dim=-1)


def _norms(op: Op, device: torch.device) -> Run:
    data = inputs_of(op, device)
    if math.prod(op.outputs[0].shape) != 1:
        raise unknown(op)
    return functools.partial(aten._foreach_norm, data)


_SPECIAL: dict[str, Callable[[Op, torch.device], Run]] = {
    "copy_": _copied, "_to_copy": _converted, "cat": _joined, "stack": _joined,
    "embedding": _embedded, "embedding_dense_backward": _unembedded, "index": _indexed,
    "index_put_": _put, "index_put": _put, "_index_put_impl_": _put, "index_select": _gathered,
    "gather": _gathered, "scatter": _scattered, "scatter_": _scattered, "scatter_add": _scattered,
    "scatter_add_": _scattered, "index_add": _index_added, "index_add_": _index_added,
    "masked_fill": _masked, "masked_fill_": _masked, "_softmax": _softmax, "_log_softmax": _softmax,
    "_softmax_backward_data": _softmax, "_log_softmax_backward_data": _softmax,
    "native_layer_norm": _layer_norm, "native_layer_norm_backward": _layer_norm_backward,
    "where": _selected, "sort": _sorted, "topk": _sorted, "_foreach_norm": _norms,
    "slice_backward": _slice_gradient,
}  # fmt: skip

"""Several tensors in one allocation, and quantization of a tensor's splits into such tensors."""

from __future__ import annotations

import math
from typing import Any

import torch

from primus_ext.emulate.te import cast, nvfp4_kernels, quantizers
from primus_ext.emulate.te.bindings import binding
from primus_ext.emulate.te.ops import define, nothing
from primus_ext.emulate.te.target import target


@binding()
def bulk_allocate(
    shapes: list[Any], dtypes: list[torch.dtype], device: Any = None,
    alignments: list[int] | None = None,
) -> list[torch.Tensor]:
    """Empty tensors that are views of one buffer (freed with the last of them).

    The buffer is as large as the extension's: offsets are aligned, and one alignment is added so
    that the first can be.
    """
    if not shapes:
        return []
    aligns = alignments or [dtype.itemsize for dtype in dtypes]
    sizes = [
        math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    offsets, end = [], 0
    for size, align in zip(sizes, aligns, strict=True):
        offsets.append(-(-end // align) * align)
        end = offsets[-1] + size
    widest = max(aligns)
    base = torch.empty(end + widest if widest > 1 else end, dtype=torch.uint8)
    start = -base.data_ptr() % widest if not _is_fake(base) else 0
    return [
        base[start + offset : start + offset + size].view(dtype).view(tuple(shape))
        for offset, size, dtype, shape in zip(offsets, sizes, dtypes, shapes, strict=True)
    ]


def _is_fake(tensor: torch.Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


_BULK = ("Float8BlockQuantizer", "MXFP8Quantizer", "NVFP4Quantizer")


def _side_fields(quantizer: Any, shape: list[int], columnwise: bool) -> list[tuple[str, Any, Any]]:
    """(attribute, shape, dtype) of the buffers of one copy: data, scales and maximum."""
    side = "columnwise" if columnwise else "rowwise"
    kind = quantizers.kind_of(quantizer)
    rows, cols = math.prod(shape[:-1]), shape[-1]
    data: list[int] = list(shape)
    if kind == "NVFP4Quantizer":
        data = [cols, rows // 2] if columnwise else [*shape[:-1], cols // 2]
    elif columnwise and kind == "Float8BlockQuantizer":
        data = [cols, *shape[:-1]]
    scale_dtype = torch.float32 if kind == "Float8BlockQuantizer" else torch.uint8
    scales = quantizers.scale_shape(quantizer, shape, columnwise)
    fields: list[tuple[str, Any, Any]] = [
        (f"_{side}_data", data, torch.uint8),
        (f"_{side}_scale_inv", scales, scale_dtype),
    ]
    if kind == "NVFP4Quantizer":
        rows_of_amax = rows if quantizer.row_scaled_nvfp4 else 1
        fields.append((f"_amax_{side}", [rows_of_amax], torch.float32))
    return fields


def _fill_side(
    tensors: list[Any], shapes: list[list[int]], qs: list[Any], columnwise: bool
) -> None:
    """Allocate one copy of all tensors together: all data, then all scales, then all maxima."""
    fields = [_side_fields(q, s, columnwise) for q, s in zip(qs, shapes, strict=True)]
    by_field = list(zip(*fields, strict=True))
    flat = [entry for group in by_field for entry in group]
    aligns = [256] * len(tensors) + [16] * (len(flat) - len(tensors))
    buffers = bulk_allocate([f[1] for f in flat], [f[2] for f in flat], None, aligns)
    for index, ((name, _, _), buffer) in enumerate(zip(flat, buffers, strict=True)):
        setattr(tensors[index % len(tensors)], name, buffer)


def _allocate(qs: list[Any], shapes: list[list[int]], dtype: torch.dtype) -> list[Any]:
    """Tensors for all splits in one buffer a copy (storage classes, as the extension makes)."""
    usages = [(q.rowwise_usage, q.columnwise_usage, q.internal) for q in qs]
    shells = []
    for q, shape in zip(qs, shapes, strict=True):
        q.rowwise_usage, q.columnwise_usage, q.internal = False, False, True
        if getattr(q, "row_scaled_nvfp4", False):
            q.rowwise_usage = True
        shells.append(quantizers.create_tensor(q, shape, dtype))
    for q, usage in zip(qs, usages, strict=True):
        q.rowwise_usage, q.columnwise_usage, q.internal = usage
    for shell, q in zip(shells, qs, strict=True):
        shell._quantizer = q.copy()
    for columnwise, used in ((False, usages[0][0]), (True, usages[0][1])):
        if used:
            _fill_side(shells, shapes, qs, columnwise)
    return shells


@define(
    "split_quantize(Tensor x, Tensor[] inputs, Tensor(a!)[] rows, Tensor(b!)[] row_scale_inv, "
    "Tensor(c!)[] cols, Tensor(d!)[] col_scale_inv, *, str format, bool hadamard, "
    "bool stochastic_rounding) -> ()",
    fake=nothing,
)
def _split_quantize(
    x: torch.Tensor, _inputs: Any, rows: Any, row_scale_inv: Any, cols: Any, col_scale_inv: Any, *,
    hadamard: bool, **_attrs: Any,
) -> None:
    sizes = [2 * c.numel() for c in (rows or cols)]
    for i, part in enumerate(x.reshape(-1)[: sum(sizes)].split(sizes)):
        flat = part.reshape(-1, x.shape[-1])
        if not flat.numel():
            continue
        # both maxima are what the kernel before took of the same values
        if rows:
            amax = flat.float().abs().max()
            nvfp4_kernels.store_rows(flat, rows[i], row_scale_inv[i], amax)
        if cols:
            turned = nvfp4_kernels.transform(flat) if hadamard else flat.float().t()
            nvfp4_kernels.store_rows(turned, cols[i], col_scale_inv[i], turned.abs().max())


@define("group_amax(Tensor x, Tensor(a!)[] amax, *, int[] splits, str kind) -> ()", fake=nothing)
def _group_amax(x: torch.Tensor, amax: Any, *, splits: list[int], kind: str) -> None:
    count = len(splits)
    for i, part in enumerate(x[: sum(splits)].split(splits)):
        if part.numel():  # all maxima of the copies for rows, then those for columns
            nvfp4_kernels.take_maxima(part, amax[i::count], hadamard=kind == "hadamard")


def _present(tensors: list[Any], name: str) -> list[torch.Tensor]:
    return [t for t in (getattr(tensor, name) for tensor in tensors) if t is not None]


def _nvfp4_together(
    x: torch.Tensor, parts: list[torch.Tensor], outs: list[Any], q: Any, splits: list[int]
) -> bool:
    """Maxima of all splits in one kernel, then the casts; False where nothing is fused."""
    if q.row_scaled_nvfp4 or x.shape[-1] % 128:
        return False
    if q.with_rht and not 100 <= target().sm_arch <= 110:
        return False
    rows, cols = _present(outs, "_amax_rowwise"), _present(outs, "_amax_columnwise")
    if not q.with_rht:
        _group_amax(x, rows or cols, splits=splits, kind="plain")
        for part, out in zip(parts, outs, strict=True):
            if part.numel():
                cast.quantize_into(part, out, q, amax=out._amax_rowwise)
        return True
    _group_amax(x, rows + cols, splits=splits, kind="hadamard")
    lists = [_present(outs, f"_{side}_{field}") for side in ("rowwise", "columnwise")
             for field in ("data", "scale_inv")]  # fmt: skip
    fused = all(size % 128 == 0 for size in splits)
    halves = [lists] if fused else [[*lists[:2], [], []], [[], [], *lists[2:]]]
    for row, row_scale, col, col_scale in halves:
        if row or col:
            _split_quantize(
                x, [], row, row_scale, col, col_scale, format="fp4_e2m1/nvfp4",
                hadamard=bool(col), stochastic_rounding=q.stochastic_rounding,
            )  # fmt: skip
    return True


@binding()
def split_quantize(
    tensor: torch.Tensor, split_sections: list[int], quantizer_list: list[Any],
    disable_bulk_allocation: bool = False,
) -> list[Any]:
    """Split along the first dimension and quantize each split."""
    x = tensor.contiguous()
    splits = [int(size) for size in split_sections]
    if not splits:
        return []
    parts = list(x.split([*splits, x.shape[0] - sum(splits)]))[: len(splits)]
    shapes = [list(part.shape) for part in parts]
    kinds = {quantizers.kind_of(q) for q in quantizer_list}
    bulk = not disable_bulk_allocation and len(kinds) == 1 and kinds <= set(_BULK)
    if bulk:
        outs = _allocate(quantizer_list, shapes, x.dtype)
        first = quantizer_list[0]
        if kinds == {"NVFP4Quantizer"} and _nvfp4_together(x, parts, outs, first, splits):
            return outs
    else:
        outs = [
            quantizers.create_tensor(q, shape, x.dtype)
            for q, shape in zip(quantizer_list, shapes, strict=True)
        ]
    _quantize_each(parts, outs, quantizer_list)
    return outs


@define(
    "multi_cast_transpose(Tensor[] inputs, Tensor(a!)[] rows, Tensor(b!)[] cols, "
    "Tensor(c!)[] scale_inv, Tensor[] scale, Tensor(d!)[] amax, *, str format) -> ()",
    fake=nothing,
)
def _multi_cast_transpose(
    inputs: Any, rows: Any, cols: Any, scale_inv: Any, scale: Any, amax: Any, *, format: str
) -> None:
    from primus_ext.emulate.te import cast_kernels

    for x, row, col, inverse, s, a in zip(inputs, rows, cols, scale_inv, scale, amax, strict=True):
        cast_kernels.store(x, row, inverse, col, None, s, a, format=format)


def _quantize_each(parts: list[torch.Tensor], outs: list[Any], qs: list[Any]) -> None:
    """One kernel for delayed scaling with both copies, else one quantization a tensor."""
    fused = all(
        quantizers.kind_of(q) == "Float8Quantizer" and o._data is not None
        and o._transpose is not None
        for q, o in zip(qs, outs, strict=True)
    )  # fmt: skip
    if not fused:
        for part, out, q in zip(parts, outs, qs, strict=True):
            cast.quantize_into(part, out, q)
        return
    sinks = [cast.sink_of(o, q, q.scale, q.amax) for o, q in zip(outs, qs, strict=True)]
    row, scale_inv, col, _, scale, amax = zip(*(s.tensors for s in sinks), strict=True)
    _multi_cast_transpose(
        parts, list(row), list(col), list(scale_inv), list(scale), list(amax),
        format=sinks[0].format,
    )  # fmt: skip


@binding()
def multi_tensor_quantize(tensor_list: list[torch.Tensor], quantizer_list: list[Any]) -> list[Any]:
    """Quantize each tensor with its quantizer."""
    outs = [
        quantizers.create_tensor(q, list(x.shape), x.dtype)
        for x, q in zip(tensor_list, quantizer_list, strict=True)
    ]
    _quantize_each(tensor_list, outs, quantizer_list)
    return outs

"""Matrix products, dense, batched and grouped."""

from __future__ import annotations

from typing import Any

import torch

from primus_ext.observe.microbench.tensors import CannotRun, Run, dtype_of, random
from primus_ext.trace import Op

_PLAIN = ("fp32", "bf16", "fp16", "fp64")


def dense(op: Op, device: torch.device) -> tuple[Run, str]:
    """A product of torch on operands as they lie in memory in this layout.

    Raises:
        CannotRun: torch has none of this kind.
    """
    attrs = dict(op.attrs)
    dtype = _checked(op, attrs)
    a, b = operands(attrs, dtype, device)
    shape = (*a.shape[:-1], b.shape[-1])
    out = random(shape, dtype, device)
    if op.name == "aten.addmm":
        bias = random((attrs["n"],), dtype, device)
        return lambda: torch.addmm(bias, a, b), "torch.addmm"
    if not attrs.get("accumulate"):
        return lambda: torch.matmul(a, b, out=out), "torch.matmul"
    if a.dim() == 3:
        return lambda: torch.baddbmm(out, a, b, out=out), "torch.baddbmm"
    return lambda: torch.addmm(out, a, b, out=out), "torch.addmm"


def operands(
    attrs: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[m, k]`` and ``[k, n]`` (with ``batch`` before), transposed in memory as ``layout`` says.

    tn: the second one is; nn: none; nt: the first one; tt: both.
    """
    m, n, k, layout = (attrs[name] for name in ("m", "n", "k", "layout"))
    batch = int(attrs.get("batch", 1))
    lead = (batch,) if batch > 1 else ()
    first = layout in ("nt", "tt")
    second = layout in ("tn", "tt")
    a = random((*lead, k, m) if first else (*lead, m, k), dtype, device)
    b = random((*lead, n, k) if second else (*lead, k, n), dtype, device)
    return (a.transpose(-1, -2) if first else a), (b.transpose(-1, -2) if second else b)


def grouped(op: Op, device: torch.device) -> tuple[Run, str]:
    """Products of groups one after another, each with its own rows.

    That is how a program without a grouped kernel runs them.

    Raises:
        CannotRun: torch has none of this kind.
    """
    attrs = dict(op.attrs)
    dtype = _checked(op, attrs)
    gradient = attrs["layout"] == "nt"  # its groups differ in the contraction
    groups = int(attrs["groups"])
    each = attrs.get("rows") or (
        [attrs["k"]] * groups if gradient else _even(int(attrs["m"]), groups)
    )
    parts = []
    for rows in each:
        own = {**attrs, "batch": 1, "k" if gradient else "m": rows}
        a, b = operands(own, dtype, device)
        parts.append((a, b, random((a.shape[0], b.shape[1]), dtype, device)))
    if attrs.get("accumulate"):
        return lambda: [torch.addmm(o, a, b, out=o) for a, b, o in parts], "torch.addmm x groups"
    return lambda: [torch.matmul(a, b, out=o) for a, b, o in parts], "torch.matmul x groups"


def _even(total: int, parts: int) -> list[int]:
    return [total // parts + (i < total % parts) for i in range(parts)]


def _checked(op: Op, attrs: dict[str, Any]) -> torch.dtype:
    if attrs["dtype"] not in _PLAIN:
        raise CannotRun(
            f"{op.name} computes in {attrs['dtype']}, which needs Transformer Engine's kernels"
        )
    if attrs.get("out_dtype", attrs["dtype"]) != attrs["dtype"]:
        raise CannotRun(
            f"{op.name} writes {attrs['out_dtype']} from {attrs['dtype']} in one kernel, which "
            "needs Transformer Engine or apex"
        )
    return dtype_of(attrs["dtype"])

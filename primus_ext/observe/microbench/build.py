"""From an op of a trace to a call that does its work on a device."""

from __future__ import annotations

import torch

from primus_ext.observe.microbench import attention, pointwise, products, substitutes, te_kernels
from primus_ext.observe.microbench.tensors import CannotRun, Run
from primus_ext.trace import Family, Op

_RUNNABLE = (Family.GEMM, Family.GROUPED_GEMM, Family.ATTENTION, Family.MEMORY, Family.QUANTIZE)


def build(op: Op, device: torch.device) -> tuple[Run, str]:
    """Make an op's operands and what runs it.

    Args:
        op: As a trace holds it.
        device: Where.

    Returns:
        One execution, and the name of what is called.

    Raises:
        CannotRun: It is no work of one device, or nothing here runs it.
    """
    if op.family not in _RUNNABLE or op.collective is not None:
        raise CannotRun(f"{op.name} of family {op.family} is not one device's work")
    if op.name.startswith("primus_te.") and device.type == "cuda" and te_kernels.installed():
        return te_kernels.build(op, device)
    if op.family is Family.GEMM:
        return products.dense(op, device)
    if op.family is Family.GROUPED_GEMM:
        return products.grouped(op, device)
    if op.family is Family.ATTENTION:
        return attention.fused(op, device)
    if op.name.startswith("aten."):
        return pointwise.build(op, device)
    return substitutes.build(op, device)

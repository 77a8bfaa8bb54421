"""Kernels whose time is that of their memory traffic."""

from __future__ import annotations

from primus_ext.cluster import Accelerator
from primus_ext.cost.priced import MODEL, Priced
from primus_ext.trace import Family, Op

_KINDS = (("cross_entropy", "cross_entropy"), ("permute", "permute"), ("norm_", "norm"),
          ("rope", "rope"))  # fmt: skip
"""Part of a kernel's name, kind of kernel.  ``norm_`` is ``rmsnorm_fwd`` and the like, and not the
``l2norm`` of an optimizer, which streams."""


def traffic_seconds(accelerator: Accelerator, size: int) -> float:
    """Seconds to move ``size`` bytes to or from device memory at the rate of a stream copy."""
    return size / (accelerator.hbm_bandwidth.value * accelerator.hbm_efficiency.value)


def kind_of(op: Op) -> str:
    """What decides the share of the bandwidth: ``norm``, ``rope``, ...; ``stream`` if nothing."""
    if op.family is Family.QUANTIZE:
        return "quantize"
    return next((kind for part, kind in _KINDS if part in op.name), "stream")


def price(accelerator: Accelerator, op: Op) -> Priced:
    """Norms, activations, copies, casts, optimizers: every byte once, and a launch."""
    share = accelerator.memory_efficiency.get(kind_of(op), accelerator.hbm_efficiency)
    memory = op.bytes / (accelerator.hbm_bandwidth.value * share.value)
    launch = accelerator.kernel_launch_s.value
    return Priced(memory + launch, MODEL, {"memory": memory, "launch": launch})

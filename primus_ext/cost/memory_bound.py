"""Kernels whose time is that of their memory traffic."""

from __future__ import annotations

from primus_ext.cluster import Accelerator
from primus_ext.cost.priced import MODEL, Priced
from primus_ext.trace import Op


def traffic_seconds(accelerator: Accelerator, size: int) -> float:
    """Seconds to move ``size`` bytes to or from device memory at the rate of a stream copy."""
    return size / (accelerator.hbm_bandwidth.value * accelerator.hbm_efficiency.value)


def price(accelerator: Accelerator, op: Op) -> Priced:
    """Norms, activations, copies, casts, quantisation: every byte once, and the launch."""
    memory = traffic_seconds(accelerator, op.bytes)
    launch = accelerator.kernel_launch_s.value
    return Priced(memory + launch, MODEL, {"memory": memory, "launch": launch})

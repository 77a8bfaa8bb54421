"""When the host is the slower of the two: kernels are issued one by one, by Python.

The host runs ahead of the device as long as issuing a kernel takes less time than running it.  A
layer whose kernels are short lasts as long as the host needs for it: its calls, ``host_call_s`` of
``Accelerator.sustained`` each.  ``CUDA_LAUNCH_BLOCKING`` makes the host wait for every kernel, so
that both times add up; what a CUDA graph holds is issued by one call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from primus_ext.cluster import Accelerator
from primus_ext.cost.sustained import HOST
from primus_ext.plan import Plan
from primus_ext.trace import LAYERS, Call, Family, Op, ScopeKind, Segment

_MODULES = {
    "attn": ("input_layernorm", "self_attention"),
    "mlp": ("pre_mlp_layernorm", "mlp"),
    "moe": ("pre_mlp_layernorm", "mlp"),
    "moe_router": ("pre_mlp_layernorm", "mlp.router", "mlp.shared_experts"),
    "mamba": ("mixer", "norm"),
}
"""Parts of a layer that ``cuda_graph_modules`` names, and the modules that a trace names
(``megatron/core/transformer/cuda_graphs.py``)."""
_BLOCKING = ("CUDA_LAUNCH_BLOCKING", "HIP_LAUNCH_BLOCKING")


def graph_modules(plan: Plan) -> tuple[str, ...]:
    """Parts that are captured in CUDA graphs, as the framework names them; empty without graphs."""
    implementation = str(plan.flags.get("cuda_graph_impl") or "none")
    if implementation == "none":
        return ()
    if implementation == "full_iteration":
        return ("full_iteration",)
    told = str(plan.flags.get("cuda_graph_modules") or "full")
    return tuple(told.split(","))


@dataclasses.dataclass(frozen=True, slots=True)
class HostTime:
    """What the host adds to the time of a device."""

    call_s: float
    launch_s: float
    """Of a further kernel in one call of a library."""
    blocking: bool = False
    graphs: tuple[str, ...] = ()

    @classmethod
    def of(cls, plan: Plan, accelerator: Accelerator) -> HostTime:
        """For a job on an accelerator."""
        return cls(
            call_s=accelerator.sustained[HOST].value,
            launch_s=accelerator.kernel_launch_s.value,
            blocking=any(str(plan.flags.get(name, "0")) not in ("", "0") for name in _BLOCKING),
            graphs=graph_modules(plan),
        )

    def seconds(self, ops: Sequence[Op], calls: Sequence[Call]) -> float:
        """Of issuing calls one by one.  A run of one op is a library's loop over its kernels."""
        issued = further = 0
        last = -1
        for call in calls:
            if ops[call.op].family is Family.HOST:
                continue
            if call.op == last:
                further += 1
            else:
                issued += 1
            last = call.op
        return issued * self.call_s + further * self.launch_s

    def captured(self, segment: Segment) -> float:
        """Share of a segment's calls that graphs hold; a backward's is that of its forward."""
        if not self.graphs:
            return 0.0
        if "full_iteration" in self.graphs:
            return 1.0
        if segment.kind not in (*LAYERS, ScopeKind.MTP_LAYER):
            return 0.0
        if "full" in self.graphs:
            return 1.0
        names = tuple(name for part in self.graphs for name in _MODULES.get(part, ()))
        held = sum(call.module.startswith(names) for call in segment.forward) if names else 0
        return held / max(1, len(segment.forward))

    def waits(self, device_s: float, host_s: float) -> float:
        """Seconds that the device waits in work of ``device_s`` which takes the host ``host_s``."""
        return host_s if self.blocking else max(0.0, host_s - device_s)

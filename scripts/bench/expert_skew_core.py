"""One core of this machine as a target: what its rates, measured in a run, say of a step.

Products take the time of their work, everything else that of its memory traffic, and every call
the time that issuing it takes, since what issues the work is what does it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from primus_ext.cluster import Cluster
from primus_ext.cluster_data import load_cluster
from primus_ext.cost import sustained
from primus_ext.cost.conditions import Conditions
from primus_ext.cost.model import CostModel
from primus_ext.cost.priced import FREE, MODEL, CostError, Priced
from primus_ext.plan import Plan
from primus_ext.project import compose
from primus_ext.project.kept import Kept
from primus_ext.project.result import Projection
from primus_ext.trace import Family, Op, RankTrace

_ISSUED = (Family.GEMM, Family.MEMORY, Family.QUANTIZE)
"""What a program of Megatron's own layers computes with; the last is a scaling of gradients."""


class Core(CostModel):
    """Prices of a core, which has no tiles of 64 rows to fill and no wave to wait for."""

    def __init__(self, cluster: Cluster, conditions: Conditions, call_s: float) -> None:
        """``call_s``: seconds of a call beside its work."""
        super().__init__(cluster, conditions=conditions)
        self._call_s = call_s

    def op_seconds(self, op: Op) -> Priced:
        """The work or the traffic, and the call.

        Raises:
            CostError: The op is neither a product nor traffic.
        """
        if op.family is Family.HOST:
            return FREE
        if op.family not in _ISSUED:
            raise CostError(f"op {op.name} of family {op.family} has no price on a core")
        gemm = op.family is Family.GEMM
        rate = self.cluster.accelerator.peak_flops["fp32"].value
        work = op.flops / rate if gemm else super().op_seconds(op).seconds
        return Priced(self._call_s + work, MODEL, {})


def cluster_of(folder: Path, rates: Mapping[str, float], cores: int) -> Cluster:
    """Cores with these rates.

    Args:
        folder: Where their file is written.
        rates: ``flops``, ``stream`` and ``exchange``, FLOP/s and bytes/s.
        cores: How many.
    """

    def stated(value: float) -> dict[str, Any]:
        return {"value": value, "source": "measured between the steps of the run"}

    content = {
        "name": "core", "vendor": "nvidia", "arch": "cpu", "compute_capability": [8, 0],
        "multi_processors": 1, "scale_up_topology": "switch", "scale_up_gpus": cores,
        "peak_flops": {name: stated(rates["flops"]) for name in ("fp32", "tf32", "bf16")},
        "hbm_bytes": stated(64e9), "hbm_bandwidth": stated(rates["stream"]),
        "hbm_efficiency": stated(1.0), "scale_up_bandwidth": stated(rates["exchange"]),
        "network": {"nic_bandwidth": stated(rates["exchange"])},
        "kernel_launch_s": {"value": 0.0, "source": "in the time of a call"},
        "sustained": {
            **{name: {"value": 1.0, "source": "measured in training"} for name in sustained.KINDS},
            "host_call_s": {"value": 0.0, "source": "in the time of a call"},
        },
    }  # fmt: skip
    path = folder / "core.yaml"
    path.write_text(yaml.safe_dump(content))
    return load_cluster(str(path), 1, cores)


def calls(plan: Plan, trace: RankTrace) -> int:
    """Calls of one step that :class:`Core` has a price for."""
    of_microbatch = [
        (call, segment.count) for chunk in trace.chunks for segment in chunk.segments
        for call in (*segment.forward, *segment.backward)
    ]  # fmt: skip
    everything = [(call, count * plan.batch.num_microbatches) for call, count in of_microbatch]
    everything += [(call, 1) for call in trace.step]
    return sum(count for call, count in everything if trace.ops[call.op].family in _ISSUED)


def project(
    plan: Plan, traces: Sequence[RankTrace], cluster: Cluster, call_s: float
) -> Projection:
    """A step on cores.

    Args:
        plan: The job.
        traces: Of its ranks.
        cluster: The cores.
        call_s: Seconds of a call beside its work.
    """
    conditions = Conditions.of(plan, cluster.accelerator)
    kept = Kept(cluster, conditions=conditions)
    kept.cost = Core(cluster, conditions, call_s)
    return compose.project(plan, traces, cluster, mode="simulate", kept=kept)


def alone(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """The traces of ranks that wait for no other one's experts."""
    return [dataclasses.replace(trace, experts=None) for trace in traces]


def computing(found: Projection) -> float:
    """Seconds of a step but for communication."""
    return sum(t.exposed_seconds for t in found.breakdown if "communication" not in t.term)

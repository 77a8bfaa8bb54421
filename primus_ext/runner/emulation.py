"""The question to the child about a target, and the projection from its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from primus_ext import trace_io
from primus_ext.cluster import Cluster
from primus_ext.cluster_data import load_cluster
from primus_ext.plan import ProgramRef
from primus_ext.project import compose
from primus_ext.project.result import Projection

__all__ = ["load_cluster", "priced", "question"]

FRAMEWORKS = ("primus_ext.frameworks.megatron.entry",)
"""Modules that hook a framework's training entry point in the child."""
_WARP_SIZE = {"nvidia": 32, "amd": 64}  # CUDA C++ programming guide; AMD CDNA3 ISA reference


def question(cluster: Cluster) -> dict[str, Any]:
    """What the bootstrap must know of a target; see :mod:`primus_ext.emulate.bootstrap`."""
    accelerator = cluster.accelerator
    return {
        "world_size": cluster.world_size,
        "gpus_per_node": cluster.gpus_per_node,
        "frameworks": list(FRAMEWORKS),
        "formats": list(accelerator.peak_flops),
        "device": {
            "name": accelerator.name,
            "compute_capability": list(accelerator.compute_capability),
            "total_memory": int(accelerator.hbm_bytes.value),
            "multi_processor_count": accelerator.multi_processors,
            "warp_size": _WARP_SIZE[accelerator.vendor],
        },
    }


def priced(
    answer: Mapping[str, Any], mode: str, cluster: Cluster, notes: Sequence[str]
) -> Projection:
    """The projection of what the child traced.

    Raises:
        ValueError: the target can't run it (a precision it lacks).
    """
    program = answer["program"]
    if program is not None:
        program = ProgramRef(**{**program, "argv": tuple(program["argv"])})
    return compose.project(
        trace_io.plan_from_plain(answer["plan"]),
        trace_io.traces_from_plain(answer["traces"]),
        cluster,
        mode=mode,
        program=program,
        warnings=[*notes, *answer["warnings"]],
    )

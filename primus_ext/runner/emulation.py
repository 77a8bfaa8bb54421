"""The question to the child about a target, and the projection from its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from primus_ext import trace_io
from primus_ext.cluster import Cluster
from primus_ext.cluster_data import load_cluster
from primus_ext.cost.measured_collectives import MeasuredCollectives
from primus_ext.plan import Plan, ProgramRef
from primus_ext.project import compose
from primus_ext.project.observed import Measured
from primus_ext.project.rescheduled import StepTimeline
from primus_ext.project.result import Projection
from primus_ext.trace import RankTrace

__all__ = ["load_cluster", "priced_and_drawn", "question"]

FRAMEWORKS = ("primus_ext.frameworks.megatron.entry",)
"""Modules that hook a framework's training entry point in the child."""
_WARP_SIZE = {"nvidia": 32, "amd": 64, "cpu": 32}
"""CUDA C++ programming guide; AMD CDNA3 ISA reference; as the CPU's stand-in for ``torch.cuda``."""


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


def priced_and_drawn(
    answer: Mapping[str, Any], mode: str, cluster: Cluster, notes: Sequence[str],
    schedule: str | None = None, measured: Measured | None = None,
    collectives: MeasuredCollectives | None = None,
) -> tuple[Projection, StepTimeline]:  # fmt: skip
    """The projection of what the child traced, and when every pipeline rank does what.

    Args:
        answer: Of the child.
        mode: As :func:`primus_ext.project.compose.project`.
        cluster: The target.
        notes: What the report must say.
        schedule: As there.
        measured: As there.
        collectives: As there.

    Raises:
        ValueError: the target can't run it, or not under that schedule.
    """
    return compose.project_and_draw(
        *_traced(answer), cluster, mode=mode, schedule=schedule, measured=measured,
        collectives=collectives, **_said(answer, notes)
    )


def _traced(answer: Mapping[str, Any]) -> tuple[Plan, Sequence[RankTrace]]:
    plan = trace_io.plan_from_plain(answer["plan"])
    return plan, trace_io.traces_from_plain(answer["traces"])


def _said(answer: Mapping[str, Any], notes: Sequence[str]) -> dict[str, Any]:
    """The program that was traced, and what the report must say."""
    program = answer["program"]
    if program is not None:
        program = ProgramRef(**{**program, "argv": tuple(program["argv"])})
    return {"program": program, "warnings": [*notes, *answer["warnings"]]}

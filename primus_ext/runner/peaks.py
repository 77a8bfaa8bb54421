"""Published peak memory in the unit it was published in, beside the projected figure like it.

Four units are in use and are not interchangeable: what torch allocated, what torch reserved, what
the whole device held (nvidia-smi), and the latter as a share of the HBM.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from primus_ext.project.result import Memory, RoleMemory

ALLOCATED, RESERVED, DEVICE = "torch allocated", "torch reserved", "device"
_GIB = 2**30
# Words of ``measured.memory_kind`` in a runs file, and the unit they mean.
_WORDS = (
    ("max_memory_allocated", ALLOCATED),
    ("mem-max-allocated", ALLOCATED),
    ("torch reserved", RESERVED),
    ("nvidia-smi", DEVICE),
)


def published(run: Mapping[str, Any]) -> dict[str, float]:
    """Peak memory that a run states, bytes, by unit; empty where it states none that is known.

    ``peak_memory_gb`` is in GiB in every source so far: nvidia-smi counts in MiB, torch's figures
    are divided by 2**30, and 288 GB of HBM are 288 GiB.
    """
    measured = run.get("measured") or {}
    stated = str(measured.get("memory_kind") or "")
    found = {}
    if "percent of" in stated and measured.get("memory_pct") is not None:
        capacity = run["hardware"]["memory_gb_per_gpu"] * _GIB
        found[DEVICE] = measured["memory_pct"] / 100 * capacity
    else:
        unit = next((unit for words, unit in _WORDS if words in stated), None)
        if unit is not None:
            found[unit] = measured["peak_memory_gb"] * _GIB
    if measured.get("peak_reserved_gb") is not None:
        found[RESERVED] = measured["peak_reserved_gb"] * _GIB
    return found


def projected(memory: Memory) -> dict[str, int]:
    """The same figures of a projection, bytes; each of its heaviest pipeline rank."""
    return {
        ALLOCATED: max(_allocated(role) for role in memory.per_role),
        RESERVED: max(
            role.reserved_bytes - sum(role.outside.values()) for role in memory.per_role
        ),
        DEVICE: max(role.reserved_bytes for role in memory.per_role),
    }


def _allocated(role: RoleMemory) -> int:
    """Torch's figure; tensors and library workspaces, unrounded, where it was not replayed."""
    if role.allocated_bytes is None:
        return role.peak_bytes + role.library_bytes
    return role.allocated_bytes


def beside(
    run: Mapping[str, Any], predicted: Mapping[str, int]
) -> dict[str, dict[str, float]]:
    """By unit, ``measured`` and ``predicted`` bytes of every peak that a run states."""
    return {
        unit: {"measured": size, "predicted": float(predicted[unit])}
        for unit, size in published(run).items()
    }


def errors(rows: Iterable[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """By unit: rows, mean absolute error, bias and worst error, percent of the measured peak.

    Args:
        rows: Of each row, by unit, ``measured`` and ``predicted`` bytes.
    """
    found: dict[str, list[float]] = {}
    for row in rows:
        for unit, peak in row.items():
            error = (peak["predicted"] / peak["measured"] - 1) * 100
            found.setdefault(unit, []).append(error)
    return {
        unit: {
            "rows": len(values),
            "mean": sum(abs(v) for v in values) / len(values),
            "bias": sum(values) / len(values),
            "worst": max(values, key=abs),
        }
        for unit, values in found.items()
    }

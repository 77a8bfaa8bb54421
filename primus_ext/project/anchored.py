"""Memory that a measured rank took beyond its projection, as the reserve of the target's ranks.

What the virtual accelerator does not see (workspaces of kernels that only the real library knows,
another release's caches) shows as a difference between the device's own counters and the replay of
the traced allocations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from primus_ext.project.observed import Measured
from primus_ext.project.result import RoleMemory
from primus_ext.trace import RankTrace


def roles(
    found: Sequence[RoleMemory], stages: Sequence[RankTrace], measured: Measured | None
) -> tuple[tuple[RoleMemory, ...], list[str]]:
    """Roles with what their measured ranks took more, and a sentence about each that did.

    Args:
        found: Memory of every role, projected.
        stages: Trace of every pipeline rank.
        measured: What was measured; None, or without counters of a device: nothing changes.
    """
    if measured is None:
        return tuple(found), []
    by_rank = {trace.rank: trace for trace in stages}
    result, notes = [], []
    for role in found:
        trace = by_rank.get(role.example_rank)
        one = measured.rank(trace) if trace is not None else None
        if one is None or one.allocated_bytes is None or role.allocated_bytes is None:
            result.append(role)
            continue
        extra = one.allocated_bytes - role.allocated_bytes
        if extra > 0:
            notes.append(
                f"{role.role}: {one.allocated_bytes:,} bytes were allocated when it was measured "
                f"where {role.allocated_bytes:,} are projected; the difference counts as reserve"
            )
        result.append(_with_reserve(role, max(0, extra), one.reserved_bytes or 0))
    return tuple(result), notes


def _with_reserve(role: RoleMemory, extra: int, reserved: int) -> RoleMemory:
    """A role whose peak is ``extra`` bytes higher, and that reserves at least what was seen."""
    allocator = role.allocator_bytes
    grown = extra if allocator is None else max(extra, reserved - allocator, 0)
    return dataclasses.replace(
        role,
        peak_bytes=role.peak_bytes + extra,
        parts=dataclasses.replace(role.parts, reserve=role.parts.reserve + extra),
        reserved_bytes=role.reserved_bytes + grown,
        allocated_bytes=None if role.allocated_bytes is None else role.allocated_bytes + extra,
        allocator_bytes=None if allocator is None else allocator + grown,
    )

"""What this machine has for a process: cores and memory, limits of its control group counted."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

NAME = "cpu"
"""Accelerator, and device of a request, that is this machine's own processors."""
GROUP = Path("/sys/fs/cgroup")
"""Where Linux shows the limits of a container's control group (version 2)."""


def cores(group: Path = GROUP) -> int:
    """Cores that processes may use at once: those of the affinity mask, and no more than the quota.

    Args:
        group: Folder of the control group; one that is not there has no limits.
    """
    try:
        found = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        found = os.cpu_count() or 1
    quota, _, period = _text(group / "cpu.max").partition(" ")
    if quota.isdecimal() and period.isdecimal():
        found = min(found, -(-int(quota) // int(period)))
    return max(1, found)


def memory(group: Path = GROUP) -> int:
    """Bytes that all processes together may use."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _text(group / "memory.max")
    return min(found, int(limit)) if limit.isdecimal() else found


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


FIGURES: Mapping[str, tuple[Callable[[], int], str]] = {
    "cores": (cores, "this machine: cores that its processes may use"),
    "memory": (memory, "this machine: memory that its processes may use"),
}
"""What an accelerator file may take from the machine at hand, and what its source then says."""

"""What the device's allocator says of the memory of steps that ran."""

from __future__ import annotations

import torch


def reset() -> None:
    """Forget earlier peaks."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def highest() -> dict[str, int]:
    """``allocated_bytes`` and ``reserved_bytes`` since :func:`reset`; empty without a GPU."""
    if not torch.cuda.is_available():
        return {}
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }

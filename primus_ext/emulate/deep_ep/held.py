"""Device memory that the buffers hold outside torch's allocator."""

from __future__ import annotations

import weakref

_buffers: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()


def hold(buffer: object, size: int) -> None:
    """Note that ``buffer`` holds ``size`` bytes for as long as it lives."""
    _buffers[buffer] = size


def held_bytes() -> int:
    """Bytes of all buffers that are alive."""
    return sum(_buffers.values())

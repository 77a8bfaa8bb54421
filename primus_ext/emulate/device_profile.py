"""The one virtual device of this process: what ``torch.cuda`` says about it."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceProfile:
    """What ``torch.cuda`` says about the device."""

    name: str
    compute_capability: tuple[int, int]
    """As ``torch.cuda.get_device_capability`` returns it; frameworks decide by it."""
    total_memory: int
    """Bytes."""
    multi_processor_count: int
    """SMs or CUs."""
    device_count: int
    """Devices that a process sees (of one node)."""
    warp_size: int = 32
    """Threads that run in lockstep: 32 on NVIDIA, 64 on AMD Instinct."""


_device: DeviceProfile | None = None


def installed_device() -> DeviceProfile | None:
    """The virtual device of this process, None where none is installed."""
    return _device


def require_device() -> DeviceProfile:
    """The virtual device of this process.

    Raises:
        RuntimeError: None is installed.
    """
    if _device is None:
        raise RuntimeError("no virtual device is installed")
    return _device


def set_device(device: DeviceProfile) -> None:
    """Make ``device`` the one of this process."""
    global _device
    _device = device

"""A rank whose allocator would like more than the device has: does it run all the same?"""

from __future__ import annotations

import dataclasses

from primus_ext.project.allocator import OutOfMemoryError
from primus_ext.project.footprint import Device, Replayed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Squeezed:
    """What happens within a capacity."""

    retries: int
    """How often unused segments are given back to the device in a later step; each time the
    device is waited for."""
    refused: int
    """Bytes of the request for which there is no room; 0 where all are served."""
    reserved_bytes: int


def squeeze(of: Replayed, room: int) -> Squeezed:
    """Replay a rank on a device that leaves ``room`` bytes to the allocator."""
    replay = of.replay()
    device = Device(replay, of.config, room)
    before = 0
    try:
        device.run([replay.setup()])
        for number in range(of.steps):
            before = device.allocator.retries
            device.run(list(replay.step(first=number == 0)))
    except OutOfMemoryError as error:
        return Squeezed(
            retries=device.allocator.retries, refused=error.requested,
            reserved_bytes=device.allocator.peak_reserved,
        )  # fmt: skip
    return Squeezed(
        retries=device.allocator.retries - before, refused=0,
        reserved_bytes=device.allocator.peak_reserved,
    )  # fmt: skip


def sentence(of: Replayed, room: int) -> str:
    """What a person should know of it; arguments as :func:`squeeze`."""
    found = squeeze(of, room)
    mib = 2**20
    if found.refused:
        text = (
            f"fragments of segments leave no room for a request of {found.refused / mib:,.0f} MiB"
        )
    elif found.retries:
        text = (
            "it runs if the allocator gives unused segments back, "
            f"{found.retries} time{'s' if found.retries > 1 else ''} a step"
        )
    else:
        text = "it runs once the allocator has given unused segments back"
    if of.config.expandable_segments:
        return text
    other = dataclasses.replace(of.config, expandable_segments=True)
    if squeeze(dataclasses.replace(of, config=other), room).refused:
        return f"{text}; expandable_segments:True does not help"
    return f"{text}; with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True it fits"

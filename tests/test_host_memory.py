"""What a recorder tells apart: tensors in device and in host memory, and copies between them."""

from __future__ import annotations

import torch

from primus_ext.observe import host_memory
from primus_ext.observe.recorder import Recorder
from primus_ext.trace import Family, Op


def recorded(recorder: Recorder, calls: list) -> list[Op]:
    return [recorder.ops[call.op] for _, _, call in calls]


def test_host_tensors_are_counted_apart_and_only_while_they_live() -> None:
    with Recorder({}) as recorder:
        device = torch.empty(256, dtype=torch.float32)
        with host_memory.placed(on_host=True):
            backup = torch.empty(256, dtype=torch.float32)
        assert (recorder.memory.live, recorder.host.live) == (1024, 1024)
        doubled = backup + backup  # made of host tensors alone: in host memory too
        mixed = device * torch.ones(())  # a scalar decides nothing
        assert recorder.host.live == 2048
        assert recorder.memory.live == 2 * 1024  # the scalar is gone
        del backup, doubled, mixed
        assert recorder.host.live == 0
        assert recorder.host.peak == 2048


def test_copies_between_host_and_device_are_transfers() -> None:
    with Recorder({}) as recorder:
        device, other = torch.zeros(100), torch.zeros(100)
        with host_memory.placed(on_host=True):
            backup = torch.zeros(100)
        with recorder.collect("forward") as calls:
            backup.copy_(device)
            other.copy_(backup)
            other.copy_(device)
            backup.add_(1.0)
        there, back, inside, on_host = recorded(recorder, calls)
        for op, direction in ((there, "d2h"), (back, "h2d")):
            assert (op.family, op.bytes, op.attr("direction")) == (Family.TRANSFER, 400, direction)
        assert (inside.family, inside.name) == (Family.MEMORY, "aten.copy_")
        assert (on_host.family, on_host.name) == (Family.HOST, "host.aten.add_")


def test_the_innermost_request_counts() -> None:
    with Recorder({}) as recorder:
        with host_memory.placed(on_host=True), host_memory.placed(on_host=False):
            device = torch.empty(8, dtype=torch.uint8)
        assert not host_memory.holds(recorder, device)
        on_host = host_memory.copied_to_host(device)
        assert host_memory.holds(recorder, on_host)
        assert not host_memory.holds(recorder, host_memory.copied_to_device(on_host))

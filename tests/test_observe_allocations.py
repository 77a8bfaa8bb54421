"""Logs of allocations and frees."""

from __future__ import annotations

import pytest
import torch

from primus_ext.observe.allocations import Kinds, Log, Logs
from primus_ext.observe.recorder import Recorder
from primus_ext.trace import AllocationKind


def test_kinds_are_stored_once() -> None:
    kinds = Kinds()
    one = kinds.of(8, "aten.mm", "mlp", "forward")
    assert kinds.of(8, "aten.mm", "mlp", "forward") == one
    other = kinds.in_phase(one, "workspaces")
    assert other != one and kinds.in_phase(one, "forward") == one
    assert kinds.table[other] == AllocationKind(8, "aten.mm", "mlp", "workspaces")


def test_frees_name_the_allocation_and_addresses_are_used_again() -> None:
    log = Log()
    log.allocated(100, 0)
    log.allocated(200, 1)
    assert log.freed(100)
    log.allocated(100, 2)
    assert (log.number(100), log.number(200), log.number(300)) == (2, 1, -1)
    assert log.freed(100) and not log.freed(100)
    assert log.events == [0, 1, -1, 2, -3]
    assert log.live() == {1: 1}


def test_an_inner_log_sees_only_what_happens_inside() -> None:
    logs = Logs()
    logs.allocated(1, 10)
    with logs.inner() as inner:
        logs.allocated(2, 11)
        logs.allocated(3, 12)
        logs.freed(1)  # older: a matter of the outer log
        logs.freed(2)
    assert inner.events == [11, 12, -1]
    assert logs.setup.events == [10, -1]
    assert logs.live() == [12]
    with logs.inner(passing=True):
        logs.allocated(4, 13)
    assert logs.live() == [12]
    logs.freed(3)  # after the log was closed: its events stay as they were
    assert logs.live() == [] and inner.events == [11, 12, -1]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder({})


def test_the_recorder_logs_every_storage_once(recorder: Recorder) -> None:
    with recorder, recorder.memory.logs.inner() as log:
        a = torch.ones(16)
        b = a.view(4, 4)  # no storage of its own
        c = b @ b
        recorder.modules.append("decoder.layers.0.mlp")
        d = a.add_(1) + c.view(16)
        torch.empty(0)  # the allocator is not asked for nothing
        kinds = [recorder.kinds.table[event] for event in log.events if event >= 0]
        assert [kind.bytes for kind in kinds] == [64, 64, 64]
        assert [kind.op for kind in kinds] == ["aten.ones", "aten.mm", "aten.add"]
        assert [kind.module for kind in kinds] == ["other", "other", "decoder.layers.0.mlp"]
        assert recorder.memory.number(b, log) == 0
        del a, b, c, d
    assert log.events == [0, 1, 2, -1, -2, -3]
    assert recorder.memory.live == 0


def test_a_fused_kernel_allocates_its_outputs_only(recorder: Recorder) -> None:
    with recorder, recorder.memory.logs.inner() as log:
        with recorder.fused("norm", []) as outputs:
            middle = torch.ones(8) * 2
            outputs.append(middle + 1)
            del middle
        (kind,) = [recorder.kinds.table[event] for event in log.events if event >= 0]
        assert (kind.bytes, kind.op) == (32, "fused.norm")

"""Layers of a job by shape and point: instantiated or recorded, and kept on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from primus_ext.parametric import Recording
from primus_ext.runner import child
from primus_ext.runner.layer_records import LayerRecords, Refused, Wanted
from primus_ext.runner.trace_cache import TraceCache
from primus_ext.trace import Family
from tests.emulation import COMMON, GPT, H100
from tests.test_parametric import FFN, HIDDEN, MODEL, MOE

EXPERTS = {"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1}
FOLLOWS = Wanted.of(EXPERTS, 4, 256, pp_rank=1)
ALONE = Wanted.of(EXPERTS, 1, 130, pp_rank=1)
"""260 chosen experts for 8 of them: four get one more than the others."""


def records(tmp_path: Path, cache: TraceCache) -> LayerRecords:
    request = {
        "module": GPT, "args": [*COMMON, *(MODEL + MOE).split()], "cwd": str(tmp_path),
        "device": H100, "world_size": 24, "gpus_per_node": 8,
        "frameworks": ["primus_ext.frameworks.megatron"],
    }  # fmt: skip
    return LayerRecords(request, [], 128, tmp_path, cache, lambda *_: None)


def no_child(*_: Any) -> dict[str, Any]:
    raise AssertionError("nothing is left to be recorded")


@pytest.mark.slow
def test_points_follow_or_are_recorded_and_come_back_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = TraceCache(tmp_path / "cache")
    first = records(tmp_path, cache)
    found = first.get([FOLLOWS, ALONE])
    assert [r.point for r in found] == [(4, 256), (1, 130)]
    assert first.recorded_themselves == 1
    rows = [_rows(recording) for recording in found]
    # the peers send what this rank sends: four ranks, two local experts of 256 and of 33 tokens
    assert rows == [4 * (256 + 256), 4 * (33 + 33)]

    monkeypatch.setattr(child, "run", no_child)
    again = records(tmp_path, cache)
    assert again.get([ALONE, FOLLOWS]) == found[::-1]
    with pytest.raises(AssertionError, match="nothing is left"):
        again.get([Wanted.of({}, 1, 128)])
    monkeypatch.undo()
    with pytest.raises(Refused, match="7"):
        again.get([Wanted.of({"tensor_model_parallel_size": 7}, 1, 128)])


def _rows(recording: Recording) -> int:
    """Tokens of the local experts, from the FLOPs of the grouped products of the forward."""
    flops = [op.flops for op, phase, _ in recording.calls
             if op.family is Family.GROUPED_GEMM and phase == "forward"]  # fmt: skip
    return sum(flops) // (2 * 3 * HIDDEN * FFN)

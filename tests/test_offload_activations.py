"""Activations that are moved to the host between forward and backward."""

from __future__ import annotations

from pathlib import Path

import pytest

from primus_ext.trace import RankTrace
from tests.breadth import HEADS, HIDDEN, KV, MODEL, SEQ, Compared, assert_same, compared

MBS = 8
"""Transformer Engine leaves tensors of fewer than 2**18 elements alone."""
ARGS = MODEL.replace("--micro-batch-size 2", f"--micro-batch-size {MBS}")
HIDDEN_BYTES = 2 * SEQ * MBS * HIDDEN


def moved(trace: RankTrace, direction: str) -> int:
    """Bytes of one microbatch's copies."""
    size = 0
    for segment in trace.chunks[0].segments:
        for call in (*segment.forward, *segment.backward):
            op = trace.ops[call.op]
            if op.family == "transfer" and op.attr("direction") == direction:
                size += op.bytes * segment.count
    return size


@pytest.fixture(scope="module")
def by_layer(tmp_path_factory: pytest.TempPathFactory) -> list[Compared]:
    path = tmp_path_factory.mktemp("layers")
    return compared(path, 1, ARGS + "--cpu-offloading-num-layers 2")


def test_layers_offloaded_by_transformer_engine(by_layer: list[Compared]) -> None:
    assert_same(by_layer)
    (one,) = by_layer
    memory = one.trace.chunks[0].memory
    assert memory.host_bytes == one.composed.host_bytes > 0
    assert moved(one.trace, "d2h") == moved(one.trace, "h2d") == memory.host_bytes


@pytest.mark.slow
def test_offloaded_layers_are_gone_from_the_device(
    by_layer: list[Compared], tmp_path: Path
) -> None:
    (plain,) = compared(tmp_path, 1, ARGS)
    ours, theirs = (c.trace.chunks[0].memory for c in (by_layer[0], plain))
    assert theirs.saved_bytes - ours.saved_bytes == ours.host_bytes
    assert plain.composed.peak_bytes > by_layer[0].composed.peak_bytes


@pytest.mark.slow
def test_fine_grained_offload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_CPU_OFFLOAD_V1", "1")  # Megatron demands it
    (one,) = found = compared(
        tmp_path, 1,
        ARGS + "--fine-grained-activation-offloading --offload-modules core_attn "
        "--min-offloaded-tensor-size 1024",
    )  # fmt: skip
    assert_same(found)
    # what attention keeps: q and its result, k and v, and the log-sum-exp in fp32
    layer = 2 * HIDDEN_BYTES + 2 * HIDDEN_BYTES * KV // HEADS + 4 * HEADS * SEQ * MBS
    # of every layer but the last, whose backward comes next
    assert moved(one.trace, "d2h") == moved(one.trace, "h2d") == 3 * layer
    # the pool was filled in the first step, when the last layer's were offloaded as well
    assert one.trace.static.host_bytes == 4 * layer

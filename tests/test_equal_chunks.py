"""Model chunks that do the same work are recorded once; recording each gives the same trace."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from primus_ext.frameworks.megatron import equal
from tests.emulation import traces

MODEL = (
    "--num-layers 8 --hidden-size 256 --ffn-hidden-size 704 --num-attention-heads 8 "
    "--group-query-attention --num-query-groups 2 --seq-length 128 "
    "--max-position-embeddings 128 --micro-batch-size 2 --vocab-size 1023 "
    "--make-vocab-size-divisible-by 128 --global-batch-size 16 "
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 4 "
)
MOE = (
    "--num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 2 --moe-grouped-gemm "
    "--expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall --moe-layer-freq "
)


def comparable(trace: dict[str, Any]) -> dict[str, Any]:
    """The trace with ops in the place of indices into its table."""
    ops = trace["ops"]

    def resolved(calls: list[dict[str, Any]]) -> list[Any]:
        return [(ops[c["op"]], c["phase"], c["module"]) for c in calls]

    def allocated(events: list[int]) -> list[Any]:
        return [str(trace["allocations"][e]) if e >= 0 else e for e in events]

    def named(events: dict[str, Any]) -> dict[str, Any]:
        lists = {k: allocated(v) for k, v in events.items() if isinstance(v, list)}
        return {**events, **lists}

    chunks = [
        {**c, "events": named(c["events"]), "segments": [
            {**s, "forward": resolved(s["forward"]), "backward": resolved(s["backward"])}
            for s in c["segments"]
        ]}
        for c in trace["chunks"]
    ]  # fmt: skip
    around = named(trace["static_events"])
    # What the first microbatch left in the experts of chunks that were not recorded afterwards is
    # held to the end: for the replay that is a workspace.
    around["workspaces"] = sorted(e for e in around["workspaces"] if "moe_layer" not in str(e))
    return {
        **trace, "ops": None, "allocations": None, "chunks": chunks, "static_events": around,
        "step": resolved(trace["step"]), "sync": resolved(trace["sync"]),
    }  # fmt: skip


@pytest.mark.parametrize(
    "args",
    [
        pytest.param("", id="dense"),
        pytest.param(MOE + "([0]*4+[1]*4)", id="experts", marks=pytest.mark.slow),
        pytest.param(
            "--fp8-format e4m3 --fp8-recipe blockwise", id="fp8", marks=pytest.mark.slow
        ),
    ],
)
def test_one_recording_serves_equal_chunks(tmp_path: Path, args: str) -> None:
    once = traces(tmp_path, 4, MODEL + args)
    every = traces(tmp_path, 4, MODEL + args, every_chunk=True)
    assert [comparable(t) for t in once] == [comparable(t) for t in every]
    assert [c["vpp_stage"] for c in once[0]["chunks"]] == [0, 1, 2, 3]


class Layer(nn.Module):
    def __init__(self, number: int, width: int, window: tuple[int, int]) -> None:
        super().__init__()
        self.layer_number, self.window_size = number, window
        self.inner = nn.Linear(width, width)


def chunk(first: int, width: int = 8, window: tuple[int, int] = (-1, 0)) -> nn.Module:
    return nn.ModuleList([Layer(first + i, width, window) for i in range(2)])


def test_what_differs_is_recorded_apart() -> None:
    plain: Any = SimpleNamespace()
    frozen = chunk(9)
    frozen.requires_grad_(False)
    chunks = [chunk(1), chunk(3), chunk(5, width=16), chunk(7, window=(4, 0)), frozen, chunk(11)]
    assert equal.representatives(chunks, plain) == [0, 0, 2, 3, 4, 0]
    by_number: Any = SimpleNamespace(no_rope_freq=[1, 0])
    assert equal.representatives(chunks[:2], by_number) == [0, 1]

"""A recorded job that asks for combined 1F1B with delayed weight gradients."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from primus_ext import trace_io
from primus_ext.cluster_data import load_cluster
from primus_ext.project.compose import project
from primus_ext.trace import Family
from tests.emulation import emulate

ARGUMENTS = (
    "--num-layers 4 --hidden-size 512 --ffn-hidden-size 1024 --num-attention-heads 8 "
    "--seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 32 "
    "--vocab-size 8192 --num-experts 8 --moe-router-topk 2 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss "
    "--expert-model-parallel-size 4 --pipeline-model-parallel-size 2 "
    "--num-layers-per-virtual-pipeline-stage 1 --overlap-moe-expert-parallel-comm "
    "--delay-wgrad-compute"
)


@pytest.mark.slow
def test_delayed_weight_gradients_are_recorded_and_the_schedule_is_combined(
    tmp_path: Path,
) -> None:
    answer = emulate(tmp_path, 16, ARGUMENTS)
    assert answer["status"] == "ok", answer
    plan = trace_io.plan_from_plain(answer["plan"])
    traces = trace_io.traces_from_plain(answer["traces"])
    assert plan.flags["delay_wgrad_compute"] is True
    for trace in traces:
        for chunk in trace.chunks:
            layouts = Counter(
                (op.family, op.attr("layout"))
                for segment in chunk.segments for call in segment.backward
                for op in (trace.ops[call.op],) if op.attr("layout")
            )  # fmt: skip
            inputs = {family for family, layout in layouts if layout == "nn"}
            assert inputs == {Family.GEMM, Family.GROUPED_GEMM}
            for family in inputs:  # every product has both gradients
                assert layouts[family, "nt"] == layouts[family, "nn"]
    found = project(plan, traces, load_cluster("h100", 2, 8), mode="simulate", schedule="all")
    rows = {row.schedule: row for row in found.schedules}
    assert rows["combined-1f1b"].role == "runs"
    assert found.throughput.step_s < (rows["interleaved"].step_s or 0)

"""Composed memory beside Megatron's own loop on whole ranks, for tests of many configurations."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from primus_ext import trace_io
from primus_ext.cluster_data import load_cluster
from primus_ext.project import compose
from primus_ext.project.result import RoleMemory
from primus_ext.trace import RankTrace
from tests.emulation import emulate

HIDDEN, FFN, HEADS, KV, SEQ, MBS = 256, 704, 8, 2, 128, 2
SHAPE = (
    f"--hidden-size {HIDDEN} --ffn-hidden-size {FFN} --num-attention-heads {HEADS} "
    f"--group-query-attention --num-query-groups {KV} --seq-length {SEQ} "
    f"--max-position-embeddings {SEQ} --micro-batch-size {MBS} --vocab-size 1023 "
    "--make-vocab-size-divisible-by 128 --global-batch-size 16 "
)
MODEL = SHAPE + "--num-layers 4 "
PP2 = "--pipeline-model-parallel-size 2 "


@dataclasses.dataclass(frozen=True)
class Compared:
    """One pipeline rank, twice."""

    composed: RoleMemory
    trace: RankTrace
    whole: dict[str, int]


def compared(tmp_path: Path, world: int, args: str, **request: Any) -> list[Compared]:
    """Every pipeline rank of a job on H100s.

    Args:
        tmp_path: Where requests and answers lie.
        world: Ranks.
        args: All Megatron arguments beside those that every test has.
        request: Further keys of the request.
    """
    answer = emulate(tmp_path, world, args, **request)
    assert answer["status"] == "ok", (answer, answer.get("stderr", "")[-2000:])
    plan = trace_io.plan_from_plain(answer["plan"])
    traces = trace_io.traces_from_plain(answer["traces"])
    cluster = load_cluster("h100", 1, world)
    roles = compose.project(plan, traces, cluster, mode="simulate").memory.per_role
    pp = plan.parallelism.pp
    ranks = [stage * world // pp for stage in range(pp)]
    whole = emulate(tmp_path, world, args, whole=True, ranks=ranks, **request)
    assert whole["status"] == "ok", (whole, whole.get("stderr", "")[-2000:])
    of_stage = {rank: trace for trace in traces for rank in trace.pp_ranks}
    return [
        Compared(role, of_stage[stage], found)
        for stage, (role, found) in enumerate(zip(roles, whole["traces"], strict=True))
    ]


def assert_same(found: list[Compared]) -> None:
    """Device and host memory of every rank, to the byte."""
    for one in found:
        assert one.whole["peak_bytes"] == one.composed.peak_bytes, one.composed
        assert one.whole["host_peak_bytes"] == one.composed.host_bytes

"""The inventory of a step against real runs: processes over gloo, counted without our recorder.

Every rank's collectives of the second step are compared by kind, members of the group and bytes;
nothing is left out and nothing is allowed for.  ``barrier`` and what Megatron does once per log
interval are not part of a step.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from primus_ext import trace_io
from primus_ext.plan import Plan
from primus_ext.project import compose, inventory
from primus_ext.project.programs import TRANSFER, Transfers
from primus_ext.project.schedule import programs
from primus_ext.trace import RankTrace
from tests import emulation
from tests.training import ROOT, environment

MODEL = (
    "--num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 "
    "--group-query-attention --num-query-groups 2 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --vocab-size 127 --make-vocab-size-divisible-by 128 "
    "--global-batch-size 8 "
)
REAL = ["--distributed-backend", "gloo", "--log-interval", "1000", "--eval-iters", "0"]
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel "
PP2 = "--pipeline-model-parallel-size 2 "
EP2 = (
    "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --expert-model-parallel-size 2 "
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss "
    "--moe-aux-loss-coeff 0.01 "
)
SHARDED = "--use-distributed-optimizer"
FSDP2 = "--use-torch-fsdp2 --ckpt-format torch_dist --no-gradient-accumulation-fusion "
MEGATRON_FSDP = (
    "--use-megatron-fsdp --ckpt-format fsdp_dtensor --no-gradient-accumulation-fusion "
    "--no-gradient-reduce-div-fusion --data-parallel-sharding-strategy "  # gloo: no PREMUL_SUM
)
HYBRID = "--num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy optim "


def really_issued(folder: Path, world: int, args: str) -> list[list[dict[str, Any]]]:
    """What every process of a real run issued in its second step, in order."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    script = ROOT / "tests" / "probe_collectives.py"
    running = []
    for rank in range(world):
        variables = environment(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world),
            LOCAL_WORLD_SIZE=str(world), MASTER_ADDR="localhost", MASTER_PORT=str(port),
        )  # fmt: skip
        log = open(folder / f"{rank}.log", "w")  # noqa: SIM115 (handed to the process)
        running.append(
            subprocess.Popen(
                [sys.executable, "-W", "ignore", str(script), str(folder / f"{rank}.json"),
                 *emulation.COMMON, *(MODEL + args).split(), *REAL],
                env=variables, cwd=folder, stdout=log, stderr=log,
            )
        )  # fmt: skip
    try:
        for process in running:
            process.wait(timeout=600)
    finally:
        for process in running:
            process.kill()
    found = []
    for rank in range(world):
        path = folder / f"{rank}.json"
        assert path.exists(), (folder / f"{rank}.log").read_text()[-3000:]
        found.append(json.loads(path.read_text()))
    return found


def projected(folder: Path, world: int, args: str) -> tuple[Plan, list[RankTrace]]:
    """Plan and trace of every rank."""
    answer = emulation.emulate(
        folder, world, MODEL + args, common=emulation.COMMON, ranks=list(range(world))
    )
    assert answer["status"] == "ok", (answer["message"], answer["stderr"][-3000:])
    return trace_io.plan_from_plain(answer["plan"]), trace_io.traces_from_plain(answer["traces"])


def inventories(plan: Plan, traces: list[RankTrace]) -> list[Counter[tuple]]:
    """Of every rank: kind, members of the group and bytes, with their count."""
    shape, by_stage = compose.schedule_shape(plan), {}
    for trace in traces:
        by_stage.setdefault(trace.groups["pp"].index(trace.rank), trace)
    stages = [by_stage[stage] for stage in range(shape.pp)]
    transfers = inventory.pipeline_transfers(stages, shape, plan.precision.params)
    found = []
    for trace in traces:
        mine: Counter[tuple] = Counter()
        here = transfers[trace.groups["pp"].index(trace.rank)]
        for key, count in (inventory.of_rank(trace, shape) + here).items():
            _, kind, group, size, each, _, _ = key
            assert size == len(trace.groups[group])
            mine[kind, trace.groups[group], each] += count
        found.append(mine)
    return found


def check_partners(plan: Plan, trace: RankTrace, rows: list[dict[str, Any]]) -> None:
    """The rank exchanges with the same peers in the same order as our program of it."""
    shape, pipeline = compose.schedule_shape(plan), trace.groups["pp"]
    if shape.pp == 1:
        return
    rank, of = pipeline.index(trace.rank), Transfers(shape)
    mine = [
        (row["kind"], row["peer"])
        for row in rows
        if row["kind"] in ("send", "recv") and tuple(row["ranks"]) == pipeline
    ]
    for kind, posts, _ in programs(shape)[rank]:
        if kind != TRANSFER or not posts:
            continue
        expected = []
        for transfer in posts:
            backward = transfer & 1
            sides = [pipeline[(of.boundary(transfer) + i) % shape.pp] for i in (backward,
                                                                               1 - backward)]
            sends = sides[0] == trace.rank
            expected.append(("send", sides[1]) if sends else ("recv", sides[0]))
        together, mine = mine[: len(posts)], mine[len(posts) :]
        assert sorted(together) == sorted(expected)
    assert not mine


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("world", "args"),
    [
        pytest.param(2, TP2, id="tp2 sp"),
        pytest.param(2, PP2, id="pp2", marks=slow),
        pytest.param(
            2, PP2 + "--num-virtual-stages-per-pipeline-rank 2 ", id="pp2 vpp2", marks=slow
        ),
        pytest.param(
            2, "--context-parallel-size 2 --cp-comm-type a2a ", id="cp2 a2a", marks=slow
        ),
        pytest.param(
            2, "--context-parallel-size 2 --cp-comm-type all_gather ", id="cp2 gather", marks=slow
        ),
        pytest.param(2, "--context-parallel-size 2 --cp-comm-type p2p ", id="cp2 ring", marks=slow),
        pytest.param(2, EP2, id="ep2", marks=slow),
        pytest.param(2, "", id="dp2 plain optimizer", marks=slow),
        pytest.param(
            2, "--overlap-grad-reduce --overlap-param-gather ", id="dp2 overlapped", marks=slow
        ),
        pytest.param(2, FSDP2, id="torch fsdp2", marks=slow),
        pytest.param(2, MEGATRON_FSDP + "optim_grads_params ", id="megatron fsdp", marks=slow),
        pytest.param(2, MEGATRON_FSDP + "optim_grads ", id="megatron fsdp, zero 2", marks=slow),
        pytest.param(
            4, MEGATRON_FSDP + "optim_grads_params " + HYBRID, id="megatron hsdp", marks=slow
        ),
        pytest.param(4, TP2 + PP2, id="tp2 pp2", marks=slow),
        pytest.param(
            4, TP2 + EP2 + "--expert-tensor-parallel-size 1 ", id="tp2 ep2", marks=slow
        ),
    ],
)
def test_the_inventory_is_what_a_real_run_issues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int, args: str
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if not args or FSDP2 in args:
        plain = [word for word in emulation.COMMON if word != SHARDED]
        monkeypatch.setattr(emulation, "COMMON", plain)
    plan, traces = projected(tmp_path, world, args)
    real = really_issued(tmp_path, world, args)
    for trace, mine, rows in zip(traces, inventories(plan, traces), real, strict=True):
        issued = Counter((r["kind"], tuple(r["ranks"]), r["bytes"]) for r in rows)
        assert mine == issued
        check_partners(plan, trace, rows)

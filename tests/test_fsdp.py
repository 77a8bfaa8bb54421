"""Torch FSDP2 and Megatron-FSDP: closed forms, the whole rank, real tensors, hand-made streams."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from primus_ext import trace_io
from primus_ext.cluster_data import load_cluster
from primus_ext.cost.model import CostModel
from primus_ext.frameworks import published_fsdp
from primus_ext.project import compose, inventory, sharded, stage
from primus_ext.project.ledger import TermName
from primus_ext.project.recorded import Recorded
from primus_ext.project.replay import highest
from primus_ext.trace import (
    Call,
    ChunkMemory,
    ChunkTrace,
    Collective,
    CollectiveKind,
    Family,
    MicrobatchTrace,
    Op,
    RankTrace,
    ScopeKind,
    Segment,
    StaticMemory,
)
from tests import emulation
from tests.training import scalars, train

HIDDEN, FFN, KV, HEADS, LAYERS, VOCAB, WORLD = 256, 704, 2, 8, 4, 1024, 4
MODEL = (
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --ffn-hidden-size {FFN} "
    f"--num-attention-heads {HEADS} --group-query-attention --num-query-groups {KV} "
    f"--seq-length 128 --max-position-embeddings 128 --micro-batch-size 2 "
    f"--vocab-size {VOCAB - 1} --make-vocab-size-divisible-by 128 --global-batch-size 24 "
)
FSDP2 = "--use-torch-fsdp2 --ckpt-format torch_dist --no-gradient-accumulation-fusion "
MEGATRON = (
    "--use-megatron-fsdp --ckpt-format fsdp_dtensor --no-gradient-accumulation-fusion "
    "--data-parallel-sharding-strategy "
)
LAYER = HIDDEN * HIDDEN * (2 + 2 * KV // HEADS) + 2 * HIDDEN * HIDDEN * KV // HEADS
LAYER += 3 * HIDDEN * FFN + 2 * HIDDEN
ROWS = math.lcm(HIDDEN, FFN)
"""Elements that rows of all matrices of a layer divide."""
MICROBATCHES = 24 // (2 * WORLD)
PARAMETERS = LAYERS * LAYER + 2 * VOCAB * HIDDEN + HIDDEN
"""Elements: q and o, k and v, the MLP and two norms of each layer; embedding, output, norm."""
LOG = 8
"""Bytes: the schedule's counters of tokens."""
slow = pytest.mark.slow


def run(folder: Path, args: str, **request: Any) -> dict[str, Any]:
    dropped = "--use-distributed-optimizer" if "torch-fsdp2" in args else ""
    common = [word for word in emulation.COMMON if word != dropped]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
        answer = emulation.emulate(folder, WORLD, MODEL + args, common, **request)
    assert answer["status"] == "ok", (answer.get("message"), answer["stderr"][-3000:])
    return answer


def whole(folder: Path, args: str, **request: Any) -> int:
    return run(folder, args, whole=True, ranks=[0], **request)["traces"][0]["peak_bytes"]


def composed(answer: dict[str, Any]) -> int:
    traces = trace_io.traces_from_plain(answer["traces"])
    plan = trace_io.plan_from_plain(answer["plan"])
    cluster = load_cluster("h100", 1, WORLD)
    role = compose.project(plan, traces, cluster, mode="simulate").memory.per_role[0]
    assert role.parts.total == role.peak_bytes
    return role.peak_bytes


@pytest.fixture(scope="module")
def fsdp2(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("fsdp2"), FSDP2)


def collectives(trace: dict[str, Any], kind: str, group: str = "dp_cp") -> int:
    """Bytes of one microbatch over a group."""
    found = [op["collective"] for op in emulation.ops_of(trace) if op["collective"]]
    return sum(c["bytes"] for c in found if c["kind"] == kind and c["group"] == group)


def test_every_microbatch_gathers_twice_and_reduces_once(fsdp2: dict[str, Any]) -> None:
    trace = fsdp2["traces"][0]
    assert collectives(trace, "all_gather") == 2 * 2 * PARAMETERS
    assert collectives(trace, "reduce_scatter") == 2 * PARAMETERS


Issued = Counter[tuple[str, str, int]]
"""Kind, group and bytes to count, of one step."""


def issued(answer: dict[str, Any]) -> Issued:
    """What a projection lists of the groups that parameters and gradients are shared over."""
    plan = trace_io.plan_from_plain(answer["plan"])
    trace = trace_io.traces_from_plain(answer["traces"])[0]
    found: Issued = Counter()
    for key, count in inventory.of_rank(trace, compose.schedule_shape(plan)).items():
        if len(trace.groups[key[2]]) > 1 and key[4] > LOG:  # but for norms and counters
            found[key[1], key[2], key[4]] += count
    return found


def test_fsdp2_issues_what_its_units_need(fsdp2: dict[str, Any]) -> None:
    """Every unit (a layer, each table, the final norm) is gathered twice and reduced once."""
    expected: Issued = Counter()
    for size, units in ((LAYER, LAYERS), (VOCAB * HIDDEN, 2), (HIDDEN, 1)):
        expected["all_gather", "dp_cp", 2 * size] += 2 * units * MICROBATCHES
        expected["reduce_scatter", "dp_cp", 2 * size] += units * MICROBATCHES
    assert issued(fsdp2) == expected


@slow
def test_megatron_fsdp_issues_what_its_units_need(tmp_path: Path) -> None:
    """Layers are units, and what is outside of them is one; no shard has a part of a row."""
    expected: Issued = Counter()
    outside = padded(2 * VOCAB * HIDDEN + HIDDEN, HIDDEN)  # is gathered once and kept
    units = ((padded(LAYER, ROWS), LAYERS, 2 * MICROBATCHES), (outside, 1, 1))
    for size, count, gathers in units:
        expected["all_gather", "dp_cp", 2 * size] += count * gathers
        expected["reduce_scatter", "dp_cp", 2 * size] += count * MICROBATCHES
    assert issued(run(tmp_path, MEGATRON + "optim_grads_params")) == expected


@slow
def test_without_sharded_parameters_megatron_fsdp_gathers_once_a_step(tmp_path: Path) -> None:
    found = issued(run(tmp_path, MEGATRON + "optim_grads"))
    sizes = {size for _, _, size in found}
    assert len(sizes) == 1  # the whole model is one unit
    size = sizes.pop()
    assert found == {("all_gather", "dp_cp", size): 1,
                     ("reduce_scatter", "dp_cp", size): MICROBATCHES}  # fmt: skip
    whole_rows, extra = divmod(size // 2 - PARAMETERS, ROWS * WORLD)
    assert whole_rows in (0, 1) and (size // 2) % (ROWS * WORLD) == 0, extra


def padded(elements: int, row: int) -> int:
    """Up to a multiple of whole rows on every rank."""
    return -(-elements // (row * WORLD)) * row * WORLD


def test_static_bytes_are_a_share_of_the_parameters(fsdp2: dict[str, Any]) -> None:
    trace = fsdp2["traces"][0]
    static, share = trace["static"], PARAMETERS // WORLD
    assert trace["parameters"] == share
    assert (static["parameters"], static["gradients"]) == (2 * share, 2 * share)
    assert static["optimizer"] == (4 + 4 + 4) * share
    starts = [m["extra_bytes"] for m in trace["chunks"][0]["microbatches"]]
    losses = 8  # of each microbatch, for the log
    assert starts == [-2 * share, losses, 2 * losses]  # the first backward makes the gradients


def test_gathers_and_reductions_have_streams_of_their_own(fsdp2: dict[str, Any]) -> None:
    trace = fsdp2["traces"][0]
    streams: dict[str, set[str]] = {}
    for segment in trace["chunks"][0]["segments"]:
        for call in segment["forward"] + segment["backward"]:
            op = trace["ops"][call["op"]]
            if op["collective"]:
                streams.setdefault(op["collective"]["kind"], set()).add(call["stream"])
    assert "" not in streams["all_gather"] | streams["reduce_scatter"]
    assert not streams["all_gather"] & streams["reduce_scatter"]


def test_torch_fsdp2_composition_is_the_whole_rank(
    tmp_path: Path, fsdp2: dict[str, Any]
) -> None:
    assert 0 <= whole(tmp_path, FSDP2) - composed(fsdp2) <= LOG


def test_recorded_allocations_replay_to_the_composed_peak(fsdp2: dict[str, Any]) -> None:
    (trace,) = trace_io.traces_from_plain(fsdp2["traces"])
    source = Recorded(trace)
    assert source.steps == 2
    assert 0 <= highest(source, 2) - composed(fsdp2) <= LOG
    parts = Counter[str]()
    for piece in trace.recorded_events[:2]:  # the optimizer's state comes with the first step
        for kind in (trace.allocations[event] for event in piece if event >= 0):
            parts[kind.phase] += kind.bytes
    assert parts["parameters"] == trace.static.parameters
    assert parts["optimizer"] == trace.static.optimizer
    assert {kind.stream for kind in trace.allocations} > {0}  # gathered, reduced beside


@slow
@pytest.mark.parametrize(
    "args",
    [
        pytest.param(FSDP2 + "--global-batch-size 8", id="fsdp2, one microbatch"),
        pytest.param(FSDP2 + "--torch-fsdp2-no-reshard-after-forward", id="fsdp2, zero 2"),
        pytest.param(
            FSDP2 + "--tensor-model-parallel-size 2 --sequence-parallel", id="fsdp2, tp2"
        ),
        pytest.param(FSDP2 + "--context-parallel-size 2", id="fsdp2, cp2"),
        pytest.param(FSDP2 + "--fp8-format hybrid --fp8-recipe delayed", id="fsdp2, fp8"),
        pytest.param(
            FSDP2 + "--recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 1",
            id="fsdp2, full recompute",
        ),
        pytest.param(MEGATRON + "optim_grads_params", id="megatron"),
        pytest.param(MEGATRON + "optim_grads", id="megatron, zero 2"),
        pytest.param(MEGATRON + "optim", id="megatron, zero 1"),
        pytest.param(
            MEGATRON + "optim_grads_params --num-distributed-optimizer-instances 2",
            id="megatron, hsdp",
        ),
        pytest.param(
            MEGATRON + "optim_grads_params --num-distributed-optimizer-instances 2 "
            "--outer-dp-sharding-strategy optim",
            id="megatron, hsdp with a sharded optimizer",
        ),
        pytest.param(MEGATRON + "optim_grads_params --fsdp-double-buffer", id="double buffer"),
        pytest.param(
            MEGATRON + "optim_grads_params --num-experts 8 --moe-router-topk 2 "
            "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1 --moe-grouped-gemm "
            "--moe-token-dispatcher-type alltoall",
            id="megatron, experts",
        ),
    ],
)
def test_composition_is_the_whole_rank(tmp_path: Path, args: str) -> None:
    answer = run(tmp_path, args)
    assert 0 <= whole(tmp_path, args) - composed(answer) <= LOG


@slow
@pytest.mark.parametrize("args", [FSDP2, MEGATRON + "optim_grads_params"])
def test_real_tensors_need_the_same(tmp_path: Path, args: str) -> None:
    scalars_kept = 16  # bytes; a few scalars of the step, not traced further
    assert 0 <= whole(tmp_path, args, storage="real") - whole(tmp_path, args) <= scalars_kept


@slow
@pytest.mark.parametrize(
    "sharded_by",
    [
        ["+megatron.use_torch_fsdp2=true", "++megatron.ckpt_format=torch_dist",
         "parallel.distributed_optimizer=false"],
        ["+megatron.use_megatron_fsdp=true", "++megatron.ckpt_format=fsdp_dtensor",
         "+megatron.data_parallel_sharding_strategy=optim_grads_params",
         "++megatron.gradient_reduce_div_fusion=false"],  # gloo has no PREMUL_SUM
    ],
    ids=["fsdp2", "megatron"],
)  # fmt: skip
def test_two_processes_train_as_without_sharding(tmp_path: Path, sharded_by: list[str]) -> None:
    logs = []
    for name, more in (("plain", []), ("sharded", sharded_by)):
        done = train(
            tmp_path, "model=tiny_gpt", "train.steps=3", f"train.log_jsonl={name}.jsonl",
            "++megatron.gradient_accumulation_fusion=false", *more, processes=2,
            CUDA_DEVICE_MAX_CONNECTIONS="8",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        values = scalars(tmp_path / f"{name}.jsonl")
        logs.append({k: v for k, v in values.items() if k[1] in ("lm loss", "grad-norm")})
    assert len(logs[0]) == 6
    assert logs[1] == pytest.approx(logs[0], rel=1e-5)


# ---------------------------------------------------------------- published runs
TITAN = {
    "source": {"name": "torchtitan benchmarks"}, "model": {"num_layers": 32},
    "parallelism": {"tp": 1, "pp": 1, "dp": 8, "fsdp": True, "zero_stage": 3},
    "precision": {"compute": "bf16"}, "recompute": {"granularity": "selective"},
}  # fmt: skip


def published_run(**parallelism: Any) -> dict[str, Any]:
    return {**TITAN, "parallelism": {**TITAN["parallelism"], **parallelism}}


def test_published_sharding_becomes_that_of_megatron() -> None:
    notes: list[str] = []
    assert "--use-torch-fsdp2" in (published_fsdp.arguments(TITAN, notes) or [])
    assert any("FP32 main parameters" in note for note in notes)
    kept = published_fsdp.arguments(published_run(zero_stage=2), notes) or []
    assert "--torch-fsdp2-no-reshard-after-forward" in kept
    groups = {"kind": "megatron_fsdp", "shard_group": 2}
    hybrid = published_fsdp.arguments(published_run(fsdp=groups), notes) or []
    assert hybrid[hybrid.index("--num-distributed-optimizer-instances") + 1] == "4"


def test_published_sharding_that_megatron_refuses_is_named() -> None:
    notes: list[str] = []
    assert published_fsdp.arguments(published_run(pp=8), notes) is None
    assert "no pipeline parallelism" in notes[0]


# ---------------------------------------------------------------- streams made by hand
GATHER, WORK = 0, 1


def hand_made(
    gathers: int, waits: tuple[tuple[int, int], ...], step: tuple[Call, ...] = ()
) -> RankTrace:
    """One part that gathers ``gathers`` times on a side stream and then works; a rank of it."""
    gather = Collective(CollectiveKind.ALL_GATHER, "dp_cp", 2**28, "bf16")
    ops = (
        Op("gather", Family.COLLECTIVE, (), (), flops=0, bytes=0, collective=gather),
        Op("copy", Family.MEMORY, (), (), flops=0, bytes=2**30),
    )
    calls = [Call(GATHER, "forward", "", "side", (("", 0),)) for _ in range(gathers)]
    calls += [Call(WORK, "forward", "", "", (("side", behind),)) for behind, _ in waits]
    part = Segment(ScopeKind.DENSE_LAYER, "layer", 1, tuple(calls), (), (0,))
    memory = ChunkMemory(0, 0, 0)
    only = MicrobatchTrace((), memory, 0)
    chunk = ChunkTrace(0, (part,), memory, 0, microbatches=(only,))
    static = StaticMemory(0, 0, 0, 0, 0)
    groups = {"dp_cp": (0, 1, 2, 3)}
    return RankTrace(0, (0,), groups, ops, (chunk,), step, (), 0, 0, 0, static)


@pytest.fixture(scope="module")
def cost() -> CostModel:
    return CostModel(load_cluster("h100", 1, 4))


def seconds(cost: CostModel, trace: RankTrace) -> tuple[float, float]:
    """Of one gather and of one copy."""
    pricer = stage.Pricer(cost, trace)
    return pricer.seconds(GATHER), pricer.seconds(WORK)


def test_only_what_is_waited_for_is_exposed(cost: CostModel) -> None:
    trace = hand_made(2, ((1, 0), (0, 0)))
    gather, work = seconds(cost, trace)
    found = stage.price(cost, trace).chunks[0].forward
    # the second gather runs beside the first copy
    second = max(0.0, gather - work)
    assert found.seconds == pytest.approx(gather + work + second + work, rel=1e-9)
    assert found.exposed[TermName.DATA] == pytest.approx(gather + second, rel=1e-9)
    assert found.busy[TermName.DATA] == pytest.approx(2 * gather, rel=1e-9)


def test_the_next_forward_waits_for_what_a_step_starts(cost: CostModel) -> None:
    started = (Call(GATHER, "step", "", "side", (("", 0),)),)
    trace = hand_made(0, ((0, 0),), started)
    gather, work = seconds(cost, trace)
    found = stage.price(cost, trace)
    # the forward waits for it: nothing else runs meanwhile
    assert found.step.seconds == pytest.approx(gather, rel=1e-9)
    assert found.chunks[0].forward.seconds == pytest.approx(work, rel=1e-9)


def test_the_mean_microbatch_counts_each_kind_as_often_as_it_runs(cost: CostModel) -> None:
    trace = hand_made(1, ((0, 0),))
    chunk = trace.chunks[0]
    empty = MicrobatchTrace((dataclasses.replace(chunk.segments[0], forward=()),),
                            chunk.memory, 0)  # fmt: skip
    three = dataclasses.replace(
        trace,
        chunks=(dataclasses.replace(chunk, microbatches=(empty, *chunk.microbatches, empty)),),
    )
    gather, work = seconds(cost, trace)
    assert sharded.weights(3, 10) == [1, 1, 7, 1]
    found = stage.price(cost, three, microbatches=10).chunks[0].forward
    assert found.seconds == pytest.approx((gather + work) * 8 / 10, rel=1e-9)


def test_the_highest_moment_may_be_any(cost: CostModel) -> None:
    trace = hand_made(1, ((0, 0),))
    static = StaticMemory(100, 40, 200, 8, 50)
    first = MicrobatchTrace((), ChunkMemory(10, 20, 45), -40)
    later = MicrobatchTrace((), ChunkMemory(10, 20, 25), 0)
    chunk = dataclasses.replace(trace.chunks[0], microbatches=(first, later, later))

    def peak(step: int) -> Any:
        held = dataclasses.replace(static, step_peak_bytes=step)
        return sharded.parts(dataclasses.replace(trace, chunks=(chunk,), static=held), 3)

    assert (peak(0).total, peak(0).gradients) == (100 + 40 + 200 + 8 + 25, 40)
    assert (peak(60).total, peak(60).temporaries) == (100 + 40 + 200 + 8 + 60, 60)

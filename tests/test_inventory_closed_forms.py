"""The inventory of a step against arithmetic.

What a layer communicates follows from how it is split (Megatron-LM, arXiv 1909.08053; sequence
parallelism, 2205.05198; ring attention and its gathers and all-to-alls, Transformer Engine's
``attn_forward_func_with_cp``; expert parallelism, 2006.16668; sharded optimizer, 1910.02054), not
from what was recorded.
"""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from primus_ext import trace_io
from primus_ext.project import compose, inventory
from tests import emulation
from tests.test_rank_by_number import by_arithmetic
from tests.training import ROOT, environment

SEQ, MBS, HIDDEN, FFN, HEADS, KV, LAYERS, VOCAB, GBS = 64, 2, 128, 192, 8, 4, 4, 1024, 32
DIM, EXPERTS, TOPK = HIDDEN // HEADS, 8, 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A job: degrees and what changes its communication."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    ep: int = 1
    sp: bool = False
    ring: str = "p2p"
    recompute: str = "none"
    sharded: bool = True
    tied: bool = False

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def microbatches(self) -> int:
        return GBS // (MBS * self.dp)

    @property
    def expert_dp(self) -> int:
        return self.world // (self.ep * self.pp)

    def arguments(self) -> list[str]:
        words = (
            f"--num-layers {LAYERS} --hidden-size {HIDDEN} --ffn-hidden-size {FFN} "
            f"--num-attention-heads {HEADS} --group-query-attention --num-query-groups {KV} "
            f"--seq-length {SEQ} --max-position-embeddings {SEQ} --micro-batch-size {MBS} "
            f"--vocab-size {VOCAB - 1} --make-vocab-size-divisible-by 128 "
            f"--global-batch-size {GBS} --tensor-model-parallel-size {self.tp} "
            f"--context-parallel-size {self.cp} --pipeline-model-parallel-size {self.pp} "
            f"--cp-comm-type {self.ring} "
        )
        if self.sp:
            words += "--sequence-parallel "
        if self.vpp > 1:
            words += f"--num-virtual-stages-per-pipeline-rank {self.vpp} "
        if self.ep > 1:
            words += (
                f"--num-experts {EXPERTS} --moe-router-topk {TOPK} --moe-grouped-gemm "
                f"--expert-model-parallel-size {self.ep} --expert-tensor-parallel-size 1 "
                "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss "
                "--moe-aux-loss-coeff 0.01 "
            )
        if self.recompute == "full":
            words += "--recompute-granularity full --recompute-method uniform "
            words += "--recompute-num-layers 1 "
        if self.recompute == "core_attn":
            words += "--recompute-granularity selective --recompute-modules core_attn "
        dropped = [] if self.sharded else ["--use-distributed-optimizer"]
        dropped += ["--untie-embeddings-and-output-weights"] if self.tied else []
        return [*(w for w in emulation.COMMON if w not in dropped), *words.split()]


Found = Counter[tuple[str, str, str, int]]
"""(direction, kind, group, bytes) to count."""


class Expected:
    """What one pipeline rank issues in a step."""

    def __init__(self, case: Case, stage: int) -> None:
        self.case, self.stage = case, stage
        self.first, self.last = stage == 0, stage == case.pp - 1
        self.found: Found = Counter()
        self.tokens = SEQ * MBS // case.cp  # of a microbatch, before sequence parallelism
        self.activation = 2 * self.tokens * HIDDEN

    def add(self, direction: str, kind: str, group: str, size: int, count: int = 1) -> None:
        self.found[direction, kind, group, size] += count

    def all(self) -> Found:
        times = self.case.microbatches
        for _ in range(times):
            for _ in range(LAYERS // self.case.pp):
                self._attention()
                self._mlp() if self.case.ep == 1 else self._experts()
            self._ends()
        self._pipeline(times)
        self._gradients()
        self._step()
        return self.found

    def _matrices(self) -> None:
        """A pair of column- and row-parallel matrices."""
        case, size = self.case, self.activation
        if case.tp == 1:
            return
        if not case.sp:
            for direction in ("forward", "backward"):
                self.add(direction, "all_reduce", "tp", size)
            if case.recompute == "full":
                self.add("recompute", "all_reduce", "tp", size)
            return
        self.add("forward", "all_gather", "tp", size)  # the input
        self.add("forward", "reduce_scatter", "tp", size)  # the output
        self.add("backward", "all_gather", "tp", size, 2)  # of the output; the input again
        self.add("backward", "reduce_scatter", "tp", size)  # of the input
        if case.recompute == "full":
            self.add("recompute", "all_gather", "tp", size)
            self.add("recompute", "reduce_scatter", "tp", size)

    def _attention(self) -> None:
        self._matrices()
        if self.case.cp == 1:
            return
        again = ["forward"] + (["recompute"] if self.case.recompute != "none" else [])
        {"p2p": self._ring, "all_gather": self._gathered, "a2a": self._heads_split}[
            self.case.ring
        ](again)

    def _heads(self, heads: int) -> int:
        return 2 * self.tokens * heads // self.case.tp * DIM

    def _ring(self, forwards: list[str]) -> None:
        """Keys and values go round; backward their gradients follow them, one step behind."""
        ring, size = self.case.cp, 2 * self._heads(KV)
        for side in ("send", "recv"):
            for direction in forwards:
                self.add(direction, side, "cp", size, ring - 1)
            self.add("backward", side, "cp", size, 2)  # first without, last only gradients
            self.add("backward", side, "cp", 2 * size, ring - 2)

    def _gathered(self, forwards: list[str]) -> None:
        """Keys and values of the whole sequence; their gradients are scattered."""
        size = self.case.cp * self._heads(KV)
        for direction in (*forwards, "backward"):
            self.add(direction, "all_gather", "cp", size, 2)
        self.add("backward", "reduce_scatter", "cp", size, 2)

    def _heads_split(self, forwards: list[str]) -> None:
        """Queries, keys, values and the output change from a part of the sequence to heads."""
        for direction in (*forwards, "backward"):
            self.add(direction, "all_to_all", "cp", self._heads(HEADS), 2)
            self.add(direction, "all_to_all", "cp", self._heads(KV), 2)

    def _mlp(self) -> None:
        self._matrices()

    def _experts(self) -> None:
        case = self.case
        copies = self.tokens // (case.tp if case.sp else 1) * TOPK
        forwards = ["forward"] + (["recompute"] if case.recompute == "full" else [])
        for direction in (*forwards, "backward"):
            self.add(direction, "all_to_all", "ep", 2 * copies * HIDDEN, 2)  # there and back
            self.add(direction, "all_to_all", "ep", 2 * copies)  # probabilities
        for direction in forwards:
            self.add(direction, "all_gather", "tp_ep", 8 * EXPERTS * case.ep)  # token counts
            if case.tp * case.cp > 1:
                self.add(direction, "all_reduce", "tp_cp", 8 * EXPERTS)  # for the balance loss

    def _ends(self) -> None:
        case, size = self.case, self.activation
        if case.tp == 1:
            return
        if self.first and case.sp:
            self.add("forward", "reduce_scatter", "tp", size)
            self.add("backward", "all_gather", "tp", size)
        elif self.first:
            self.add("forward", "all_reduce", "tp", size)
        if not self.last:
            return
        if case.sp:
            self.add("forward", "all_gather", "tp", size)
            self.add("backward", "all_gather", "tp", size)
            self.add("backward", "reduce_scatter", "tp", size)
        else:
            self.add("backward", "all_reduce", "tp", size)
        self.add("forward", "all_reduce", "tp", 4 * self.tokens, 3)  # maximum, target, sum

    def _pipeline(self, times: int) -> None:
        case = self.case
        size = self.activation // (case.tp if case.sp else 1)
        for chunk in range(case.vpp):
            place = chunk * case.pp + self.stage
            before, after = place > 0, place < case.pp * case.vpp - 1
            for direction, comes, goes in (("forward", before, after), ("backward", after, before)):
                self.add(direction, "recv", "pp", size, times * comes)
                self.add(direction, "send", "pp", size, times * goes)

    def _gradients(self) -> None:
        case, layers = self.case, LAYERS // self.case.pp
        norms = 2 * HIDDEN
        attention = HIDDEN * DIM * (2 * HEADS + 2 * KV) // case.tp
        mlp = 3 * HIDDEN * FFN // case.tp if case.ep == 1 else EXPERTS * HIDDEN  # or the router
        table = VOCAB // case.tp * HIDDEN
        chunks = []
        for chunk in range(case.vpp):
            first = self.first and chunk == 0
            last = self.last and chunk == case.vpp - 1
            size = layers // case.vpp * (attention + mlp + norms)
            chunks.append(size + table * (first + last) + HIDDEN * last - (
                table if case.tied and first and last else 0))  # fmt: skip
        for dense in chunks:
            self._bucket("dp_cp", case.dp * case.cp, dense)
            if case.ep > 1:
                experts = layers // case.vpp * EXPERTS // case.ep * 3 * HIDDEN * FFN
                self._bucket("expert_dp", case.expert_dp, experts)

    def _bucket(self, group: str, size: int, parameters: int) -> None:
        if not self.case.sharded:
            self.add("reduce", "all_reduce", group, 4 * parameters)
            return
        alignment = math.lcm(size, 128)
        padded = -(-parameters // alignment) * alignment
        self.add("reduce", "reduce_scatter", group, 4 * padded)
        # without overlap, each of the two chained optimizers gathers everything
        self.add("gather", "all_gather", group, 2 * padded, 2 if self.case.ep > 1 else 1)

    def _step(self) -> None:
        case, layers = self.case, LAYERS // self.case.pp
        if case.sp:  # gradients of what sees a part of the sequence on each rank
            replicated = layers * 2 * HIDDEN + HIDDEN * self.last
            replicated += layers * EXPERTS * HIDDEN if case.ep > 1 else 0
            self.add("step", "all_reduce", "tp", 4 * replicated)
        if case.tied and case.pp > 1 and (self.first or self.last):
            self.add("step", "all_reduce", "embd", 4 * VOCAB // case.tp * HIDDEN)
        self.add("step", "all_reduce", "world" if case.sharded else "mp", 4)  # norm
        self.add("step", "all_reduce", "world", 4)  # does somebody want to rerun the step?
        self.add("step", "all_reduce", "mp", 4, 3)  # stepped? norm and learning rate for the log
        if self.last:
            self.add("step", "all_reduce", "dp_cp", 8)  # loss and tokens
        if case.ep > 1:  # balance loss by layer
            self.add("step", "all_reduce", "pp", 4 * LAYERS)
            self.add("step", "all_reduce", "tp_cp", 4 * LAYERS)
            self.add("step", "all_reduce", "dp", 4 * LAYERS)


CASES = {
    "tp2": Case(tp=2),
    "tp4 sp dp2": Case(tp=4, sp=True, dp=2),
    "tp2 sp, full recompute": Case(tp=2, sp=True, recompute="full"),
    "tp2, full recompute": Case(tp=2, recompute="full"),
    "cp4 ring": Case(cp=4),
    "tp2 sp cp2 ring": Case(tp=2, sp=True, cp=2, dp=2),
    "cp2, attention again": Case(cp=2, recompute="core_attn"),
    "cp2 gathered": Case(cp=2, ring="all_gather"),
    "cp4 a2a": Case(cp=4, ring="a2a"),
    "tp2 sp cp2 a2a": Case(tp=2, sp=True, cp=2, ring="a2a"),
    "pp2 dp4": Case(pp=2, dp=4),
    "pp4": Case(pp=4),
    "pp2 vpp2": Case(pp=2, vpp=2),
    "tp2 sp pp2 vpp2": Case(tp=2, sp=True, pp=2, vpp=2, dp=2),
    "pp2 tied": Case(pp=2, tied=True, tp=2, sp=True),
    "dp8": Case(dp=8),
    "tp2 dp4 plain": Case(dp=4, sharded=False, tp=2),
    "ep4": Case(ep=4, dp=4),
    "ep2 dp4": Case(ep=2, dp=4),
    "tp2 sp ep4 dp4": Case(tp=2, sp=True, ep=4, dp=4),
    "tp2 sp cp2 ep4 pp2 dp2": Case(tp=2, sp=True, cp=2, ep=4, pp=2, dp=2),
    "ep2, full recompute": Case(ep=2, dp=2, recompute="full"),
}
FAST = ("tp4 sp dp2", "tp2 sp pp2 vpp2", "tp2 sp cp2 ep4 pp2 dp2")


def answers(folder: Path, cases: list[Case]) -> list[dict]:
    requests = [
        {"module": emulation.GPT, "args": case.arguments(), "cwd": str(folder),
         "device": emulation.H100, "world_size": case.world, "gpus_per_node": 8,
         "frameworks": ["primus_ext.frameworks.megatron"], "result": str(folder / f"{i}.json")}
        for i, case in enumerate(cases)
    ]  # fmt: skip
    path = folder / "requests.json"
    path.write_text(json.dumps(requests))
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "primus_ext.emulate.batch", str(path)],
        env=environment(), cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = []
    for i in range(len(cases)):
        result = folder / f"{i}.json"
        assert result.exists(), run.stderr[-3000:]
        found.append(json.loads(result.read_text()))
    return found


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(FAST, id="fast"),
        pytest.param([n for n in CASES if n not in FAST], id="others", marks=pytest.mark.slow),
    ],
)
def test_every_collective_of_a_step_is_what_arithmetic_says(
    tmp_path: Path, names: list[str]
) -> None:
    cases = [CASES[name] for name in names]
    wrong = {}
    for name, case, answer in zip(names, cases, answers(tmp_path, cases), strict=True):
        assert answer["status"] == "ok", (name, answer["message"])
        differences = compare(case, answer)
        if differences:
            wrong[name] = differences
    assert not wrong, json.dumps(wrong, indent=1)


def compare(case: Case, answer: dict) -> list[str]:
    """Rows that differ, on any pipeline rank."""
    plan = trace_io.plan_from_plain(answer["plan"])
    traces = trace_io.traces_from_plain(answer["traces"])
    by_stage = {stage: trace for trace in traces for stage in trace.pp_ranks}
    stages, shape = [by_stage[s] for s in range(case.pp)], compose.schedule_shape(plan)
    transfers = inventory.pipeline_transfers(stages, shape, plan.precision.params)
    differences = []
    for stage, trace in enumerate(stages):
        layout = {"tp": case.tp, "cp": case.cp, "pp": case.pp, "dp": case.dp, "etp": 1,
                  "ep": case.ep, "expert_dp": case.expert_dp, "order": "tp-cp-ep-dp-pp",
                  "rank": trace.rank}  # fmt: skip
        members = by_arithmetic(layout) | {"world": list(range(case.world))}
        issued: Counter[tuple] = Counter()
        for key, count in (inventory.of_rank(trace, shape) + transfers[stage]).items():
            direction, kind, group, _, size, _, _ = key
            issued[direction, kind, trace.groups[group], size] += count
        expected: Counter[tuple] = Counter()
        for (direction, kind, group, size), count in Expected(case, stage).all().items():
            ranks = tuple(members.get(group, ()))
            if len(ranks) > 1 and count:
                expected[direction, kind, ranks, size] += count
        for key in sorted(issued.keys() | expected.keys()):
            if issued[key] != expected[key]:
                differences.append(
                    f"stage {stage} {key}: issued {issued[key]}, expected {expected[key]}"
                )
    return differences

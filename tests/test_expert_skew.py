"""Experts with uneven load: what is asked, what is recorded of it, what it costs."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from primus_ext import trace_io
from primus_ext.cluster_data import load_cluster
from primus_ext.emulate.session import ProgramError
from primus_ext.frameworks.megatron import expert_load
from primus_ext.project import compose, imbalance
from primus_ext.project.imbalance import slowest_of
from primus_ext.runner.job import Request, number
from primus_ext.runner.outcome import UsageError
from tests.emulation import emulate
from tests.test_expert_routing import ARGS, EP, TOKENS, TOPK, ops_of

FACTOR = 1.5
BENCH = Path(__file__).resolve().parents[1] / "scripts" / "bench"


def config(experts: int = 8, topk: int = 2, ep: int = 4) -> Any:
    return SimpleNamespace(
        num_moe_experts=experts, moe_router_topk=topk, expert_model_parallel_size=ep
    )


@pytest.mark.parametrize(("experts", "topk", "ep", "factor"), [
    (8, 2, 4, 1.0), (8, 2, 4, 1.5), (8, 2, 4, 4.0), (64, 6, 8, 2.3), (8, 2, 1, 1.0),
])  # fmt: skip
def test_a_skewed_layer_keeps_all_tokens_and_its_busiest_rank_turns(
    experts: int, topk: int, ep: int, factor: float
) -> None:
    for place in range(2 * ep):
        counts = expert_load.skewed(place, 960, config(experts, topk, ep), factor)
        assert sum(counts) == 960 * topk and min(counts) >= 0 and max(counts) <= 960
        ranks = expert_load.by_rank(counts, config(experts, topk, ep))
        assert ranks[place % ep] == pytest.approx(factor * 960 * topk / ep, abs=experts / ep)
        assert max(ranks) - ranks[place % ep] <= experts / ep


@pytest.mark.parametrize(("ep", "factor"), [(4, 0.9), (4, 4.1), (1, 1.1)])
def test_a_skew_that_no_router_can_have_is_refused(ep: int, factor: float) -> None:
    with pytest.raises(ProgramError, match=f"expert_skew={factor:g} is not legal: the busiest of"):
        expert_load.skewed(0, 64, config(ep=ep), factor)


def test_numbers_on_the_command_line_are_checked() -> None:
    assert number("rank_cv", "0.01", 0, 0.5) == 0.01 and number("rank_cv", None, 0, 0.5) is None
    for text in ("0.6", "nan", "many"):
        with pytest.raises(UsageError, match=f"rank_cv={text} is not legal: it must be a number"):
            number("rank_cv", text, 0, 0.5)
    assert {"expert_skew", "rank_cv"} <= {field.name for field in dataclasses.fields(Request)}


def test_the_slowest_of_many_is_an_order_statistic() -> None:
    # expected maxima of normal samples lie between these quantiles (Tippett 1925: 3.2414 of 1,000)
    assert slowest_of(1, 0.1, 0.5) == 1.0
    assert slowest_of(1000, 0.01, 0.4) < 1.032414 < slowest_of(1000, 0.01, 0.7)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("skew")
    even = emulate(folder, EP, ARGS + "alltoall")
    skewed = emulate(folder, EP, ARGS + "alltoall", expert_skew=FACTOR)
    found = {}
    for name, answer in (("even", even), ("skewed", skewed)):
        assert answer["status"] == "ok", answer["stderr"][-2000:]
        plan = trace_io.plan_from_plain(answer["plan"])
        found[name] = plan, trace_io.traces_from_plain(answer["traces"]), answer["traces"]
    return found


def test_every_layer_is_recorded_as_its_busiest_rank_has_it(jobs: dict[str, Any]) -> None:
    _, (trace,), (plain,) = jobs["skewed"]
    own = {op_rows for op_rows in _rows(plain)}
    load = trace.experts
    gate = _rows({**plain, "ops": plain["experts"]["ops"], "chunks": [
        {"segments": segments} for segments in plain["experts"]["segments"]
    ]})  # fmt: skip
    most = FACTOR * TOKENS * TOPK
    assert load.rank == 0 and gate == {most} and max(own) == most and min(own) < TOKENS * TOPK
    assert {max(ranks) for ranks in load.layers.values()} == {load.layers["1"][0]}


def _rows(trace: dict[str, Any]) -> set[float]:
    return {
        dict(map(tuple, op["attrs"]))["m"] for op in ops_of(trace, "forward")
        if op["family"] == "grouped_gemm"
    }  # fmt: skip


def test_each_layer_waits_for_its_busiest_rank(jobs: dict[str, Any]) -> None:
    cluster = load_cluster("h100", 1, EP)

    def projected(name: str, alone: bool = False) -> Any:
        plan, traces, _ = jobs[name]
        if alone:
            traces = [dataclasses.replace(trace, experts=None) for trace in traces]
        return compose.project(plan, traces, cluster, mode="simulate")

    even, skewed, alone = projected("even"), projected("skewed"), projected("skewed", alone=True)
    products = [
        next(term.seconds for term in found.breakdown if term.term == "grouped gemm")
        for found in (even, alone, skewed)
    ]  # the step itself is as long as the host needs to issue its small kernels
    assert products[0] < products[1] < products[2]
    assert even.expert_imbalance is None
    found = skewed.expert_imbalance
    assert found.gating == found.largest == pytest.approx(FACTOR, rel=1e-3)
    assert found.pooled == pytest.approx((FACTOR + (EP - FACTOR) / (EP - 1)) / 2, rel=1e-3)
    # the model owes as many FLOPs, and the heaviest rank holds more
    flops = [p.throughput.model_tflops_per_gpu * p.throughput.step_s for p in (even, skewed)]
    assert flops[1] == pytest.approx(flops[0], rel=0.01)
    assert skewed.memory.per_role[0].peak_bytes > even.memory.per_role[0].peak_bytes
    assert imbalance.of_stages(jobs["even"][1]) is None


def test_a_skew_of_one_rank_s_experts_is_refused_with_one_sentence(tmp_path: Path) -> None:
    answer = emulate(tmp_path, EP, ARGS + "alltoall", expert_skew=EP + 1.0)
    assert (answer["status"], answer["exit_code"]) == ("error", 2)
    assert answer["message"].startswith("expert_skew=5 is not legal: the busiest of ep=4 ranks")


@pytest.mark.slow
def test_the_correction_is_right_on_a_real_skewed_run() -> None:
    """Two processes, gloo: the ratio skewed/even of one interleaved run against the projection."""
    spec = importlib.util.spec_from_file_location("expert_skew", BENCH / "expert_skew.py")
    assert spec is not None and spec.loader is not None
    bench = sys.modules["expert_skew"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    found = bench.compare(1.6, 12)
    assert abs(found.error) <= 0.08, found
    assert abs(found.error) < abs(found.uncorrected), found
    assert found.pooled_imbalance < found.per_layer

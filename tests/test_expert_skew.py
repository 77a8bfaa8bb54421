"""Experts with uneven load: what is asked, what is recorded of it, what it costs and holds."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primus_ext import trace_io
from primus_ext.cluster_data import load_cluster
from primus_ext.emulate.session import ProgramError
from primus_ext.frameworks.megatron import expert_load, expert_skew
from primus_ext.project import compose, imbalance
from primus_ext.project.imbalance import slowest_of
from primus_ext.project.result import Projection
from primus_ext.runner.outcome import UsageError
from primus_ext.runner.uneven import Uneven
from primus_ext.trace import ExpertLoad
from tests.emulation import emulate, ops_of
from tests.test_expert_routing import ARGS, EP, TOKENS, TOPK

FACTOR = 1.75
"""Of which every layer's counts are whole numbers."""
BENCH = Path(__file__).resolve().parents[1] / "scripts" / "bench"


def config(experts: int = 8, topk: int = 2, ep: int = 4) -> Any:
    return SimpleNamespace(
        num_moe_experts=experts, moe_router_topk=topk, expert_model_parallel_size=ep
    )


@st.composite
def layers(draw: st.DrawFn) -> tuple[Any, float, int, list[tuple[int, ...]]]:
    """A model, a legal skew, tokens, and the counts of a stage's layers."""
    ep = draw(st.integers(2, 8))
    model = config(experts=ep * draw(st.integers(1, 8)), ep=ep)
    model.moe_router_topk = draw(st.integers(1, min(8, model.num_moe_experts)))
    most = min(ep, model.num_moe_experts / model.moe_router_topk)
    factor = draw(st.floats(1.0, most, exclude_min=most > 1))
    expert_skew.require_legal(factor, model)
    tokens, first = draw(st.integers(1, 5000)), draw(st.integers(0, 100))
    number = draw(st.integers(1, 20))
    places = range(first, first + number)
    return model, factor, tokens, [
        expert_skew.skewed(place, tokens, model, factor) for place in places
    ]  # fmt: skip


@given(layers())
def test_a_skewed_layer_keeps_all_tokens(
    case: tuple[Any, float, int, list[tuple[int, ...]]]
) -> None:
    model, factor, tokens, rows = case
    local = model.num_moe_experts / model.expert_model_parallel_size
    for counts in rows:
        assert sum(counts) == tokens * model.moe_router_topk
        assert min(counts) >= 0 and max(counts) <= tokens
        busiest = max(expert_load.by_rank(counts, model))
        assert busiest == pytest.approx(
            factor * sum(counts) / model.expert_model_parallel_size, abs=local
        )


@given(layers())
def test_pooled_lies_between_even_and_what_gates(
    case: tuple[Any, float, int, list[tuple[int, ...]]]
) -> None:
    model, _, _, rows = case
    by_layer = {str(i + 1): expert_load.by_rank(row, model) for i, row in enumerate(rows)}
    trace: Any = SimpleNamespace(experts=ExpertLoad(layers=by_layer, rank=0))
    found = imbalance.of_stages([trace])
    assert found is not None
    near = 1 + 1e-9
    assert 1 <= found.pooled * near <= found.gating * near**2 <= found.largest * near**3
    busiest = [{r for r, n in enumerate(ranks) if n == max(ranks)} for ranks in by_layer.values()]
    if set.intersection(*busiest):  # one rank gates every layer, perhaps beside others
        assert found.pooled == pytest.approx(found.gating, rel=1e-12)
    else:
        assert found.pooled < found.gating


@given(layers())
def test_the_heaviest_rank_is_the_last_layer_s_busiest(
    case: tuple[Any, float, int, list[tuple[int, ...]]]
) -> None:
    model, _, _, rows = case
    by_layer = [expert_load.by_rank(row, model) for row in rows]
    heaviest = expert_load.heaviest_of(by_layer)
    sums = [sum(ranks) for ranks in zip(*by_layer, strict=True)]
    assert sums[heaviest] == max(sums) and by_layer[-1][heaviest] == max(by_layer[-1])


def test_layers_turn_the_busiest_rank_and_nothing_else() -> None:
    assert expert_skew.skewed(0, 10, config(4, 1, 4), 2.0) == (5, 2, 2, 1)
    assert expert_skew.skewed(1, 10, config(4, 1, 4), 2.0) == (1, 5, 2, 2)
    assert expert_skew.skewed(6, 10, config(4, 1, 4), 2.0) == (2, 1, 5, 2)
    assert expert_skew.skewed(1, 8, config(8, 2, 4), 4.0) == (0, 0, 8, 8, 0, 0, 0, 0)


@pytest.mark.parametrize(("ep", "factor"), [(4, 0.9), (4, 4.1), (1, 1.1), (4, float("nan"))])
def test_a_skew_that_no_router_can_have_is_refused(ep: int, factor: float) -> None:
    with pytest.raises(ProgramError, match=f"expert_skew={factor:g} is not legal: the busiest of"):
        expert_skew.require_legal(factor, config(ep=ep))


def test_a_model_without_experts_has_no_skew() -> None:
    with pytest.raises(ProgramError, match="expert_skew=1.5 is not legal: the model has no expert"):
        expert_skew.require_legal(1.5, SimpleNamespace(num_moe_experts=None, moe_router_topk=2))


def test_numbers_on_the_command_line_are_checked() -> None:
    assert Uneven.of("1.5", "0.01", None, "simulate") == Uneven(1.5, 0.01)
    assert Uneven.of(None, None, "counts.json", "simulate") == Uneven(None, None)
    for text in ("0.6", "nan", "many"):
        with pytest.raises(UsageError, match=f"rank_cv={text} is not legal: it must be a number f"):
            Uneven.of(None, text, None, "simulate")
    for text in ("0.9", "inf", "much"):
        with pytest.raises(UsageError, match=f"expert_skew={text} is not legal: it must be a numb"):
            Uneven.of(text, None, None, "simulate")
    with pytest.raises(UsageError, match="expert_skew=2 is not legal with .projection.routing"):
        Uneven.of("2", None, "counts.json", "simulate")


@pytest.mark.parametrize("given", [("2", None, None), (None, None, "counts.json")])
def test_a_measured_router_can_t_be_told_what_to_choose(given: tuple[str | None, ...]) -> None:
    with pytest.raises(UsageError, match="is not legal with mode both: a router that is measured"):
        Uneven.of(*given, "both")
    assert Uneven.of(None, "0.1", None, "measure") == Uneven(None, 0.1)


def test_the_slowest_of_many_is_an_order_statistic() -> None:
    # expected maxima of normal samples lie between these quantiles (Tippett 1925: 3.2414 of 1,000)
    assert slowest_of(1, 0.1, 0.5) == 1.0
    assert slowest_of(1000, 0.01, 0.4) < 1.032414 < slowest_of(1000, 0.01, 0.7)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Plan, traces and plain traces of a job without a word on skew, with 1, and with more."""
    folder = tmp_path_factory.mktemp("skew")
    found = {}
    for name, asked in {"unsaid": {}, "even": {"expert_skew": 1.0},
                        "skewed": {"expert_skew": FACTOR}}.items():  # fmt: skip
        answer = emulate(folder, EP, ARGS + "alltoall", **asked)
        assert answer["status"] == "ok", answer["stderr"][-2000:]
        plan = trace_io.plan_from_plain(answer["plan"])
        found[name] = plan, trace_io.traces_from_plain(answer["traces"]), answer["traces"]
    return found


def projected(job: Any, alone: bool = False) -> Projection:
    plan, traces, _ = job
    if alone:
        traces = [dataclasses.replace(trace, experts=None) for trace in traces]
    return compose.project(plan, traces, load_cluster("h100", 1, EP), mode="simulate")


def test_a_skew_of_one_is_what_is_projected_without(jobs: dict[str, Any]) -> None:
    """Every byte and every second; only what is said of the experts is more."""
    unsaid, even = projected(jobs["unsaid"]), projected(jobs["even"])
    for field in ("memory", "throughput", "breakdown", "collectives", "model", "provenance"):
        assert getattr(even, field) == getattr(unsaid, field), field
    (trace,), (plain,) = jobs["unsaid"][1], jobs["even"][1]
    assert dataclasses.replace(plain, experts=None) == trace
    assert unsaid.expert_imbalance is None and even.expert_imbalance is not None
    assert (even.expert_imbalance.gating, even.expert_imbalance.pooled) == (1, 1)


def test_every_layer_is_recorded_as_its_busiest_rank_has_it(jobs: dict[str, Any]) -> None:
    _, (trace,), (plain,) = jobs["skewed"]
    own, load = _rows(plain), trace.experts
    gate = _rows({**plain, "ops": plain["experts"]["ops"], "chunks": [
        {"segments": segments} for segments in plain["experts"]["segments"]
    ]})  # fmt: skip
    most = FACTOR * TOKENS * TOPK
    assert gate == {most} and max(own) == most and min(own) < TOKENS * TOPK
    # two layers: the busiest of the last one holds most when that one runs backward
    assert load.rank == trace.rank == 1 and load.layers["2"][1] == load.layers["1"][0]


def _rows(trace: dict[str, Any]) -> set[float]:
    return {
        dict(map(tuple, op["attrs"]))["m"] for op in ops_of(trace, "forward")
        if op["family"] == "grouped_gemm"
    }  # fmt: skip


def test_each_layer_waits_for_its_busiest_rank(jobs: dict[str, Any]) -> None:
    even, skewed = projected(jobs["even"]), projected(jobs["skewed"])
    alone = projected(jobs["skewed"], alone=True)

    def seconds(found: Projection, name: str) -> float:
        return next(term.seconds for term in found.breakdown if term.term == name)

    # the step itself is as long as the host needs to issue its small kernels
    for name in ("grouped gemm", "expert communication"):
        products = [seconds(found, name) for found in (even, alone, skewed)]
        assert products[0] < products[1] < products[2], name
    assert seconds(skewed, "attention") == seconds(even, "attention")
    found = skewed.expert_imbalance
    assert found is not None
    assert found.gating == found.largest == pytest.approx(FACTOR, rel=1e-3)
    assert found.pooled == pytest.approx((FACTOR + (EP - FACTOR) / (EP - 1)) / 2, rel=1e-3)
    # the model owes as many FLOPs
    flops = [p.throughput.model_tflops_per_gpu * p.throughput.step_s for p in (even, skewed)]
    assert flops[1] == pytest.approx(flops[0], rel=1e-9)


def test_memory_is_that_of_the_rank_that_holds_most(
    jobs: dict[str, Any], tmp_path: Path
) -> None:
    """Megatron's own loop on every rank of the skewed job says the same, to the byte."""
    whole = emulate(
        tmp_path, EP, ARGS + "alltoall", expert_skew=FACTOR, whole=True, ranks=list(range(EP))
    )
    assert whole["status"] == "ok", whole["stderr"][-2000:]
    peaks = {rank["rank"]: rank["peak_bytes"] for rank in whole["traces"]}
    composed = projected(jobs["skewed"]).memory.per_role[0].peak_bytes
    assert composed == max(peaks.values()) == peaks[jobs["skewed"][1][0].rank]
    even = projected(jobs["even"]).memory.per_role[0].peak_bytes
    assert min(peaks.values()) < even < composed


def test_a_skew_of_one_rank_s_experts_is_refused_with_one_sentence(tmp_path: Path) -> None:
    answer = emulate(tmp_path, EP, ARGS + "alltoall", expert_skew=EP + 1.0)
    assert (answer["status"], answer["exit_code"]) == ("error", 2)
    assert answer["message"].startswith("expert_skew=5 is not legal: the busiest of ep=4 ranks")


@pytest.mark.slow
def test_the_correction_is_right_on_a_real_skewed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes, gloo: ratios skewed/even of one interleaved run against the projection.

    Of the core's time, which other programs change little, and the mean of three skews.
    """
    monkeypatch.syspath_prepend(BENCH)
    bench = importlib.import_module("expert_skew")
    found = bench.compare("wide experts", 6)
    assert len(found) == 3
    assert sum(abs(row.error) for row in found) / len(found) <= 0.08, found
    for row in found:
        assert abs(row.error) < abs(row.uncorrected), row
        assert row.pooled < row.per_layer == pytest.approx(row.skew, rel=0.01)

"""The host as the slower of the two."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from primus_ext.cluster_data import load_cluster
from primus_ext.cost.conditions import Conditions
from primus_ext.cost.host_time import HostTime, graph_modules
from primus_ext.cost.model import CostModel
from primus_ext.project import compose, stage
from primus_ext.project.ledger import TermName
from primus_ext.trace import LAYERS, Call, Family, Op, RankTrace
from tests.emulation import emulate
from tests.synthetic import Job, plan, trace, traces

CLUSTER = load_cluster("h100", 1, 1)
JOB = Job(layers=4, hidden=256, heads=2, kv_heads=2, ffn=512, seq=128)
"""Kernels far shorter than the time to issue one."""


def host(**changes: object) -> HostTime:
    return dataclasses.replace(HostTime(call_s=30e-6, launch_s=2e-6), **changes)


def forward(host_time: HostTime | None) -> stage.ChunkTimes:
    prices = CostModel(CLUSTER, conditions=Conditions(host=host_time))
    return stage.price(prices, recorded()).chunks[0]


def recorded() -> RankTrace:
    return trace(JOB, 0)


def calls_of(direction: str) -> int:
    """Calls of a microbatch, those that repeat the op before them left out."""
    total = 0
    for segment in recorded().chunks[0].segments:
        calls = [c for c in getattr(segment, direction)
                 if recorded().ops[c.op].family is not Family.HOST]  # fmt: skip
        firsts = [c for i, c in enumerate(calls) if not i or calls[i - 1].op != c.op]
        total += segment.count * len(firsts)
    return total


def test_short_kernels_take_as_long_as_issuing_them() -> None:
    found, ahead = forward(host()), forward(None)
    assert found.forward.seconds == pytest.approx(30e-6 * calls_of("forward"), rel=0.05)
    waited = found.forward.exposed[TermName.HOST]
    assert waited == pytest.approx(found.forward.seconds - ahead.forward.seconds)


def test_a_host_that_is_ahead_costs_nothing() -> None:
    found, ahead = forward(host(call_s=1e-12, launch_s=0.0)), forward(None)
    assert found.backward.seconds == ahead.backward.seconds
    assert TermName.HOST not in {t for t, s in found.backward.exposed.items() if s}


def test_a_host_that_waits_for_every_kernel_adds_its_time() -> None:
    found, ahead = forward(host(blocking=True, launch_s=30e-6)), forward(None)
    calls = sum(
        segment.count * sum(recorded().ops[c.op].family is not Family.HOST for c in segment.forward)
        for segment in recorded().chunks[0].segments
    )
    assert found.forward.seconds - ahead.forward.seconds == pytest.approx(30e-6 * calls)


def test_a_host_that_waits_for_every_kernel_overlaps_nothing() -> None:
    job = Job(tp=8, layers=2, asynchronous=True)
    cluster = load_cluster("h100", 1, 8)
    for blocking in (False, True):
        slow = host(call_s=0.0, launch_s=0.0, blocking=blocking)
        cost = CostModel(cluster, conditions=Conditions(host=slow))
        back = stage.price(cost, trace(job, 0)).chunks[0].backward
        name = TermName.TENSOR
        hidden = back.busy[name] - back.exposed[name]
        assert (hidden == pytest.approx(0.0, abs=1e-12)) == blocking, hidden


def test_a_library_that_loops_over_kernels_is_one_call() -> None:
    ops = [Op("a", Family.MEMORY, (), (), 0, 8), Op("b", Family.HOST, (), (), 0, 8)]
    calls = [Call(i, "forward", "") for i in (0, 0, 0, 1, 0)]
    assert host().seconds(ops, calls) == pytest.approx(30e-6 + 3 * 2e-6)
    assert host().seconds(ops, calls[3:]) == pytest.approx(30e-6)


def test_what_graphs_hold_is_not_issued() -> None:
    segment = next(s for s in recorded().chunks[0].segments if s.kind in LAYERS)
    named = dataclasses.replace(segment, forward=(
        Call(0, "forward", "self_attention.linear_qkv"), Call(0, "forward", "mlp.linear_fc1"),
        Call(0, "forward", "mlp.router"), Call(0, "forward", "")))  # fmt: skip
    for graphs, share in (((), 0.0), (("attn",), 0.25), (("mlp",), 0.5), (("full",), 1.0),
                          (("attn", "moe_router"), 0.5), (("full_iteration",), 1.0)):  # fmt: skip
        assert host(graphs=graphs).captured(named) == share, graphs
    edge = next(s for s in recorded().chunks[0].segments if s.kind not in LAYERS)
    assert host(graphs=("full",)).captured(edge) == 0.0
    assert host(graphs=("full_iteration",)).captured(edge) == 1.0


def test_the_users_environment_and_graphs_reach_the_price() -> None:
    def step(**flags: str) -> float:
        job = dataclasses.replace(plan(JOB), flags={**plan(JOB).flags, **flags})
        return compose.project(job, traces(JOB), CLUSTER, mode="simulate").throughput.step_s

    assert step(CUDA_LAUNCH_BLOCKING="1") > step() > step(cuda_graph_impl="full_iteration")
    assert step(CUDA_LAUNCH_BLOCKING="0") == step() == step(cuda_graph_impl="none")


def test_graphs_are_set_aside_and_the_plan_says_what_they_hold(tmp_path: Path) -> None:
    args = ("--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
            "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 8 "
            "--vocab-size 127 ")  # fmt: skip
    graphs = "--cuda-graph-impl local --cuda-graph-modules attn --te-rng-tracker"
    plain, graphed = emulate(tmp_path, 8, args), emulate(tmp_path, 8, args + graphs)
    assert graphed["status"] == plain["status"] == "ok", graphed
    assert graphed["traces"] == plain["traces"]
    flags = graphed["plan"]["flags"]
    assert (flags["cuda_graph_impl"], flags["cuda_graph_modules"]) == ("local", "attn")
    job = dataclasses.replace(plan(JOB), flags=flags)
    assert graph_modules(job) == ("attn",)

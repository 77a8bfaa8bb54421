"""Allocations as recorded from Megatron: they add up to the memory of the trace."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from primus_ext import trace_io
from primus_ext.cluster import Cluster
from primus_ext.cluster_data import load_cluster
from primus_ext.plan import Plan
from primus_ext.project import compose, inflight, memory
from primus_ext.project.allocator_config import AllocatorConfig
from primus_ext.project.footprint import Replayed, footprint
from primus_ext.project.replay import Replay, highest
from primus_ext.project.schedule import programs
from primus_ext.trace import RankTrace
from tests.emulation import emulate
from tests.test_memory_oracle import MODEL, PP2, PP4, TP2, VPP2

PARTS = ("parameters", "gradients", "optimizer", "workspaces")
SCALARS = 16 * 8 + 64
"""Bytes of losses and numbers of tokens: a replay runs fewer microbatches."""
EXPANDABLE = "expandable_segments:True"
slow = pytest.mark.slow


@dataclasses.dataclass
class Recorded:
    answer: dict[str, Any]
    plan: Plan
    stages: tuple[RankTrace, ...]
    cluster: Cluster


def recorded(tmp_path: Path, world: int, args: str) -> Recorded:
    answer = emulate(tmp_path, world, MODEL + args)
    assert answer["status"] == "ok", answer
    plan = trace_io.plan_from_plain(answer["plan"])
    cluster = load_cluster("h100", 1, world)
    traces = trace_io.traces_from_plain(answer["traces"])
    return Recorded(answer, plan, compose.stage_traces(plan, traces, cluster), cluster)


@pytest.fixture(scope="module")
def two_stages(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTORCH_CUDA_ALLOC_CONF", EXPANDABLE)
        return recorded(tmp_path_factory.mktemp("two_stages"), 2, PP2)


def replayed(found: Recorded) -> list[int]:
    """Highest bytes of live tensors of every stage."""
    shape = compose.schedule_shape(found.plan)
    short, sizes = inflight.steady(shape), memory.boundary_bytes(found.stages, shape)
    order = programs(short)
    return [
        highest(Replay(trace, rank, short, order[rank], sizes), 3)
        for rank, trace in enumerate(found.stages)
    ]


def composed(found: Recorded) -> list[int]:
    shape = compose.schedule_shape(found.plan)
    roles = memory.per_role(found.plan, found.stages, found.cluster, shape)
    return [role.peak_bytes for role in roles]


def same(found: Recorded) -> bool:
    """Whether both peaks agree but for scalars that the schedule adds up."""
    pairs = zip(replayed(found), composed(found), strict=True)
    return all(abs(one - other) <= SCALARS for one, other in pairs)


def test_the_replayed_peak_is_the_composed_peak(two_stages: Recorded) -> None:
    assert same(two_stages)


@slow
@pytest.mark.parametrize(
    ("world", "args"),
    [
        pytest.param(
            8, TP2 + PP4 + VPP2 + "--no-overlap-p2p-communication", id="interleaved"
        ),
        pytest.param(2, PP2 + "--fp8-format hybrid --fp8-recipe delayed", id="fp8 delayed"),
    ],
)
def test_the_replayed_peak_is_the_composed_peak_too(
    tmp_path: Path, world: int, args: str
) -> None:
    found = recorded(tmp_path, world, args)
    assert same(found)


def test_what_stays_adds_up_part_by_part(two_stages: Recorded) -> None:
    for trace in two_stages.stages:
        static, kinds = trace.static_events, trace.allocations
        assert static is not None
        live: dict[int, int] = {}
        number = 0
        for event in (*static.setup, *static.first_step):
            if event >= 0:
                live[number] = event
                number += 1
            else:
                del live[-event - 1]
        sizes: Counter[str] = Counter()
        for kind in (*live.values(), *static.workspaces, *static.late_workspaces):
            sizes[kinds[kind].phase] += kinds[kind].bytes
        assert sizes == {part: getattr(trace.static, part) for part in PARTS}


def test_every_saved_byte_has_a_module(two_stages: Recorded) -> None:
    for trace in two_stages.stages:
        events = trace.chunks[0].events
        assert events is not None
        made = [event for event in events.forward if event >= 0]
        freed = {-event - 1 for event in events.forward if event < 0}
        saved = [trace.allocations[kind] for n, kind in enumerate(made) if n not in freed]
        sizes = trace.chunks[0].memory
        held = sizes.saved_bytes + sizes.logged_bytes + sizes.counted_bytes
        assert sum(kind.bytes for kind in saved) == held
        unknown = sum(kind.bytes for n, kind in enumerate(saved) if kind.module == "other")
        received = trace.chunks[0].boundary_bytes or two_stages.stages[0].chunks[0].boundary_bytes
        # token ids, labels, loss mask and positions of the batch; the stage's input
        assert unknown <= received + 4 * 8 * two_stages.plan.batch.mbs * two_stages.plan.batch.seq
        assert {kind.phase for kind in saved} == {"forward"}


def test_events_are_compact(two_stages: Recorded) -> None:
    for plain in two_stages.answer["traces"]:
        layers = two_stages.plan.model.num_layers // 2
        events = [chunk["events"] for chunk in plain["chunks"]]
        assert len(json.dumps(events)) < 2000 * layers
        assert len(json.dumps(plain["allocations"])) < 50_000


def test_the_allocator_settings_of_the_command_count(two_stages: Recorded) -> None:
    plan, stages = two_stages.plan, two_stages.stages
    assert plan.flags["PYTORCH_CUDA_ALLOC_CONF"] == EXPANDABLE
    projection = compose.project(plan, stages, two_stages.cluster, mode="simulate")
    said = f"allocator settings are PYTORCH_CUDA_ALLOC_CONF={EXPANDABLE}"
    assert said in projection.not_modelled
    shape = compose.schedule_shape(plan)
    sizes, short = memory.boundary_bytes(stages, shape), inflight.steady(shape)
    for rank, role in enumerate(projection.memory.per_role):
        library = (role.library_bytes // 2, role.library_bytes // 2)  # forward and backward alike
        config = AllocatorConfig(expandable_segments=True)
        expected = footprint(Replayed(stages[rank], rank, short, sizes, config, library))
        other = Replayed(stages[rank], rank, short, sizes, AllocatorConfig(), library)
        classic = footprint(other)
        assert role.allocator_bytes == expected.reserved_bytes != classic.reserved_bytes
        assert role.reserved_bytes == expected.reserved_bytes + sum(role.outside.values())
        assert role.allocated_bytes is not None
        assert role.peak_bytes <= role.allocated_bytes <= expected.reserved_bytes


def test_the_largest_allocations_are_named(two_stages: Recorded) -> None:
    shape = compose.schedule_shape(two_stages.plan)
    first, last = memory.per_role(
        two_stages.plan, two_stages.stages, two_stages.cluster, shape
    )  # fmt: skip
    assert {a.phase for a in first.top_allocations} >= {"parameters", "gradients", "optimizer"}
    named = {a.module for a in first.top_allocations if a.phase == "forward"}
    assert any(module.startswith("dense_layer.") for module in named)
    layers = two_stages.plan.model.num_layers // 2
    swiglu = [a for a in first.top_allocations if a.module.endswith("mlp.linear_fc1")]
    assert swiglu and all(a.count % layers == 0 for a in swiglu)  # of two microbatches
    assert first.timeline is not None and last.timeline is not None
    assert first.timeline.pieces[-1] == last.timeline.pieces[-1] == "optimizer"

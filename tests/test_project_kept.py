"""Projections that share what they found out are the ones that nothing was shared for."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys

import pytest

from primus_ext.cluster_data import load_cluster
from primus_ext.cost.model import CostModel
from primus_ext.plan import Plan
from primus_ext.project import compose, stage
from primus_ext.project.compose import PlanError
from primus_ext.project.kept import Kept
from primus_ext.trace import to_plain
from tests.synthetic import Job, plan, traces

CLUSTER = load_cluster("h100", 8, 8)
JOB = Job(tp=4, pp=4, dp=4, layers=80, hidden=8192, ffn=28672, heads=64, seq=8192)


def with_microbatches(asked: Plan, count: int) -> Plan:
    batch = dataclasses.replace(asked.batch, gbs=asked.batch.mbs * asked.batch.dp * count)
    return dataclasses.replace(asked, batch=batch)


def test_what_is_shared_changes_nothing() -> None:
    kept = Kept(CLUSTER)
    jobs = [
        dataclasses.replace(JOB, vpp=vpp, overlap_p2p=vpp > 1, distributed_optimizer=sharded)
        for vpp, sharded in itertools.product((1, 2, 5), (True, False))
    ]
    asked = [(plan(job), traces(job)) for job in jobs]
    for count, schedule in ((8, None), (32, None), (12, "zero-bubble"), (8, "all"), (8, None)):
        for one, recorded in asked:
            changed = with_microbatches(one, count)
            alone, shared = (
                compose.project(changed, recorded, CLUSTER, mode="simulate", schedule=schedule,
                                kept=known)
                for known in (None, kept)
            )  # fmt: skip
            assert json.dumps(to_plain(shared)) == json.dumps(to_plain(alone))


def test_a_warm_projection_prices_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, recorded, kept = plan(JOB), traces(JOB), Kept(CLUSTER)
    first = compose.project(asked, recorded, CLUSTER, mode="simulate", schedule="all", kept=kept)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("priced again")

    monkeypatch.setattr(stage, "price", refuse)
    monkeypatch.setattr(CostModel, "op_seconds", refuse)
    again = compose.project(asked, recorded, CLUSTER, mode="simulate", schedule="all", kept=kept)
    assert again == first


def test_what_is_kept_of_another_target_is_refused() -> None:
    other = load_cluster("h200", 8, 8)
    with pytest.raises(PlanError, match="what is kept is of h200_8x8, not of this h100_8x8"):
        compose.project(plan(JOB), traces(JOB), CLUSTER, mode="simulate", kept=Kept(other))


def test_the_oldest_trace_goes_first() -> None:
    kept, made = Kept(CLUSTER, most=2), []
    first, second, third = traces(JOB)
    for trace in (first, second, first, third, first, second):
        kept.of(trace, "value", lambda t=trace: made.append(t))
    assert [t.rank for t in made] == [first.rank, second.rank, third.rank, second.rank]


def test_composition_imports_nothing_heavy() -> None:
    code = (
        "import sys, primus_ext.project.compose\n"
        "print([m for m in ('torch', 'numpy', 'hydra', 'pyarrow', 'rich') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"

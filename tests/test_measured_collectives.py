"""Measured collectives in the place of the model: fit, group sizes, tiers, evidence, a slow link."""

from __future__ import annotations

import dataclasses

import pytest

from primus_ext.cluster_data import load_cluster
from primus_ext.collective_samples import EXCHANGE, Sample, Sweep
from primus_ext.cost.group_sizes import steps, volume
from primus_ext.cost.measured_collectives import MeasuredCollectives
from primus_ext.cost.model import CostModel
from primus_ext.cost.priced import CostError
from primus_ext.project.compose import project
from primus_ext.trace import Collective, CollectiveKind
from tests.synthetic import Job, plan, traces

KINDS = tuple(CollectiveKind)
SIZES = tuple(2**power for power in range(10, 26))
START, RATE = 2e-5, 5e-10
"""Of one step and one byte, where the true times of a test follow the laws of rings."""


def truth(kind: CollectiveKind, members: int, size: int, slow: float = 1.0) -> float:
    return slow * (START * steps(kind, members) + RATE * volume(kind, members) * size)


def sweep(
    accelerator: str = "h100", groups: tuple[int, ...] = (2, 4, 8), slow: float = 1.0,
    tier: str = "host", cores: int = 2,
) -> Sweep:  # fmt: skip
    samples = []
    for kind in KINDS:
        variants = ("", EXCHANGE) if kind is CollectiveKind.SEND_RECV else ("",)
        for variant in variants:
            pairs = kind is CollectiveKind.SEND_RECV and not variant
            for members in (2,) if pairs else groups:
                for size in SIZES if kind is not CollectiveKind.BARRIER else (0,):
                    seconds = truth(kind, members, size, slow)
                    samples.append(
                        Sample(kind=kind, variant=variant, dtype="fp32", tier=tier,
                               members=members, bytes=size, seconds=((seconds,) * 3,))
                    )  # fmt: skip
    return Sweep(
        backend="nccl", accelerator=accelerator, product="P", processes=max(groups),
        host_cores=cores, versions={"torch": "2.14.1"}, samples=tuple(samples),
    )  # fmt: skip


def measured(*sweeps: Sweep) -> MeasuredCollectives:
    return MeasuredCollectives(sweeps or (sweep(),), "sweep.json")


def seconds(model: CostModel, kind: CollectiveKind, size: int, members: int) -> float:
    collective = Collective(kind=kind, group="tp", bytes=size, dtype="fp32")
    return model.collective_seconds(collective, range(members)).seconds


@pytest.mark.parametrize("kind", KINDS)
def test_measured_times_go_before_the_model(kind: CollectiveKind) -> None:
    model = CostModel(load_cluster("h100", 1, 8), alone=True, measured_collectives=measured())
    size = 0 if kind is CollectiveKind.BARRIER else 3 << 20
    collective = Collective(kind=kind, group="tp", bytes=size, dtype="fp32")
    priced = model.collective_seconds(collective, range(4))
    assert priced.evidence == "measured" and "groups of 2, 4, 8" in priced.basis
    assert priced.seconds == pytest.approx(truth(kind, 4, size), rel=1e-6)
    assert priced.interval is not None and priced.interval[0] <= priced.seconds


def test_a_sweep_of_another_accelerator_is_refused() -> None:
    with pytest.raises(CostError, match="measured on h100, the target mi300x_1x8 has mi300x"):
        CostModel(load_cluster("mi300x", 1, 8), measured_collectives=measured())


def test_a_cpu_has_no_model_of_collectives() -> None:
    with pytest.raises(CostError) as refused:
        seconds(CostModel(load_cluster("cpu", 1, 2)), CollectiveKind.ALL_REDUCE, 1024, 2)
    message = str(refused.value)
    assert "all_reduce over 2 ranks of group tp has no price" in message
    assert "collective_sweep" in message and "+projection.collectives=FILE" in message


JOB = Job(tp=2, pp=2, dp=2, microbatches=4, overlap=True)


def terms(job: Job, slow: float = 1.0, accelerator: str = "h100") -> dict[str, tuple[float, str]]:
    found = project(
        plan(job), traces(job), load_cluster(accelerator, 1, 8), mode="simulate",
        collectives=measured(sweep(accelerator, slow=slow)),
    )  # fmt: skip
    return {term.term: (term.seconds, term.evidence) for term in found.breakdown}


def test_a_slower_link_moves_the_terms_of_communication_and_nothing_else() -> None:
    fast, slow = terms(JOB), terms(JOB, slow=3.0)
    sent = ("tensor-parallel communication", "pipeline p2p", "data-parallel communication")
    for name in sent:
        assert slow[name][0] == pytest.approx(3 * fast[name][0], rel=1e-6), name
        assert fast[name][1].startswith("measured: sweep.json (nccl on P; torch 2.14.1), "), name
    for name in fast.keys() - {*sent, "pipeline bubble", "optimizer"}:
        assert slow[name] == fast[name]


def test_evidence_names_kind_groups_and_sizes() -> None:
    told = terms(JOB)["data-parallel communication"][1]
    assert "reduce_scatter in groups of 2, 4, 8, 1,024 to 33,554,432 bytes" in told
    assert "model" not in told


def test_where_communication_takes_the_cores_nothing_hides_it() -> None:
    job = dataclasses.replace(JOB, asynchronous=True)
    cluster = load_cluster("cpu", 1, 8)
    few = dataclasses.replace(cluster.accelerator.hbm_bytes, value=2)
    many = dataclasses.replace(few, value=64)
    shown = {}
    for name, cores in (("few", few), ("many", many)):
        accelerator = dataclasses.replace(cluster.accelerator, host_cores=cores)
        found = project(
            plan(job), traces(job), dataclasses.replace(cluster, accelerator=accelerator),
            mode="simulate", collectives=measured(sweep("cpu")),
        )  # fmt: skip
        shown[name] = {t.term: (t.seconds, t.exposed_seconds) for t in found.breakdown}
        assert ("communication beside computation" in " ".join(found.not_modelled)) == (
            name == "few"
        )
    for name in ("tensor-parallel communication", "data-parallel communication"):
        assert shown["few"][name][1] == pytest.approx(shown["few"][name][0], rel=1e-6)
        assert shown["many"][name][1] < shown["many"][name][0]

"""Measured collectives in the place of the model: groups, tiers, evidence, a slower link."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from primus_ext.cluster_data import load_cluster
from primus_ext.collective_samples import EXCHANGE, NETWORK, Sample, SamplesError, Sweep, load, save
from primus_ext.cost.group_sizes import steps, volume
from primus_ext.cost.measured_collectives import MeasuredCollectives
from primus_ext.cost.model import CostModel
from primus_ext.cost.priced import CostError
from primus_ext.project.compose import PlanError, project
from primus_ext.project.kept import Kept
from primus_ext.runner import collectives
from primus_ext.trace import Collective, CollectiveKind
from tests.never_train.support import ROOT, run_app
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
    hosts = max(groups) if tier == NETWORK else 1
    return Sweep(
        backend="nccl", accelerator=accelerator, product="P", host_cores=cores, hosts=hosts,
        processes=8 * hosts if tier == NETWORK else max(groups),
        versions={"torch": "2.14.1"}, samples=tuple(samples),
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
    assert "primus-ext collectives --processes 2 --out FILE" in message
    assert "+projection.collectives=FILE" in message


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


def on_cores(job: Job, cores: int, working: float | None) -> dict[str, tuple[float, float]]:
    """Terms of a job of eight processes, ``working`` being the share that takes a core."""
    cluster = load_cluster("cpu", 1, 8)
    figure = dataclasses.replace(cluster.accelerator.hbm_bytes, value=cores)
    accelerator = dataclasses.replace(cluster.accelerator, host_cores=figure)
    known = sweep("cpu", cores=cores)
    if working is not None:
        samples = tuple(
            dataclasses.replace(s, processor_s=(working * s.quietest,)) for s in known.samples
        )
        known = dataclasses.replace(known, samples=samples)
    found = project(
        plan(job), traces(job), dataclasses.replace(cluster, accelerator=accelerator),
        mode="simulate", collectives=measured(known),
    )  # fmt: skip
    assert ("communication beside computation" in " ".join(found.not_modelled)) == (cores == 2)
    return {t.term: (t.seconds, t.exposed_seconds) for t in found.breakdown}


ASYNCHRONOUS = dataclasses.replace(JOB, asynchronous=True)
OVERLAPPED = ("tensor-parallel communication", "data-parallel communication")


@pytest.mark.parametrize("working", [None, 1.0])
def test_where_communication_takes_the_cores_nothing_hides_it(working: float | None) -> None:
    few = on_cores(ASYNCHRONOUS, 2, working)
    many = on_cores(ASYNCHRONOUS, 64, working)
    for name in OVERLAPPED:
        assert few[name][1] == pytest.approx(few[name][0], rel=1e-6)
        assert many[name][1] < many[name][0]


def test_what_takes_no_core_is_hidden() -> None:
    """Between all of it and what many cores hide, in proportion."""
    all_of_it, half, nothing = (on_cores(ASYNCHRONOUS, 2, part) for part in (1.0, 0.5, 0.0))
    for name in OVERLAPPED:
        assert half[name][0] == pytest.approx(all_of_it[name][0], rel=1e-6)
        assert half[name][1] >= 0.5 * half[name][0] * (1 - 1e-6)
        assert nothing[name][1] < half[name][1] < all_of_it[name][1], name


def test_measured_times_narrow_the_interval_of_a_step() -> None:
    job, cluster = Job(tp=2, dp=4, microbatches=1), load_cluster("cpu", 1, 8)
    found = project(
        plan(job), traces(job), cluster, mode="simulate",
        collectives=measured(sweep("cpu", cores=int(cluster.accelerator.host_cores.value))),
    )  # fmt: skip
    sent = sum(t.exposed_seconds for t in found.breakdown if "communication" in t.term)
    interval, step = found.throughput.interval, found.throughput.step_s
    width = math.log(interval["high"] / step)
    assumed = cluster.accelerator.residuals["communication"].value
    # exact lines: what is left is the assumed width of everything else
    assert width == pytest.approx(assumed * (1 - sent / step), rel=0.02)


def test_over_several_hosts_tier_by_tier() -> None:
    both = measured(sweep(tier="network", groups=(2, 4)), sweep())
    model = CostModel(load_cluster("h100", 4, 8), alone=True, measured_collectives=both)
    size = 1 << 24
    reduce, gather, scatter = (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER,
                               CollectiveKind.REDUCE_SCATTER)  # fmt: skip
    asked = Collective(kind=reduce, group="dp", bytes=size, dtype="fp32")
    priced = model.collective_seconds(asked, range(32))
    parts = [truth(scatter, 8, size), truth(reduce, 4, size // 8), truth(gather, 8, size)]
    assert priced.seconds == pytest.approx(sum(parts), rel=1e-6)
    assert priced.interval == pytest.approx((max(parts), sum(parts)), rel=1e-6)
    assert "tier by tier" in priced.basis
    spread = model.collective_seconds(asked, range(0, 32, 8))  # one member a host
    assert spread.seconds == pytest.approx(truth(reduce, 4, size), rel=1e-6)


def test_where_no_measured_time_carries_the_model_answers_and_evidence_says_so() -> None:
    cluster = load_cluster("h100", 2, 8)
    asked = Collective(kind=CollectiveKind.ALL_REDUCE, group="dp", bytes=1 << 20, dtype="fp32")
    with_sweep = CostModel(cluster, measured_collectives=measured())
    across = with_sweep.collective_seconds(asked, range(16))
    assert across == CostModel(cluster).collective_seconds(asked, range(16))
    job = Job(tp=8, dp=2)
    found = project(plan(job), traces(job), cluster, mode="simulate", collectives=measured())
    told = {term.term: term.evidence for term in found.breakdown}
    assert told["tensor-parallel communication"].startswith("measured: ")
    assert told["data-parallel communication"].startswith("model: ")
    assert found.provenance["measured_collectives"]["file"] == "sweep.json"
    on_cpus = CostModel(load_cluster("cpu", 2, 2), measured_collectives=measured(sweep("cpu")))
    with pytest.raises(CostError, match="all_reduce over 4 ranks of group dp has no price"):
        on_cpus.collective_seconds(asked, range(4))


def test_larger_groups_are_extrapolated_with_an_interval() -> None:
    known = measured(sweep(groups=(2, 4)))
    model = CostModel(load_cluster("h100", 1, 8), alone=True, measured_collectives=known)
    asked = Collective(kind=CollectiveKind.ALL_REDUCE, group="tp", bytes=1 << 14, dtype="fp32")
    priced = model.collective_seconds(asked, range(8))
    assert priced.seconds == pytest.approx(truth(asked.kind, 8, asked.bytes), rel=1e-6)
    assert "extrapolated for groups of 8" in priced.basis
    low, high = priced.interval or (0.0, 0.0)
    assert low < 0.7 * priced.seconds and high >= priced.seconds


def test_processes_that_share_cores_take_turns() -> None:
    """Two processes on two cores were measured; four take twice as long, or at best no longer."""
    known = measured(sweep("cpu", groups=(2,)))
    cluster = load_cluster("cpu", 1, 4)
    cores = dataclasses.replace(cluster.accelerator.hbm_bytes, value=2)
    accelerator = dataclasses.replace(cluster.accelerator, host_cores=cores)
    model = CostModel(
        dataclasses.replace(cluster, accelerator=accelerator), measured_collectives=known
    )
    asked = Collective(kind=CollectiveKind.ALL_GATHER, group="tp", bytes=1 << 20, dtype="bf16")
    priced = model.collective_seconds(asked, range(2))
    alone = truth(asked.kind, 2, asked.bytes)
    assert priced.seconds == pytest.approx(2 * alone, rel=1e-6)
    assert priced.interval == pytest.approx((alone, 2 * alone), rel=1e-6)
    assert "times 2 for other than the 2 processes a host" in priced.basis


def test_numbers_are_added_as_they_were_measured_or_as_slowly_as_any() -> None:
    plain = sweep()
    slow = [
        dataclasses.replace(s, dtype="bf16", seconds=((4 * s.seconds[0][0],),))
        for s in plain.samples
        if s.kind is CollectiveKind.ALL_REDUCE
    ]
    both = measured(dataclasses.replace(plain, samples=(*plain.samples, *slow)))
    model = CostModel(load_cluster("h100", 1, 8), alone=True, measured_collectives=both)
    fast = truth(CollectiveKind.ALL_REDUCE, 4, 1 << 20)
    for dtype, expected in (("fp32", 1), ("int32", 1), ("bf16", 4), ("fp16", 4), ("uint8", 4)):
        asked = Collective(CollectiveKind.ALL_REDUCE, "tp", 1 << 20, dtype)
        found = model.collective_seconds(asked, range(4)).seconds
        assert found == pytest.approx(expected * fast, rel=1e-6), dtype


def test_a_pipeline_sends_one_way_and_a_ring_all_at_once() -> None:
    plain = sweep()
    samples = tuple(
        dataclasses.replace(s, seconds=((3 * s.seconds[0][0],),)) if s.variant else s
        for s in plain.samples
    )
    known = measured(dataclasses.replace(plain, samples=samples))
    model = CostModel(load_cluster("h100", 1, 8), alone=True, measured_collectives=known)
    one = truth(CollectiveKind.SEND_RECV, 2, 1 << 20)
    for group, expected in (("pp", one), ("cp", 3 * one)):
        asked = Collective(CollectiveKind.SEND_RECV, group, 1 << 20, "bf16")
        assert model.collective_seconds(asked, range(4)).seconds == pytest.approx(expected)


def test_kept_prices_and_other_collectives_don_t_mix() -> None:
    cluster = load_cluster("h100", 1, 8)
    with pytest.raises(PlanError, match="other collectives"):
        project(plan(JOB), traces(JOB), cluster, mode="simulate", kept=Kept(cluster),
                collectives=measured())  # fmt: skip
    known = measured()
    kept = Kept(cluster, collectives=known)
    a, b = (
        project(plan(JOB), traces(JOB), cluster, mode="simulate", kept=kept, collectives=given)
        for given in (known, None)
    )
    assert a.throughput == b.throughput


def test_sweeps_that_are_no_one_target_are_refused() -> None:
    for sweeps, words in (
        ((sweep(), sweep("a100")), "no one target"),
        ((dataclasses.replace(sweep(), samples=()),), "no samples"),
    ):
        with pytest.raises(SamplesError, match=words):
            measured(*sweeps)


def test_the_command_adds_the_lines_to_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sweep.json"
    save(sweep(), path)
    collectives.fitted(path)
    plain = json.loads(path.read_text())
    line = next(f for f in plain["fits"] if f["kind"] == "all_gather" and f["members"] == 4)
    assert line["lines"] == [
        {"upto_bytes": None, "start_s": pytest.approx(3 * START),
         "s_per_byte": pytest.approx(0.75 * RATE)}
    ]  # fmt: skip
    assert line["residual"] < 1e-6
    said = capsys.readouterr().out
    assert re.search(r"all_gather +4 +\+- +0\.0% +60 us \+ 2\.67 GB/s", said)
    priced = MeasuredCollectives([load(path)], "again")
    assert priced.fits() == measured().fits()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "can't be read as measured collectives"),
        ("{}", "holds no measured collectives of schema 1"),
        ("h100", "measured on h100, the target cpu_1x2 has cpu"),
    ],
)
def test_a_file_that_is_of_no_use_is_refused_before_the_program_runs(
    content: str | None, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "collectives.json"
    if content == "h100":
        save(sweep(), path)
    elif content is not None:
        path.write_text(content)
    asked = ["+projection=simulate", "+target_cluster=cpu_1x2", "+projection.out={out}"]
    run = run_app("plain", [*asked, f"+projection.collectives={path}"], tmp_path / "run")
    assert run.code == 2 and run.did == []
    message = run.verdict["message"]
    assert message.startswith(f"+projection.collectives={path}: ") and words in message
    assert "\n" not in message


@pytest.mark.slow
def test_a_slower_link_moves_the_step_of_a_real_program(tmp_path: Path) -> None:
    """The command, the program, the trace: only the file of times is made up, and three times it.

    What is in the file was "measured" between processes of this machine.
    """
    found = {}
    for slow in (1.0, 3.0):
        path, out = tmp_path / f"{slow}.json", tmp_path / f"out{slow}"
        save(sweep("cpu", groups=(2,), slow=slow), path)
        command = [
            sys.executable, str(ROOT / "scripts" / "train.py"), "model=tiny_gpt", "parallel.tp=2",
            "+projection=simulate", "+target_cluster=cpu_1x2", f"+projection.out={out}",
            f"+projection.collectives={path}", f"hydra.run.dir={tmp_path}/run",
        ]  # fmt: skip
        environment = {**os.environ, "PRIMUS_EXT_CACHE": str(tmp_path / "cache")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        terms = json.loads((out / "projection.json").read_text())["breakdown"]
        found[slow] = {term["term"]: term for term in terms}
    name = "tensor-parallel communication"
    fast, slowed = found[1.0][name], found[3.0][name]
    assert fast["evidence"].startswith("measured: 1.0.json (nccl on P;")
    assert slowed["seconds"] == pytest.approx(3 * fast["seconds"], rel=1e-6)
    for other in ("gemm", "memory-bound"):
        assert found[3.0][other]["seconds"] == found[1.0][other]["seconds"]

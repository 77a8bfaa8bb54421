"""Steps of the user's program, measured on this CPU by the command itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from primus_ext.collective_samples import HOST, Sample, Sweep, save
from primus_ext.frameworks.megatron import measuring
from primus_ext.runner.shrink import ShrinkError, changes
from primus_ext.trace import CollectiveKind
from tests import synthetic
from tests.training import SCRIPT, environment, train

LATENCY, RATE = 1e-4, 1e-9
KINDS = (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER,
         CollectiveKind.SEND_RECV)  # fmt: skip
JOB = ("model=tiny_gpt", "parallel.pp=2", "parallel.vpp=2", "train.save=checkpoints")
LAYERS = 4


def collectives(path: Path) -> Path:
    """A sweep whose every message takes LATENCY + RATE x bytes."""
    samples = tuple(
        Sample(kind=kind, dtype="fp32", tier=HOST, members=2, bytes=size,
               seconds=((LATENCY + RATE * size,) * 3,))
        for kind in KINDS for size in (1024, 65536, 1 << 20, 1 << 24)
    )  # fmt: skip
    save(
        Sweep(backend="gloo", accelerator="cpu", product="test", processes=2, host_cores=2,
              versions={}, samples=samples),
        path,
    )  # fmt: skip
    return path


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of ``+projection=both`` on two processes of this machine, and what it found."""
    folder = tmp_path_factory.mktemp("measure")
    sweep = collectives(folder / "gloo.json")
    done = train(
        folder, *JOB, "+projection=both", "+target_cluster=cpu_1x2",
        f"+projection.collectives={sweep}", "+projection.out=out", "+projection.cache=off",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Measured against simulated" in done.stdout
    return folder, json.loads((folder / "out" / "projection.json").read_text())


def test_nothing_of_the_users_was_trained(both: tuple[Path, dict[str, Any]]):
    folder, _ = both
    assert not (folder / "checkpoints").exists()
    log = (folder / "out" / "measure.log").read_text()
    assert "lm loss" not in log


def test_own_work_is_what_was_measured(both: tuple[Path, dict[str, Any]]):
    """The busy time of a rank is its forwards, backwards and its step, each at the median."""
    folder, found = both
    ranks = json.loads((folder / "out" / "measurement.json").read_text())["ranks"]
    assert [rank["pp_ranks"] for rank in ranks] == [[0], [1]] and found["mode"] == "both"
    binding = ranks[found["provenance"]["binding_pp_rank"]]
    middle = lambda samples: sorted(samples["seconds"])[len(samples["seconds"]) // 2]  # noqa: E731
    once = [sum(row) for row in zip(*(s["seconds"] for s in binding["step"].values()), strict=True)]
    expected = sorted(once)[len(once) // 2]
    for chunk in binding["chunks"]:
        for part in chunk["parts"]:
            per_microbatch = middle(part["forward"]) + middle(part["backward"])
            expected += binding["microbatches"] * per_microbatch
    own = [t for t in found["breakdown"] if t["evidence"].startswith("measured: median of 9")]
    assert {t["term"] for t in own} >= {"gemm", "attention", "memory-bound", "optimizer"}
    small = sum(t["seconds"] for t in own) - 64 * (LATENCY + RATE * 1e6)  # collectives of the step
    assert small <= expected * (1 + 1e-9)
    assert sum(t["seconds"] for t in own) >= expected * (1 - 1e-9)
    assert sum(t["exposed_seconds"] for t in found["breakdown"]) == found["throughput"]["step_s"]


def test_every_part_of_every_rank_was_seen(both: tuple[Path, dict[str, Any]]):
    folder, _ = both
    ranks = json.loads((folder / "out" / "measurement.json").read_text())["ranks"]
    seen = [
        (part["kind"], chunk["vpp_stage"])
        for rank in ranks for chunk in rank["chunks"] for part in chunk["parts"]
        if part["kind"] != "other"
    ]  # fmt: skip
    assert seen == [
        ("embedding", 0), ("dense_layer", 0), ("dense_layer", 1),
        ("dense_layer", 0), ("dense_layer", 1), ("output", 1),
    ]  # fmt: skip
    for rank in ranks:
        for chunk in rank["chunks"]:
            for part in chunk["parts"]:
                if part["kind"] != "other":
                    assert min(part["forward"]["seconds"]) > 0.0
                    assert min(part["backward"]["seconds"]) > 0.0
        assert any(kernel["name"] == "aten::mm" for kernel in rank["kernels"])


def test_an_earlier_measurement_serves_another_batch(both: tuple[Path, dict[str, Any]]):
    """Twice the microbatches: nothing runs but the trace, and a rank is busy twice as long."""
    folder, found = both
    done = train(
        folder, *JOB, "train.gbs=16", "+projection=measure", "+target_cluster=cpu_1x2",
        f"+projection.collectives={folder / 'gloo.json'}", "+projection.measured=out",
        "+projection.out=more", "+projection.cache=off",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert not (folder / "more" / "measure.log").exists()
    more = json.loads((folder / "more" / "projection.json").read_text())
    busy = {t["term"]: t["seconds"] for t in found["breakdown"]}
    for term in more["breakdown"]:
        if term["term"] in ("gemm", "attention", "memory-bound"):
            assert term["seconds"] == pytest.approx(2 * busy[term["term"]], rel=1e-9)


@pytest.mark.slow
def test_a_smaller_world_stands_for_the_job(both: tuple[Path, dict[str, Any]]):
    folder, _ = both
    done = train(
        folder, *JOB, "+projection=measure", "+target_cluster=cpu_1x2", "+projection.shrink=1",
        f"+projection.collectives={folder / 'gloo.json'}", "+projection.out=small",
        "+projection.cache=off",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    kept = json.loads((folder / "small" / "measurement.json").read_text())
    assert len(kept["ranks"]) == 1
    kinds = [part["kind"] for part in kept["ranks"][0]["chunks"][0]["parts"]]
    assert kinds == ["embedding", "dense_layer", "dense_layer", "output", "other"]
    found = json.loads((folder / "small" / "projection.json").read_text())
    assert "of a world of 1 in the place of the job's" in found["breakdown"][0]["evidence"]


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_measurement(tmp_path: Path):
    """The program ends its process in the last stage; the first does not wait for it in vain."""
    text = SCRIPT.read_text().replace(
        "    batch = get_batch(",
        "    import torch\n"
        "    from megatron.core import parallel_state\n"
        "    has_data = type(torch.zeros(1)) is torch.Tensor\n"
        "    if has_data and parallel_state.is_pipeline_last_stage():\n"
        "        os._exit(9)\n"
        "    batch = get_batch(",
    )
    program = tmp_path / "scripts" / "train.py"
    program.parent.mkdir()
    program.write_text(text)
    (tmp_path / "hydra_conf").symlink_to(SCRIPT.parents[1] / "hydra_conf")
    done = subprocess.run(
        [sys.executable, str(program), "model=tiny_gpt", "parallel.pp=2", "hydra.run.dir=hydra",
         "+projection=measure", "+target_cluster=cpu_1x2", "+projection.out=out",
         f"+projection.collectives={collectives(tmp_path / 'gloo.json')}"],
        cwd=tmp_path, text=True, capture_output=True, timeout=300,
        env=environment(PRIMUS_EXT_CACHE="off"),
    )  # fmt: skip
    assert done.returncode == 4, done.stderr[-2000:]
    assert "the process of one rank died" in done.stderr
    assert json.loads((tmp_path / "out" / "verdict.json").read_text())["exit_code"] == 4
    assert not list((tmp_path / "out").glob("measurement*"))


@pytest.mark.slow
def test_a_rank_that_does_not_fit_here_is_simulated(tmp_path: Path):
    """Eight billion parameters on two processes of this machine: a verdict, and nothing runs."""
    done = train(
        tmp_path, "model=llama3.1_8b", "parallel.tp=2", "train.seq=128", "+projection=measure",
        "+target_cluster=cpu_1x2", "+projection.out=out", "+projection.cache=off",
        f"+projection.collectives={collectives(tmp_path / 'gloo.json')}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "out" / "projection.json").read_text())
    (role,) = found["memory"]["per_role"]
    assert found["memory"]["verdict"] == "oom" and found["mode"] == "simulate"
    assert role["peak_bytes"] > found["memory"]["capacity_bytes"]
    assert found["warnings"][0].startswith("nothing was measured: pp stage 0 (embedding, 32 layers")
    assert f"{found['memory']['capacity_bytes']:,}; the times are simulated" in found["warnings"][0]
    assert not (tmp_path / "out" / "measure.log").exists()


@pytest.mark.parametrize(
    ("kinds", "per_node", "sizes"), [(1, 2, [2]), (2, 2, [2]), (3, 2, [2, 2]), (2, 1, [1, 1])]
)
def test_every_process_is_measured_beside_as_many(kinds: int, per_node: int, sizes: list[int]):
    """Also the last of an odd number of kinds: a copy of the first loads the other core."""
    members = [((kind,), kind) for kind in range(kinds)]
    groups = measuring._together(members, {"gpus_per_node": per_node})
    assert [len(group) for group in groups] == sizes
    assert {member for group in groups for member in group} == set(members)


def test_a_smaller_world_keeps_a_ranks_experts_and_layers():
    plan = synthetic.plan(synthetic.Job(tp=4, pp=4, dp=2, layers=16, microbatches=8))
    asked = changes(plan, 1)
    assert asked["world_size"] == asked["tensor_model_parallel_size"] == 1
    assert asked["num_layers"] == 4 and asked["global_batch_size"] == 4
    assert changes(plan, 2)["tensor_model_parallel_size"] == 2
    with pytest.raises(ShrinkError, match="shrink=0"):
        changes(plan, 0)

"""The hook on a real Megatron training command, through to its outputs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.never_train.support import ROOT

pytestmark = pytest.mark.slow
TRAIN = str(ROOT / "scripts" / "train.py")


def train(folder: Path, *overrides: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """Run the training command in an empty folder, with ``out`` beside it."""
    cwd = folder / "cwd"
    cwd.mkdir(parents=True)
    torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--master-port=0"]
    command = [sys.executable, *(torchrun if ranks > 1 else []), TRAIN, *overrides]
    command.append(f"+projection.out={folder / 'out'}")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert not list(cwd.iterdir()), "a projection leaves nothing where it was started"
    return done


def written(folder: Path, name: str) -> dict:
    return json.loads((folder / "out" / f"{name}.json").read_text())


@pytest.mark.parametrize("ranks", [1, 2])
def test_simulate(ranks: int, tmp_path: Path):
    """Rank 0 projects; the target is the one that was named, not the ranks that were started."""
    asked = ["model=tiny_gpt", "+projection=simulate", "+target_cluster=mi325x_1x4"]
    done = train(tmp_path, *asked, ranks=ranks)
    assert done.returncode == 0, done.stderr
    verdict, projection = written(tmp_path, "verdict"), written(tmp_path, "projection")
    assert verdict["exit_code"] == 0
    assert verdict["projection"] == str(tmp_path / "out" / "projection.json")
    assert verdict["verdict"] == projection["memory"]["verdict"] == "fits"
    assert projection["plan"]["parallelism"]["world_size"] == 4
    assert projection["mode"] == "simulate"
    assert (
        "elapsed time per iteration" not in (tmp_path / "out" / "child.log").read_text()
    )  # Megatron's step line
    assert done.stdout.count("FITS") == 1  # one report, whatever the number of ranks


def test_on_says_that_it_simulates(tmp_path: Path):
    done = train(tmp_path, "model=tiny_gpt", "+projection=on", "+target_cluster=h100_1x1")
    assert done.returncode == 0, done.stderr
    assert any("simulated" in warning for warning in written(tmp_path, "projection")["warnings"])


def test_fail_on_gates_a_launch_script(tmp_path: Path):
    asked = ["model=llama3.1_70b", "parallel.tp=8", "+target_cluster=h100_1x8"]
    done = train(tmp_path, *asked, "+projection=simulate", "+projection.fail_on=oom")
    assert done.returncode == 6, done.stderr
    assert written(tmp_path, "verdict")["verdict"] == "oom"
    assert written(tmp_path, "projection")["memory"]["verdict"] == "oom"
    assert done.stderr.strip() == "primus_ext: the verdict is oom: +projection.fail_on=oom"


def test_a_configuration_that_the_program_refuses(tmp_path: Path):
    """Its own sentence, as without us, and nothing half-written."""
    asked = ["model=tiny_gpt", "+projection=simulate", "+target_cluster=h100_1x8"]
    done = train(tmp_path, *asked, "train.mbs=3")
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "train.mbs" in line and "3" in line and "Traceback" not in line
    assert written(tmp_path, "verdict")["message"] == line.removeprefix("primus_ext: ")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["child.log", "verdict.json"]


def test_the_program_is_recorded_as_the_user_wrote_it(tmp_path: Path):
    asked = ["model=tiny_gpt", "train.steps=7", "+projection=simulate", "+target_cluster=h100_1x1"]
    assert train(tmp_path, *asked).returncode == 0
    argv = written(tmp_path, "projection")["program"]["argv"]
    assert argv[0] == TRAIN and "train.steps=7" in argv
    assert not any("projection" in token or "target_cluster" in token for token in argv)

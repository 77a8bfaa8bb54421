"""The tripwire: every optimizer, data loader and checkpoint of torch, and silent trackers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from primus_ext.emulate import registry, schedulers, tripwire

TRIES = """
import io, os, sys
before, order = sys.argv[1:]
if order == "after":
    import torch
    import torch.distributed.checkpoint
from primus_ext.emulate import tripwire
tripwire.arm()
if order == "before":
    assert "torch" not in sys.modules, "arming must not import torch"
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import save as from_its_own_module

class Own(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.zero_()

def stepping(make):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = make([weight])
    weight.sum().backward()
    def step():
        optimizer.step(*([lambda: weight.sum()] if make is torch.optim.LBFGS else []))
    return weight, step

tries = {}
for make in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.LBFGS, Own):
    weight, tries[make.__name__] = stepping(make)
tries["DataLoader"] = lambda: next(iter(torch.utils.data.DataLoader([1, 2])))
tries["save"] = lambda: torch.save({}, "x.pt")
tries["serialization.save"] = lambda: torch.serialization.save({}, open("y.pt", "wb"))
tries["dcp.save"] = lambda: dcp.save({"a": torch.ones(1)}, checkpoint_id="d")
tries["async_save"] = lambda: dcp.async_save({"a": torch.ones(1)}, checkpoint_id="d")
tries["own save"] = lambda: from_its_own_module({"a": torch.ones(1)}, checkpoint_id="d")
for name, attempt in tries.items():
    try:
        attempt()
    except tripwire.TrainingAttempted as error:
        assert not isinstance(error, Exception)
        print(name)
assert torch.equal(weight, torch.ones(2)), "a parameter changed"
torch.save({}, io.BytesIO())
with tripwire.allowed():
    for name in ("SGD", "Adam", "AdamW", "LBFGS", "Own", "DataLoader"):
        tries[name]()
    assert torch.equal(weight, torch.zeros(2))
try:
    tries["SGD"]()
except tripwire.TrainingAttempted:
    print("again")
"""
EXPECTED = [
    "SGD", "Adam", "AdamW", "LBFGS", "Own", "DataLoader", "save", "serialization.save",
    "dcp.save", "async_save", "own save", "again",
]  # fmt: skip


@pytest.mark.parametrize("order", ["before", "after"])
def test_what_trips(order: str, tmp_path: Path):
    """Armed before or after torch is imported."""
    done = subprocess.run(
        [sys.executable, "-c", TRIES, "-", order], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == EXPECTED
    assert [p.name for p in tmp_path.iterdir() if p.stat().st_size] == []


def test_every_patch_is_declared_in_the_registry():
    declared = {(p.module, *p.attributes) for p in registry.registered(tripwire.GROUP)}
    assert ("torch.optim.optimizer", "register_optimizer_step_pre_hook") in declared
    assert len(declared) == 4


TRACKERS = """
import sys
sys.path.insert(0, sys.argv[1])
from primus_ext.emulate import trackers
trackers.silence()
import wandb
from wandb.sdk.lib import anything
run = wandb.init(project="x")
with run as inside:
    inside.log({"loss": 1.0}, step=3)
wandb.config.update({"a": 1})
run.summary["x"] = 2
assert not isinstance(3, wandb.Table) and isinstance(wandb.Table(columns=["a"]), wandb.Table)
assert run is not None and wandb.run
class Mine(wandb.Callback):
    pass
Mine()
import os
assert os.path.isdir(os.path.dirname(os.path.join(run.dir, "file")))
import copy, pickle
copy.copy(run)
try:
    import mlflow
except ImportError:
    print("mlflow is absent")
"""


def test_trackers_are_silent_where_they_are_installed(tmp_path: Path):
    """A tracker that is not installed stays absent: programs look for that."""
    (tmp_path / "wandb.py").write_text("raise SystemExit('the real tracker was imported')")
    done = subprocess.run(
        [sys.executable, "-c", TRACKERS, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "mlflow is absent\n"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["sbatch", "job.sh"], "sbatch"),
        (["/opt/slurm/bin/srun", "python", "t.py"], "srun"),
        (["sh", "-c", "cd /x && mpirun -n 8 python t.py"], "mpirun"),
        (["/bin/bash", "-c", "echo 'unfinished; sbatch job.sh"], "sbatch"),
        (["python", "sbatch.py"], None),
        (["grep", "srun", "file"], None),
        (["sh", "-c", "make # srun"], None),
        (["sh", "srun"], None),
        ([], None),
    ],
)
def test_commands_of_schedulers(words: list[str], found: str | None):
    assert schedulers.scheduler_in(words) == found


SUBMITS = """
import os, pathlib, subprocess, sys
from primus_ext.emulate import tripwire
tripwire.arm()
ways = {
    "Popen": lambda: subprocess.run(["sbatch", "job"]),
    "path": lambda: subprocess.run(pathlib.Path("sbatch")),
    "shell": lambda: subprocess.run("true && sbatch job", shell=True),
    "system": lambda: os.system("sbatch job"),
    "spawn": lambda: os.posix_spawn(sys.argv[1], ["sbatch"], os.environ),
    "exec": lambda: os.execvp("sbatch", ["sbatch", "job"]),
    "other": lambda: subprocess.run(["true"], check=True),
}
for name, way in ways.items():
    try:
        way()
    except tripwire.TrainingAttempted as error:
        assert "sbatch was about to start a job" in str(error)
        print(name)
"""


def test_no_job_is_submitted(tmp_path: Path):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f"#!/bin/sh\ntouch {tmp_path}/submitted\n")
    sbatch.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    line = [sys.executable, "-c", SUBMITS, str(sbatch)]
    done = subprocess.run(line, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["Popen", "path", "shell", "system", "spawn", "exec"]
    assert not (tmp_path / "submitted").exists()

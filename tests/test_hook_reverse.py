"""Apps that ask for nothing of ours behave exactly as without the package."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.never_train.support import INSTALLED, RELEASES, Run, run_app

SCALARS = ["precision=fp16", "model=gpt4", "accelerator=gpu", "cluster=b"]
RELEASE = pytest.mark.parametrize(
    "release", [INSTALLED, *(pytest.param(name, marks=pytest.mark.slow) for name in RELEASES)]
)


def pair(kind: str, overrides: list[str], folder: Path, release: str = INSTALLED) -> list[Run]:
    """The same command with and without the package."""
    return [
        run_app(kind, overrides, folder / str(has), release=release, importable=has)
        for has in (True, False)
    ]


def assert_equal(first: Run, second: Run) -> None:
    assert (first.code, first.stdout, first.did) == (second.code, second.stdout, second.did)
    files = [sorted(p.name for p in run.cwd.rglob("*.*") if p.is_file()) for run in (first, second)]
    assert files[0] == files[1]


@RELEASE
@pytest.mark.parametrize("kind", ["plain", "structured"])
def test_scalar_keys_named_like_config_groups(kind: str, release: str, tmp_path: Path):
    first, second = pair(kind, SCALARS, tmp_path, release)
    assert first.code == 0 and "'precision': 'fp16'" in first.did[0]
    assert_equal(first, second)


@RELEASE
@pytest.mark.parametrize(
    ("kind", "override"),
    [
        ("plain", "recipe=mxfp8"),  # the names of our own groups, without a plus
        ("plain", "~recipe"),
        ("own_key", "projection.dim=128"),
        ("own_key", "++projection.dim=128"),
        ("own_key", "++projection.heads=2"),
        ("own_key", "projection=128"),
        ("own_key", "++projection=128"),
        ("own_key", "~projection"),
        ("own_key", "+projection_dim=512"),
        ("no_config", "+projections=512"),
        ("no_config", "+cluster=b"),
    ],
)
def test_keys_of_the_users_own_named_like_ours(
    kind: str, override: str, release: str, tmp_path: Path
):
    first, second = pair(kind, [override, "--cfg", "job"], tmp_path, release)
    assert first.code == 0, first.stderr
    assert_equal(first, second)


@RELEASE
@pytest.mark.parametrize(
    "kind", ["plain", "structured", "no_config", "chdir", "own_key", "own_package"]
)
def test_the_job_configuration_stays_as_it_was(kind: str, release: str, tmp_path: Path):
    ours = ["+projection=simulate", "+target_cluster=mi325x_8x8"]
    with_ours = run_app(kind, ["--cfg", "job", *ours], tmp_path / "with", release=release)
    without = run_app(kind, ["--cfg", "job"], tmp_path / "out", release=release, importable=False)
    assert with_ours.code == 0, with_ours.stderr
    assert with_ours.stdout == without.stdout and with_ours.did == []


@pytest.mark.parametrize(
    "order",
    [
        ["+target_cluster=h100_1x8", "+projection=tune"],
        ["+projection.out={out}", "+target_cluster=h100_1x8", "+projection=tune", "steps=3"],
        ["+projection@_global_=tune"],
    ],
)
@pytest.mark.parametrize("kind", ["structured", "own_key"])
def test_every_order_and_spelling_composes(kind: str, order: list[str], tmp_path: Path):
    run = run_app(kind, order, tmp_path)
    assert run.code == 2 and "tune is not part of this version" in run.stderr


def test_an_own_output_folder_that_interpolates_hydra(tmp_path: Path):
    """conf/chdir.yaml names its folder by ``${hydra:job.name}``."""
    run = run_app("chdir", ["+projection=tune"], tmp_path)
    assert run.code == 2
    assert (run.cwd / "runs" / "chdir" / "projection" / "verdict.json").exists()


def test_completion_offers_the_modes(tmp_path: Path):
    run = run_app(
        "plain", ["-sc", "query=bash"], tmp_path, COMP_LINE="train.py +projection=", COMP_POINT="21"
    )  # fmt: skip
    assert run.code == 0 and "simulate" in run.stdout


PLUGIN = """
import sys, time
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
import hydra_plugins.primus_ext.plugin as plugin
before = set(sys.modules)
path = ConfigSearchPathImpl()
sys.argv = ["train.py", *[f"model.key{i}=1" for i in range(50)]]
started = time.perf_counter()
plugin.PrimusExtSearchPath().manipulate_search_path(path)
spent = time.perf_counter() - started
assert path.get_path() == []
print(sorted(set(sys.modules) - before), spent)
"""


def test_an_app_that_does_not_ask_pays_nothing():
    """Nothing is imported and nothing is added: the cost is a look at the command line.

    Its time is compared with that of importing one small module of the standard library.
    """
    outputs = [
        subprocess.run(
            [sys.executable, "-c", PLUGIN], capture_output=True, text=True, check=True
        ).stdout
        for _ in range(3)
    ]
    assert all(output.startswith("[] ") for output in outputs)
    spent = statistics.median(float(output.split()[-1]) for output in outputs)
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    assert spent < (time.perf_counter() - started) / 10

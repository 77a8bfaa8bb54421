"""Once ``+projection`` is typed, nothing ends in a step of the user's training."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.never_train.support import INSTALLED, KINDS, RELEASES, ROOT, SWEEPS, Run, run_app

TARGET = "+target_cluster=h100_1x8"
OUT = "+projection.out={out}"
MODE = ["+projection=simulate", TARGET, OUT]
CALLBACK = "primus_ext.hydra.callback:"
TOOK_OVER = f"{CALLBACK}_take_over:does "  # the hooks behind it are a second line
BREAKS = {
    "plugin": "primus_ext.hydra.search_path:prepare",
    "plugin's reading": "primus_ext.hydra.typed:read",
    "search path": "primus_ext.hydra.search_path:_add",
    "resolver": "primus_ext.hydra.context:of_root",
    "callback made": f"{CALLBACK}_take_over",
    "runner": "primus_ext.runner.job:_project",
    "on_run_start": f"{TOOK_OVER}",
    "on_job_start": f"{TOOK_OVER}{CALLBACK}ProjectionCallback.on_run_start:does",
    "on_multirun_start": f"{TOOK_OVER}",
    "every hook": f"{TOOK_OVER}{CALLBACK}ProjectionCallback._stop",
}
"""Where an exception is injected to what breaks it."""
RUN_ONLY = ("on_run_start", "on_job_start", "every hook", "runner")
FIRST = ("plugin", "plugin's reading")
"""These come before the command line is judged; the rest is never reached with -m."""

everywhere = pytest.mark.parametrize("release", RELEASES)
kinds = pytest.mark.parametrize("kind", KINDS)


def did_not_train(run: Run, code: int, kind: str = "plain") -> None:
    """Assert the exit code (torchrun folds it into 1) and that nothing was touched."""
    assert run.code == (1 if kind == "torchrun" and code else code), run.stderr
    assert run.touched() == []


def check_out_alone(kind: str, folder: Path, release: str) -> None:
    run = run_app(kind, [OUT], folder, release=release)
    did_not_train(run, 2, kind)
    assert run.verdict["exit_code"] == 2 and "+projection=MODE" in run.verdict["message"]
    assert run.did == []


def check_broken(kind: str, where: str, folder: Path, release: str) -> None:
    run = run_app(kind, MODE, folder, release=release, breaks=BREAKS[where])
    judged = kind in ("multirun", "joblib") and where not in FIRST
    did_not_train(run, 2 if judged else 4, kind)
    if where not in ("on_job_start", "every hook"):  # before these Hydra makes its own folder
        assert not list(run.cwd.iterdir())
    if where != "every hook":  # there the tripwire stops the user's program itself
        assert run.did == []
    if where not in (*FIRST, "every hook"):
        assert run.verdict["exit_code"] == (2 if judged else 4)


def check_not_hooked(kind: str, folder: Path, release: str, **environment: str) -> None:
    run = run_app(kind, MODE, folder, release=release, **environment)
    did_not_train(run, 2, kind)
    assert not list(run.cwd.iterdir()), "the working folder must stay as it was"
    assert run.verdict["exit_code"] == 2 and run.verdict["projection"] is None
    words = "sweep" if kind in SWEEPS else "training entry point"
    assert words in run.verdict["message"]


def check_not_importable(kind: str, folder: Path, release: str) -> None:
    run = run_app(kind, ["+projection@_global_=on"], folder, release=release, importable=False)
    did_not_train(run, 1, kind)
    assert "projection" in run.stderr


# The installed release, in seconds


def test_the_fixture_trains_without_us(tmp_path: Path):
    """Otherwise nothing below would show anything."""
    run = run_app("plain", [], tmp_path)
    assert run.code == 0, run.stderr
    assert run.touched() == [
        "tracker", "data", "step", "data", "step", "checkpoint", "tracker", "checkpoint.pt",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "torchrun"])
def test_out_without_a_mode(kind: str, tmp_path: Path):
    check_out_alone(kind, tmp_path, INSTALLED)


@pytest.mark.parametrize("where", [where for where in BREAKS if where != "on_multirun_start"])
def test_an_error_of_ours(where: str, tmp_path: Path):
    check_broken("plain", where, tmp_path, INSTALLED)


def test_an_error_of_ours_in_a_sweep(tmp_path: Path):
    check_broken("multirun_file", "on_multirun_start", tmp_path, INSTALLED)


def test_an_app_that_reaches_no_entry_point(tmp_path: Path):
    check_not_hooked("plain", tmp_path, INSTALLED, NEVER_TRAIN_NO_LOADER="1")


@pytest.mark.parametrize("kind", SWEEPS)
def test_a_sweep(kind: str, tmp_path: Path):
    check_not_hooked(kind, tmp_path, INSTALLED)


def test_package_not_importable(tmp_path: Path):
    check_not_importable("plain", tmp_path, INSTALLED)


@pytest.mark.parametrize(
    ("override", "code"),
    [
        ("+projection=onn", 1),
        ("++projection=on", 1),
        ("+projection", 1),
        ("+projection=null", 2),
        ("+projection=[on]", 2),
        ("+projection=on,simulate", 2),
        ("+projection@elsewhere=on", 2),
        ("+projection.nodes=4", 2),
        ("+target_cluster=h100_8x8", 2),
        ("+projection.fail_on=oom", 2),
        ("+hydra.callbacks.primus_projection.mode=on", 2),
        ("+projection=on ~projection", 2),
        ("+projection=on ~hydra.callbacks", 2),
        ("+projection=on hydra.callbacks=null", 2),
        ("+projection=on hydra.mode=MULTIRUN", 2),
        ("+projection=on +hydra.callbacks.primus_projection.where=x", 2),
        ("+projection=measure", 2),
        ("+projection=both", 2),
        ("+projection=tune", 2),
        ("+projection=check", 2),
        (f"+projection=simulate {TARGET} +projection.fail_on=sometimes", 2),
        ("+projection=simulate +target_cluster=h100_3x5", 1),
    ],
)
def test_whatever_else_is_typed(override: str, code: int, tmp_path: Path):
    run = run_app("plain", override.split(), tmp_path)
    assert run.code == code, run.stderr
    assert run.did == []
    if code == 2:
        assert len(run.stderr.strip().splitlines()) == 1 and "Traceback" not in run.stderr


def test_other_ranks_leave_well(tmp_path: Path):
    """Otherwise torchrun ends rank 0 before it has written its verdict."""
    run = run_app("plain", MODE, tmp_path, RANK="1", WORLD_SIZE="2")
    did_not_train(run, 0)
    assert run.did == [] and not run.out.exists() and run.stderr == ""


def test_a_process_that_the_program_starts_inside_a_projection(tmp_path: Path):
    run = run_app("plain", [], tmp_path, PRIMUS_EXT_CHILD="1")
    assert run.code == 4
    assert "step" not in run.did and "checkpoint" not in run.did


def test_the_runs_above_are_of_an_editable_installation():
    """No path leads to the checkout but the installation's own hook."""
    code = "import hydra_plugins.primus_ext.plugin as p, sys; print(p.__file__); print(sys.path)"
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, cwd="/", env={}, capture_output=True, text=True, check=True)
    file, path = done.stdout.splitlines()
    assert file == str(ROOT / "hydra_plugins" / "primus_ext" / "plugin.py")
    assert str(ROOT) not in eval(path)


def installed(folder: Path, *, configuration: bool = True) -> Path:
    """The package as plain files in a folder, as a wheel leaves it."""
    for name in ("primus_ext", "hydra_plugins"):
        leave_out = shutil.ignore_patterns(
            "__pycache__", *([] if configuration else ["hydra_conf"])
        )
        shutil.copytree(ROOT / name, folder / name, ignore=leave_out)
    return folder


def test_plain_files_instead_of_an_editable_installation(tmp_path: Path):
    site = installed(tmp_path / "site")
    run = run_app("plain", ["+projection=tune", TARGET, OUT], tmp_path / "run", site=site)
    did_not_train(run, 2)
    assert "not part of this version" in run.verdict["message"]


def test_a_package_without_its_configuration(tmp_path: Path):
    site = installed(tmp_path / "site", configuration=False)
    run = run_app("plain", MODE, tmp_path / "run", site=site)
    did_not_train(run, 2)
    assert "installed without its configuration" in run.verdict["message"]


def test_a_plugin_without_its_package(tmp_path: Path):
    site = installed(tmp_path / "site")
    shutil.rmtree(site / "primus_ext")
    run = run_app("plain", MODE, tmp_path / "run", site=site)
    did_not_train(run, 2)
    assert "can't be imported" in run.stderr and "Traceback" not in run.stderr


def test_a_projection_group_of_the_users_own_with_our_option(tmp_path: Path):
    own = tmp_path / "conf" / "projection"
    own.mkdir(parents=True)
    (own / "tune.yaml").write_text("dim: 64\n")
    typed = ["--config-dir", str(own.parent), "+projection=tune", OUT]
    run = run_app("no_config", typed, tmp_path / "run")
    did_not_train(run, 2)


@pytest.mark.parametrize("way", ["script", "torchrun", "spawn", "fork", "forkserver"])
def test_an_app_that_trains_in_processes_of_its_own(way: str, tmp_path: Path):
    """Hydra knows nothing of these: what the child starts inherits the tripwire."""
    run = run_app("launcher", MODE, tmp_path, NEVER_TRAIN_LAUNCH=way)
    assert run.code in (1, 2), run.stderr
    assert run.touched() == []
    assert run.verdict["exit_code"] == run.code and run.verdict["projection"] is None


def test_the_launcher_trains_without_us(tmp_path: Path):
    run = run_app("launcher", [], tmp_path, NEVER_TRAIN_LAUNCH="spawn")
    assert run.code == 0 and "step" in run.did


def test_a_program_without_hydra_main(tmp_path: Path):
    """Nobody takes over; the tripwire stops it."""
    run = run_app("composed", MODE[:2], tmp_path)
    assert run.code == 4 and run.touched() == []
    assert "needs a program that runs under @hydra.main" in run.stderr
    assert run_app("composed", [OUT], tmp_path / "alone").code == 2


# Every kind of app under every release


@pytest.mark.slow
@everywhere
@kinds
def test_matrix_out_without_a_mode(kind: str, release: str, tmp_path: Path):
    check_out_alone(kind, tmp_path, release)


def reached(kind: str, where: str) -> bool:
    """Whether Hydra calls that hook for that kind of app, or -m is refused before."""
    if where == "on_multirun_start":
        return kind == "multirun_file"
    return kind != "multirun_file" or where not in RUN_ONLY


@pytest.mark.slow
@everywhere
@pytest.mark.parametrize(
    ("kind", "where"), [(kind, where) for kind in KINDS for where in BREAKS if reached(kind, where)]
)
def test_matrix_an_error_of_ours(kind: str, release: str, where: str, tmp_path: Path):
    check_broken(kind, where, tmp_path, release)


@pytest.mark.slow
@everywhere
@kinds
def test_matrix_mode_given(kind: str, release: str, tmp_path: Path):
    check_not_hooked(kind, tmp_path, release)


@pytest.mark.slow
@everywhere
@kinds
def test_matrix_entry_point_not_hooked(kind: str, release: str, tmp_path: Path):
    check_not_hooked(kind, tmp_path, release, NEVER_TRAIN_NO_LOADER="1")


@pytest.mark.slow
@everywhere
@kinds
def test_matrix_package_not_importable(kind: str, release: str, tmp_path: Path):
    check_not_importable(kind, tmp_path, release)

"""The output folder and ``verdict.json``: whole or not at all."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from primus_ext.runner import Exit, Outcome, UsageError, close, folder, job
from primus_ext.runner.command import Command


@pytest.fixture
def full_disk() -> Iterator[None]:
    """No file of this process may grow beyond 1 MiB, which the kernel enforces."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_prepare_makes_parents_and_leaves_nothing_in_it(tmp_path: Path):
    folder.prepare(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir() and not list((tmp_path / "a" / "b").iterdir())
    folder.prepare(tmp_path / "a" / "b")


@pytest.mark.usefixtures("full_disk")
@pytest.mark.parametrize("there_already", [True, False])
def test_no_room(tmp_path: Path, there_already: bool):
    out = tmp_path / "new" / "out"
    if there_already:
        out.mkdir(parents=True)
    with pytest.raises(UsageError, match=r"out can't be used: .*; name a folder"):
        folder.prepare(out)
    left = list(tmp_path.rglob("*"))
    assert left == ([tmp_path / "new", out] if there_already else [])


def test_a_folder_that_can_not_be_made(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    for out in (tmp_path / "file", tmp_path / "file" / "out", Path("/proc/self/out")):
        with pytest.raises(UsageError, match="can't be made"):
            folder.prepare(out)
    assert (tmp_path / "file").read_text() == "x"


def test_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    outcome = Outcome(exit_code=Exit.FAIL_ON, message="the verdict is oom", verdict="oom")
    assert close(outcome, tmp_path / "new") == 6
    assert json.loads((tmp_path / "new" / "verdict.json").read_text()) == {
        "exit_code": 6, "message": "the verdict is oom", "verdict": "oom", "projection": None,
    }  # fmt: skip
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["verdict.json"]
    assert capsys.readouterr().err == "primus_ext: the verdict is oom\n"


def test_a_verdict_that_can_not_be_written_does_not_change_the_code(
    capsys: pytest.CaptureFixture[str],
):
    assert close(Outcome(exit_code=Exit.INTERNAL, message="broken"), Path("/proc/self/out")) == 4
    assert "broken" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("verdict", "fail_on", "code"),
    [
        ("oom", None, 0), ("oom", "oom", 6), ("oom", "at_risk", 6), ("at_risk", "oom", 0),
        ("at_risk", "at_risk", 6), ("fits", "at_risk", 0), ("fits", "oom", 0),
    ],
)  # fmt: skip
def test_fail_on(verdict: str, fail_on: str | None, code: int):
    outcome = job._judged(verdict, fail_on, Path("D/projection.json"))
    assert (outcome.exit_code, outcome.verdict) == (code, verdict)
    assert outcome.projection == "D/projection.json"


def request(tmp_path: Path, **changes: object) -> job.Request:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    program = Command(options=(), script="train.py", module=None, arguments=())
    values = {
        "mode": "simulate", "command": program, "cwd": str(tmp_path), "out": tmp_path / "out",
        "scratch": scratch, "environment": {},
        "target_cluster": {"accelerator": "h100", "nodes": 1, "gpus_per_node": 8},
    }  # fmt: skip
    return job.Request(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mode": "tune"}, "+projection=tune is not part of this version, which offers on, "),
        ({"mode": "onn"}, "+projection=onn is unknown; legal: on, simulate"),
        ({"fail_on": "never"}, "+projection.fail_on=never is unknown; legal: oom, at_risk"),
        ({"schedule": "gpipe"}, "+projection.schedule=gpipe is unknown; legal: all, 1f1b, inter"),
        ({"target_cluster": {"accelerator": "x1", "nodes": 1, "gpus_per_node": 8}}, "x1"),
        ({"mode": "measure"}, "+projection=measure needs an accelerator, and none is here; legal "),
        ({"mode": "both", "measured": "/none"}, "+projection.measured=/none can't be read: "),
        ({"measured": "m.json"}, "+projection.measured=m.json is not legal with +projection=sim"),
        ({"shrink": 1}, "+projection.shrink=1 is not legal with +projection=simulate; legal: meas"),
    ],
)
def test_usage_errors_come_before_any_child(
    changes: dict, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(job.child, "run", lambda *_: pytest.fail("a child was started"))
    asked = request(tmp_path, **changes)
    assert job.run(asked) == 2
    verdict = json.loads((asked.out / "verdict.json").read_text())
    assert words in verdict["message"] and verdict["exit_code"] == 2
    assert [path.name for path in asked.out.iterdir()] == ["verdict.json"]
    assert not asked.scratch.exists()


def test_an_output_folder_that_can_not_be_used_leaves_nothing(tmp_path: Path):
    asked = request(tmp_path, out=Path("/proc/self/out"))
    assert job.run(asked) == 2


def test_ctrl_c_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(job.child, "run", interrupted)
    asked = request(tmp_path)
    assert job.run(asked) == 130
    assert json.loads((asked.out / "verdict.json").read_text())["exit_code"] == 130

"""The child process: its answer, its output, and that nothing of it stays."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from primus_ext.runner import child
from tests.never_train.support import APPS

Runner = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setattr(child, "BOOTSTRAP", "fake_child")
    monkeypatch.setenv("PYTHONPATH", str(APPS))

    def run(play: str, progress: child.Progress = lambda *_: None, **more: Any) -> dict[str, Any]:
        request = {"play": play, "cwd": str(tmp_path), **more}
        return child.run(request, [], tmp_path, tmp_path / "child.log", progress)

    return run


def gone(pid: int) -> bool:
    """Wait for the end of a process that was told to end; False if it goes on."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    waiter = select.poll()
    waiter.register(handle, select.POLLIN)
    try:
        return bool(waiter.poll(30_000))
    finally:
        os.close(handle)


def test_answer_log_and_progress(run: Runner, tmp_path: Path):
    told: list[tuple[int, int, str]] = []
    answer = run("ok", lambda *step: told.append(step))
    assert answer["plan"] == {"a": 1}
    assert told == [(1, 3, "stage 0")]
    log = (tmp_path / "child.log").read_text()
    assert sorted(log.splitlines()) == ["first line", "no newline at the end", "on stderr"]


def test_an_error_is_one_sentence(run: Runner):
    with pytest.raises(child.ChildError, match="^tp=3$") as error:
        run("error")
    assert error.value.exit_code == 2 and error.value.tail == ()


def test_a_program_that_refuses_its_configuration_says_why(run: Runner):
    """The last line that it wrote to standard error before it left with code 2."""
    with pytest.raises(child.ChildError, match="^tp=3 does not divide 32 heads$") as error:
        run("refused")
    assert error.value.exit_code == 2 and error.value.tail == ()


def test_a_crash_shows_its_last_lines(run: Runner, tmp_path: Path):
    with pytest.raises(child.ChildError, match="exit code 1") as error:
        run("crash")
    assert error.value.exit_code == 4
    assert error.value.tail[-1] == "ZeroDivisionError: in the user's program"
    assert str(tmp_path / "child.log") in str(error.value)


def test_a_killed_child_names_the_signal(run: Runner):
    with pytest.raises(child.ChildError, match="SIGKILL") as error:
        run("killed")
    assert error.value.exit_code == 4 and error.value.tail == ("before the end",)


def test_what_the_program_leaves_in_the_background_is_ended(run: Runner, tmp_path: Path):
    """It keeps the pipe open, which must not keep us either."""
    pid_file = tmp_path / "pid"
    run("background", pid_file=str(pid_file))
    assert gone(int(pid_file.read_text()))


def test_ctrl_c_ends_the_whole_group(run: Runner, tmp_path: Path):
    pid_file = tmp_path / "pids"

    def interrupt(*_step: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("forever", interrupt, pid_file=str(pid_file))
    pids = [int(pid) for pid in pid_file.read_text().split()]
    assert len(pids) == 2 and all(gone(pid) for pid in pids)


FOREVER = """
import sys
from pathlib import Path
from primus_ext.runner import child
child.BOOTSTRAP = "fake_child"
folder = Path(sys.argv[1])
request = {"play": "forever", "cwd": str(folder), "pid_file": str(folder / "pids")}
child.run(request, [], folder, folder / "child.log", lambda *_: print("ready", flush=True))
"""


def test_sigterm_ends_the_whole_group(tmp_path: Path):
    """What torchrun and job schedulers send."""
    env = {**os.environ, "PYTHONPATH": str(APPS)}
    line = [sys.executable, "-c", FOREVER, str(tmp_path)]
    with subprocess.Popen(line, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait() == 128 + signal.SIGTERM
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2 and all(gone(pid) for pid in pids)


def test_the_environment_is_not_that_of_the_parents_rank(
    run: Runner, monkeypatch: pytest.MonkeyPatch
):
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_PROCID"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("OF_THE_USER", "kept")
    seen = run("environment")["plan"]
    assert not {"RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "SLURM_PROCID"} & set(seen)
    assert seen["OF_THE_USER"] == "kept" and seen[child.MARK] == "1"
    assert seen["WANDB_MODE"] == "disabled"


def test_an_environments_own_sitecustomize_still_runs(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import os\nos.environ['OWN_SITE'] = __file__\n")
    monkeypatch.setenv("PYTHONPATH", f"{own}{os.pathsep}{APPS}")
    assert run("environment")["plan"]["OWN_SITE"] == str(own / "sitecustomize.py")


def test_modules_of_the_working_folder_do_not_shadow(run: Runner, tmp_path: Path):
    (tmp_path / "json.py").write_text("raise SystemExit('shadowed')")
    assert run("ok")["plan"] == {"a": 1}

"""scripts/_setup.sh: makes .venv, is fast when there is nothing to do, repairs what it finds."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
USE = 'set -euo pipefail; source scripts/_setup.sh; "$PYTHON" -c "import primus_ext"; echo READY'


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout whose package needs nothing, so that installing it takes seconds."""
    tree = tmp_path / "tree"
    (tree / "primus_ext").mkdir(parents=True)
    (tree / "scripts").mkdir()
    shutil.copy(ROOT / "primus_ext" / "__init__.py", tree / "primus_ext")
    shutil.copy(ROOT / "scripts" / "_setup.sh", tree / "scripts")
    (tree / "README.md").write_text("x\n")
    (tree / "constraints.txt").write_text("# nothing\n")
    text = (ROOT / "pyproject.toml").read_text()
    text = re.sub(r"(?ms)^dependencies = \[.*?^\]", "dependencies = []", text)
    text = re.sub(r"(?ms)^dev = \[.*?^\]", "dev = []", text)
    (tree / "pyproject.toml").write_text(text)
    return tree


def use(tree: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "-c", USE]
    return subprocess.run(
        command, cwd=tree, env={**os.environ, **env}, capture_output=True, text=True
    )


def works(done: subprocess.CompletedProcess[str]) -> bool:
    return done.returncode == 0 and done.stdout == "READY\n"


def made_anew(done: subprocess.CompletedProcess[str]) -> bool:
    return "Making .venv" in done.stderr


def installed(done: subprocess.CompletedProcess[str]) -> bool:
    return "Installing" in done.stderr


@pytest.mark.slow
def test_set_up_from_nothing_and_from_every_broken_state(tree: Path):
    first = use(tree)
    assert works(first) and made_anew(first), first.stderr
    second = use(tree)
    assert works(second) and second.stderr == ""

    # Killed while pip ran: the marker is there, and the files are anybody's guess.
    venv = tree / ".venv"
    (venv / "primus-ext-unfinished").touch()
    shutil.rmtree(next(venv.glob("lib/python3.12/site-packages/pip")))
    killed = use(tree)
    assert works(killed) and made_anew(killed), killed.stderr

    # Another Python was removed, or the machine has changed.
    (venv / "bin" / "python").unlink()
    no_python = use(tree)
    assert works(no_python) and made_anew(no_python), no_python.stderr

    # The package was taken out of it.
    for file in venv.glob("lib/python3.12/site-packages/*primus_ext*"):
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    taken_out = use(tree)
    assert works(taken_out) and made_anew(taken_out), taken_out.stderr

    # New requirements are installed into what is there.
    (tree / "constraints.txt").write_text("# other\n")
    changed = use(tree)
    assert works(changed) and installed(changed) and not made_anew(changed), changed.stderr

    # The whole folder was copied elsewhere.
    copied = tree.parent / "copied"
    shutil.copytree(tree, copied, symlinks=True)
    moved = use(copied)
    assert works(moved) and made_anew(moved), moved.stderr
    assert works(use(tree)) and not installed(use(tree))


@pytest.mark.slow
def test_an_installation_that_fails_says_so_and_is_mended_by_the_next_run(tree: Path):
    good = (tree / "pyproject.toml").read_text()
    (tree / "pyproject.toml").write_text(
        good.replace("dependencies = []", 'dependencies = ["x==="]')
    )
    failed = use(tree)
    assert failed.returncode == 1 and failed.stdout == ""
    assert "The installation failed" in failed.stderr
    (tree / "pyproject.toml").write_text(good)
    assert works(use(tree))


def test_no_python_312_is_one_clear_sentence(tree: Path, tmp_path: Path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "dirname", "cat", "sha256sum", "flock", "rm", "head", "touch"):
        (tools / name).symlink_to(shutil.which(name) or name)
    other = tools / "python3"
    other.write_text("#!/bin/sh\nexit 1\n")
    other.chmod(0o755)
    done = use(tree, PATH=str(tools), PYENV_ROOT=str(tmp_path / "none"))
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("No Python 3.12 found") == 1
    assert not (tree / ".venv").exists()


def test_two_at_once_wait_for_each_other(tree: Path):
    """The second must not touch .venv while the first holds the lock."""
    hold = ["bash", "-c", "exec 9<scripts; flock 9; echo held; read -r _"]
    pipe = subprocess.PIPE
    with subprocess.Popen(hold, cwd=tree, stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout and holder.stdout.readline() == "held\n"
        waiting = subprocess.Popen(["bash", "-c", USE], cwd=tree, stderr=pipe, text=True)
        assert waiting.stderr
        assert waiting.stderr.readline() == "Another run is setting up .venv; waiting for it.\n"
        assert not (tree / ".venv").exists() and waiting.poll() is None
        waiting.kill()
        waiting.wait()
        holder.communicate("\n")

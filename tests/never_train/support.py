"""Start fixture apps under a chosen Hydra release and tell what they did."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

APPS = Path(__file__).resolve().parent
ROOT = APPS.parent.parent
INSTALLED = "installed"
RELEASES = {
    "1.3.2": ["hydra-core==1.3.2"],
    "1.3.8": ["hydra-core==1.3.8"],
    "1.4-pre": ["--pre", "hydra-core>=1.4.0rc0,<1.5", "omegaconf>=2.4.0rc0,<2.5"],
}
"""Other releases of Hydra; what else they need is what the installed one needs."""

KINDS: dict[str, tuple[str, list[str]]] = {
    "plain": ("plain.py", []),
    "structured": ("structured.py", []),
    "no_config": ("no_config.py", []),
    "chdir": ("chdir.py", []),
    "multirun": ("plain.py", ["-m"]),
    "multirun_file": ("multirun_file.py", []),
    "joblib": ("plain.py", ["--multirun", "hydra/launcher=joblib"]),
    "torchrun": ("plain.py", []),
    "own_package": ("own/train.py", []),
    "own_key": ("own_key.py", []),
}
"""Kind of app to its script and what is typed with it."""
OTHERS: dict[str, tuple[str, list[str]]] = {
    "launcher": ("launcher.py", []),
    "composed": ("composed.py", []),
}
SWEEPS = ("multirun", "multirun_file", "joblib")


def hydra_folder(release: str) -> Path | None:
    """Folder with that release of Hydra, installed when it is first asked for; None: installed."""
    if release == INSTALLED:
        return None
    folder = Path(sys.prefix) / f"hydra-{release}"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        command = [*pip, "--no-deps", "--target", str(folder), *RELEASES[release]]
        subprocess.run(command, check=True, capture_output=True)
        (folder / "complete").touch()
    return folder


@dataclasses.dataclass(frozen=True)
class Run:
    """How one command ended."""

    code: int
    stdout: str
    stderr: str
    did: list[str]
    """Lines that the app left: cfg ..., tracker, data, step, checkpoint."""
    cwd: Path
    out: Path

    @property
    def verdict(self) -> dict[str, Any]:
        return json.loads((self.out / "verdict.json").read_text())

    def touched(self) -> list[str]:
        """What must not have happened."""
        files = [path.name for path in self.cwd.rglob("*.pt")]
        return [line for line in self.did if not line.startswith("cfg ")] + files


def run_app(
    kind: str,
    overrides: list[str],
    folder: Path,
    *,
    release: str = INSTALLED,
    breaks: str = "",
    importable: bool = True,
    site: Path | None = None,
    **environment: str,
) -> Run:
    """Run a fixture app in an empty folder.

    Args:
        kind: Key into :data:`KINDS` or :data:`OTHERS`.
        overrides: What is typed; ``{out}`` stands for the output folder.
        folder: Empty folder to work in.
        release: Release of Hydra.
        breaks: See ``inject/sitecustomize.py``.
        importable: False hides primus_ext (and every other editable installation).
        site: A folder to find primus_ext in instead.
        environment: Further environment variables.
    """
    cwd, out, log = folder / "cwd", folder / "out", folder / "log"
    cwd.mkdir(parents=True)
    script, typed = {**KINDS, **OTHERS}[kind]
    hidden = not importable or site is not None
    interpreter = [sys.executable]
    paths: list[Path | str | None] = [hydra_folder(release), APPS / "fakes", APPS, APPS / "inject"]
    if hidden:  # without the site module no .pth file is read, so no editable installation exists
        interpreter.append("-S")
        paths += [site, sysconfig.get_path("purelib")]
    launch = interpreter
    if kind == "torchrun":
        launch = [*interpreter, "-m", "torch.distributed.run", "--nproc-per-node=2"]
        launch += ["--master-port=0", "--no-python"] if hidden else ["--master-port=0"]
        launch += interpreter if hidden else []
    command = [*launch, str(APPS / script), *typed]
    command += [override.format(out=out) for override in overrides]
    env = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "WORLD_SIZE"))},
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path),
        "NEVER_TRAIN_LOG": str(log),
        "NEVER_TRAIN_BREAK": breaks,
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    did = log.read_text().splitlines() if log.exists() else []
    return Run(done.returncode, done.stdout, done.stderr, did, cwd, out)

#!/usr/bin/env python
"""Compare the newest releases of the frameworks with those that are pinned (see scripts/newest).

Exit codes: 0 nothing is newer, or all fits; 1 something vanished, changed its arguments, or the
smoke projection failed; 2 the newest releases could not be found out or installed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from primus_ext.frameworks import canary

ROOT = Path(__file__).resolve().parents[1]
WATCHED = ("torch", "megatron-core", "transformer-engine", "hydra-core")
SMOKE = (
    "model=tiny_gpt", "train.gbs=16", "+projection=simulate", "+target_cluster=h100_1x8",
    "+projection.cache=off",
)  # fmt: skip
BODY = "its body changed"


class FailedError(Exception):
    """The check could not be made; the message is one sentence."""


def main(arguments: Sequence[str]) -> int:
    """Run the check; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", help="interpreter of an environment that is there already")
    asked = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="primus_ext_newest_") as scratch:
            python = asked.python or newest_environment(Path(scratch))
            return 0 if python is None else compare(python, Path(scratch))
    except FailedError as error:
        say(str(error))
        return 2


def newest_environment(scratch: Path) -> str | None:
    """Interpreter of a new environment with the newest releases; None where none is newer."""
    pinned = pins()
    listed = {package: listed_newest(package) for package in WATCHED}
    newer = {p: v for p, v in listed.items() if v != pinned[p]}
    if not newer:
        say(f"newest is what is pinned: {_named(listed)}")
        return None
    say(f"newer than what is pinned: {_named(newer)}")
    wanted = installable(scratch)
    if all(wanted[p] == pinned[p] for p in WATCHED):
        say(f"newest is what is pinned, of what pip may install here: {_named(wanted)}")
        return None
    say(f"installing {_named(wanted)} into an environment of its own")
    folder = scratch / "environment"
    venv.create(folder, with_pip=False)
    python = str(folder / "bin" / "python")
    _pip("--python", python, "install", "--quiet", *requirements())
    return python


def pins() -> dict[str, str]:
    """Version by package as constraints.txt has it."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if "==" in line)
    return {_plain(name): version for name, version in pairs}


def requirements() -> list[str]:
    """What pyproject.toml requires, without bounds on what is watched."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    others = [spec for spec in declared if _plain(_package(spec)) not in WATCHED]
    return [*WATCHED, *others]


def listed_newest(package: str) -> str:
    """The newest release that the package index lists."""
    found = re.match(r"\S+ \((\S+)\)", _pip("index", "versions", package))
    if found is None:
        raise FailedError(f"pip does not say which releases of {package} there are")
    return found[1]


def installable(scratch: Path) -> dict[str, str]:
    """Releases that pip would choose for all of :func:`requirements` together."""
    report = scratch / "report.json"
    _pip("install", "--dry-run", "--ignore-installed", "--quiet", "--report", str(report),
         *requirements())  # fmt: skip
    chosen = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    return {_plain(one["name"]): one["version"] for one in chosen}


def compare(python: str, scratch: Path) -> int:
    """Say what is different with another interpreter; 1 if something no longer fits."""
    pinned, other = _canary(sys.executable, scratch), _canary(python, scratch)
    say("", *(f"{p}: {pinned['releases'][p]} -> {v}" for p, v in other["releases"].items()), "")
    rows = canary.differences(pinned, other)
    table([row for row in rows if row[2] != BODY])
    bodies = [row for row in rows if row[2] == BODY]
    say(f"of {len(pinned['names'])} names, {len(bodies)} do the same call differently:")
    say(*(f"  {name}" for name, _, _ in bodies))
    peaks = [_smoke(one, scratch) for one in (sys.executable, python)]
    say(f"smoke projection: {peaks[0]} with what is pinned, {peaks[1]} with the other releases")
    fits = len(bodies) == len(rows) and peaks[1].endswith("bytes")
    say("all names are there" if fits else "it does not fit these releases as it is")
    return 0 if fits else 1


def table(rows: Sequence[tuple[str, str, str]]) -> None:
    """Show names, what replaces them, and what happened to them."""
    if not rows:
        return
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, patch, what in rows:
        say(f"{name:<{widths[0]}}  {patch:<{widths[1]}}  {what}")


def say(*lines: str) -> None:
    """Write lines to standard output."""
    for line in lines:
        sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _canary(python: str, scratch: Path) -> dict[str, Any]:
    out = scratch / "canary.json"
    out.unlink(missing_ok=True)
    done = _run(python, "-m", "primus_ext.frameworks.canary", str(out))
    if not out.exists():
        raise FailedError(f"the canary did not end with {python}: {_last_line(done.stderr)}")
    return json.loads(out.read_text())


def _smoke(python: str, scratch: Path) -> str:
    """The peak of one small projection, or why there is none."""
    with tempfile.TemporaryDirectory(dir=scratch) as out:
        done = _run(python, str(ROOT / "scripts" / "train.py"), f"hydra.run.dir={out}/run",
                    f"+projection.out={out}/projection", *SMOKE)  # fmt: skip
        path = Path(out, "projection", "projection.json")
        if not path.exists():
            return f"failed ({_last_line(done.stderr)})"
        roles = json.loads(path.read_text())["memory"]["per_role"]
        return f"{max(role['peak_bytes'] for role in roles):,} bytes"


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PRIMUS_EXT_UNTESTED": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def _pip(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise FailedError(f"pip {' '.join(arguments[:2])} failed: {_last_line(done.stderr)}")
    return done.stdout


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def _package(spec: str) -> str:
    found = re.match(r"[A-Za-z0-9_.-]+", spec)
    assert found is not None, spec
    return found.group()


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _named(versions: dict[str, str]) -> str:
    return ", ".join(f"{p} {versions[p]}" for p in WATCHED if p in versions)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Missing and other releases are named in one sentence; the canary tells what does not fit."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from primus_ext.emulate import releases
from primus_ext.frameworks import canary
from tests.emulation import emulate
from tests.test_emulate_refusals import MODEL
from tests.training import environment

ROOT = Path(__file__).resolve().parent.parent


def test_what_is_accepted_and_tested_is_what_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = (ROOT / "constraints.txt").read_text().replace("_", "-").splitlines()
    for release in releases.NEEDED:
        assert release.package + release.accepted in project["dependencies"]
        assert f"{release.package}=={release.tested}" in pins
        assert releases.found(release) == release.tested
    assert releases.problem() is None


def packages(folder: Path, **versions: str) -> None:
    """Packages that are found before the installed ones: other releases, with nothing inside."""
    (folder / "megatron" / "core").mkdir(parents=True)
    numbers = zip(("MAJOR", "MINOR", "PATCH"), versions["megatron"].split("."), strict=True)
    (folder / "megatron" / "__init__.py").touch()
    (folder / "megatron" / "core" / "__init__.py").write_text("from os import no_such_name\n")
    info = folder / "megatron" / "core" / "package_info.py"
    info.write_text("".join(f"{name} = {number}\n" for name, number in numbers))


def test_another_release_of_megatron_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages(tmp_path / "site", megatron="0.18.2")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}:{ROOT}")
    answer = emulate(tmp_path, 8, MODEL)
    assert (answer["status"], answer["exit_code"]) == ("error", 2), answer
    assert answer["message"] == (
        "megatron-core 0.18.2 is installed, which this version of primus_ext does not support: it "
        "takes megatron-core >=0.19,<0.20 and is tested with 0.19.2 (PRIMUS_EXT_UNTESTED=1 tries "
        "it all the same)"
    )
    monkeypatch.setenv("PRIMUS_EXT_UNTESTED", "1")
    tried = emulate(tmp_path, 8, MODEL)
    assert "no_such_name" in tried["message"]


@pytest.mark.parametrize("module", ["torch", "megatron"])
def test_a_missing_framework_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] == {module!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    answer = emulate(tmp_path, 8, MODEL)
    assert (answer["status"], answer["exit_code"]) == ("error", 2), answer
    package = {"torch": "torch", "megatron": "megatron-core"}[module]
    assert re.fullmatch(
        rf"{package} is not installed for \S+; this version of primus_ext is tested with "
        rf"{package} [\d.]+", answer["message"],
    )  # fmt: skip


def test_the_release_that_is_found_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(**versions: str | None):  # noqa: ANN202
        monkeypatch.setattr(
            releases, "found",
            lambda r: versions.get(r.module, r.tested),
        )  # fmt: skip
        return releases.problem()

    assert found() is None
    assert found(transformer_engine=None) is None  # stand-in layers serve
    assert found(torch="2.15.0+cu130") is None
    rocm = found(transformer_engine="2.4.0+rocm")
    assert "transformer-engine 2.4.0+rocm is installed" in str(rocm)
    assert "torch 2.5.1 is installed" in str(found(torch="2.5.1"))
    assert "megatron-core of an unknown release" in str(found(megatron="of an unknown release"))
    monkeypatch.setattr(releases, "found", lambda r: None)
    assert releases.problem(missing=False) is None


@pytest.fixture(scope="module")
def looked(tmp_path_factory: pytest.TempPathFactory) -> dict:
    import json

    out = tmp_path_factory.mktemp("canary") / "names.json"
    done = subprocess.run(
        [sys.executable, "-m", "primus_ext.frameworks.canary", str(out)],
        env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


def test_every_patch_of_every_group_replaces_something_that_exists(looked: dict) -> None:
    """The canary of the whole registry: run over another release it names what does not fit."""
    assert len(looked["names"]) >= 160
    assert {k: v for k, v in looked["names"].items() if "missing" in v} == {}
    assert looked["unfit"] == {}
    declared = subprocess.run(
        ["git", "grep", "-hE", r"^@(registry\.)?patch\(", "primus_ext"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    ).stdout.splitlines()  # fmt: skip
    patches = {key.partition("|")[0] for key in looked["names"]}
    assert not declared or len(patches) == len(declared)


def test_differences_between_releases_are_told() -> None:
    def names(**values: dict[str, str]) -> dict:
        named = {f"p|m.{name}": value for name, value in values.items()}
        return {"names": named, "unknown": ["old"], "unfit": {}}

    same, body = {"takes": "x, y=", "body": "1"}, {"takes": "x, y=", "body": "2"}
    pinned = names(a=same, b=same, c=same, d=same, e={"missing": "x"}, f=same,
                   g={"takes": "", "body": ""})  # fmt: skip
    other = names(a=same, b=body, c={"takes": "x, z", "body": "1"}, d={"missing": "gone"}, e=same,
                  f={"takes": "y=, x", "body": "1"}, g={"takes": "z=", "body": ""})  # fmt: skip
    other |= {"unknown": ["old", "new"], "unfit": {"primus_ext.x": "ImportError: y"}}
    assert canary.differences(pinned, pinned) == []
    assert canary.differences(pinned, other) == [
        ("m.b", "p", "its body changed"),
        ("m.c", "p", "no longer takes y=; also takes z"),
        ("m.d", "p", "vanished: gone"),
        ("m.f", "p", "takes its parameters in another order"),
        ("m.g", "p", "also takes z="),
        ("transformer_engine_torch: new", "te", "does not fit the stand-in"),
        ("primus_ext.x", "", "can't be imported: ImportError: y"),
    ]


@pytest.mark.parametrize(
    ("program", "options", "code", "words"),
    [
        ("raise SystemExit(1)", [], 0, ""),
        ("raise SystemExit(1)", ["--strict"], 1, ""),
        ("import sys; assert sys.argv[1:] == ['--python', 'x']", ["--python", "x", "--strict"], 0,
         ""),
        ("while True: pass", ["--limit", "0.5"], 0, "did not end within 0.5 s"),
    ],
)  # fmt: skip
def test_the_check_of_newest_releases_never_fails_unless_asked(
    tmp_path: Path, program: str, options: list[str], code: int, words: str
) -> None:
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    shutil.copy(ROOT / "scripts" / "newest", scripts)
    (scripts / "newest_releases.py").write_text(program)
    (scripts / "_setup.sh").write_text(
        f"ROOT={tmp_path}\nPYTHON={sys.executable}\nsay() {{ printf '%s\\n' \"$*\" >&2; }}\n"
    )
    done = subprocess.run([scripts / "newest", *options], capture_output=True, text=True)
    assert done.returncode == code
    assert words in done.stderr

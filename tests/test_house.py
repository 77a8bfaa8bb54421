"""Rules of the house: sizes, imports between rooms, what is tracked, what the wheel ships."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONTRACTS = {c["id"]: c for c in PYPROJECT["tool"]["importlinter"]["contracts"]}
MAX_FILE_LINES, MAX_MEDIAN_LINES, MAX_FUNCTION_LINES = 500, 150, 100


def tracked_files() -> list[Path]:
    """Files that are or would be committed (a release without git: every file but .venv)."""
    git = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:
        paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        skipped = {".venv", ".git", "build", "dist", "outputs", "multirun", "__pycache__"}
        paths = [p for p in ROOT.rglob("*") if not skipped & set(p.relative_to(ROOT).parts)]
    return [p for p in paths if p.is_file() and not p.is_symlink()]


TRACKED = tracked_files()
PYTHON_FILES = [p for p in TRACKED if p.suffix == ".py" and "patches" not in p.parts]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def line_count(path: Path) -> int:
    return len(path.read_text().splitlines())


# Sizes


def test_files_stay_small():
    sizes = {name_of(p): line_count(p) for p in PYTHON_FILES}
    assert len(sizes) > 10  # the list of files itself works
    assert {n: s for n, s in sizes.items() if s > MAX_FILE_LINES} == {}
    package = sorted(s for n, s in sizes.items() if n.startswith("primus_ext/"))
    assert package[len(package) // 2] <= MAX_MEDIAN_LINES


def long_functions(source: str) -> dict[str, int]:
    functions = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    lengths = {f.name: (f.end_lineno or f.lineno) - f.lineno + 1 for f in functions}
    return {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES}


def test_functions_stay_short():
    assert long_functions("def f():\n" + "    pass\n" * MAX_FUNCTION_LINES) == {"f": 101}
    found = {name_of(p): long_functions(p.read_text()) for p in PYTHON_FILES}
    assert {name: functions for name, functions in found.items() if functions} == {}


# What is written where


def print_lines(source: str) -> list[int]:
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]


def test_only_report_and_cli_print():
    assert print_lines("if x:\n    print(1)\n") == [2]
    # The folders below scripts hold commands of their own: they refit and measure, and show it.
    may_print = (
        "primus_ext/report/",
        "primus_ext/cli.py",
        "scripts/fit/",
        "scripts/bench/",
        "tests/",
    )
    found = {
        name: lines
        for p in PYTHON_FILES
        if not (name := name_of(p)).startswith(may_print) and (lines := print_lines(p.read_text()))
    }
    assert found == {}


def test_the_trainer_reads_as_if_projection_did_not_exist():
    files = [ROOT / "scripts" / "train.py", *(ROOT / "hydra_conf" / "trainer").rglob("*.yaml")]
    assert len(files) > 3
    # A key, an option or a module; the projections of an attention layer are meant by no rule.
    knows = re.compile(
        r"\+?projection\s*[=:.]|_projection\b|\bprimus_ext\.(?:runner|project|hydra)\b"
    )
    assert knows.search("+projection=on") and knows.search("projection:\n  mode: on")
    assert [name_of(p) for p in files if knows.search(p.read_text())] == []


# Written so that no line of this file matches.
FORBIDDEN = re.compile(
    r"(?<![\w.])/(?:work|root)/|/opt/(?:wheels|pypi)"  # folders of one machine
    r"|pypi[.]org|python[h]osted|registry[.]npmjs|download[.]pytorch"  # registries' hosts
    r"|--(?:extra-)?index[-]url|--find[-]links"
)


@pytest.mark.parametrize(
    "text",
    ["cd /work" + "/x", "'/root" + "/a'", "//pypi" + ".org/simple", "--extra-index" + "-url x"],
)
def test_the_search_for_places_finds_them(text: str):
    assert FORBIDDEN.search(text)


def test_no_registry_or_machine_path_is_tracked():
    found = {}
    for path in TRACKED:
        text = path.read_bytes().decode("utf-8", errors="ignore")
        if match := FORBIDDEN.search(text):
            found[name_of(path)] = match.group()
    assert found == {}


def test_constraints_only_pin():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert pins and all(re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9_.+!]+", pin) for pin in pins)


# Dependencies


def declared_dependencies() -> list[str]:
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"].values()
    return project["dependencies"] + [spec for extra in extras for spec in extra]


def normalised(spec: str) -> str:
    match = re.match(r"[A-Za-z0-9_.-]+", spec)
    assert match
    return re.sub(r"[-_.]+", "-", match.group()).lower()


@pytest.mark.parametrize("spec", declared_dependencies())
def test_every_dependency_has_its_reason(spec: str):
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    reasons = [line.split("#", 1)[1] for line in lines if f'"{spec}"' in line and "#" in line]
    assert reasons and all(len(reason.split()) >= 2 for reason in reasons)


def test_every_dependency_is_pinned_for_the_tests():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {normalised(line) for line in lines if line and not line.startswith("#")}
    assert {normalised(spec) for spec in declared_dependencies()} - pins == set()


# Rooms

NO_TORCH = {"runner", "tune", "check", "recipe", "report", "project", "cost"}
NO_HYDRA = {"tune", "project", "cost"}
NO_PRICES = {"emulate", "observe"}


def existing(rooms: set[str]) -> set[str]:
    package = ROOT / "primus_ext"
    return {r for r in rooms if (package / f"{r}.py").exists() or list(package.glob(f"{r}/*.py"))}


@pytest.mark.parametrize(
    ("rooms", "forbidden"),
    [(NO_TORCH, "torch"), (NO_HYDRA, "hydra"), (NO_PRICES, "primus_ext.cost")],
)
def test_every_room_has_its_contract(rooms: set[str], forbidden: str):
    held = {
        module.removeprefix("primus_ext.")
        for contract in CONTRACTS.values()
        if forbidden in contract.get("forbidden_modules", ())
        for module in contract["source_modules"]
    }
    assert existing(rooms) - held == set()


def lint_copy(
    folder: Path, contract: str | None, file: str = "", line: str = ""
) -> tuple[int, str]:
    """Run import-linter over a copy of the package with ``line`` added to ``file``."""
    ignored = shutil.ignore_patterns("hydra_conf", "__pycache__")
    for package in ("primus_ext", "hydra_plugins"):
        shutil.copytree(ROOT / package, folder / package, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    if file:
        with (folder / file).open("a") as f:
            f.write(f"\n{line}\n")
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-logo", "--no-cache"]
    command += ["--contract", contract] if contract else []
    # The installed package is imported when Python starts; it must be the copy.
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


def test_contracts_are_kept(tmp_path: Path):
    code, output = lint_copy(tmp_path, None)
    assert code == 0, output
    assert f"Contracts: {len(CONTRACTS)} kept, 0 broken" in output


PROJECT = "import primus_ext.project"
BREAKS = [
    ("layers", "primus_ext/cost/__init__.py", PROJECT),
    ("layers", "primus_ext/plan.py", "import primus_ext.trace"),
    ("layers", "primus_ext/unlisted.py", "X = 1"),
    ("pure-data", "primus_ext/trace.py", "import numpy"),
    ("pricing-without-torch-or-hydra", "primus_ext/project/__init__.py", "import torch"),
    ("pricing-without-torch-or-hydra", "primus_ext/cost/__init__.py", "import hydra"),
    ("no-torch", "primus_ext/report/__init__.py", "import torch"),
    ("no-torch", "primus_ext/runner/outcome.py", "import torch"),
    ("running-knows-no-prices", "primus_ext/emulate/__init__.py", "import primus_ext.cost"),
    ("running-knows-no-prices", "primus_ext/observe/__init__.py", PROJECT),
    ("frameworks-know-no-projection", "primus_ext/frameworks/__init__.py", PROJECT),
    ("outside-knows-the-runner-only", "primus_ext/hydra/__init__.py", PROJECT),
    ("outside-knows-the-runner-only", "primus_ext/cli.py", "import primus_ext.report"),
    ("outside-knows-the-runner-only", "hydra_plugins/primus_ext/plugin.py", PROJECT),
]


@pytest.mark.parametrize(("contract", "file", "line"), BREAKS)
def test_a_breach_of_a_contract_is_found(tmp_path: Path, contract: str, file: str, line: str):
    code, output = lint_copy(tmp_path, contract, file, line)
    assert code == 1 and "0 kept, 1 broken" in output, output


def test_every_contract_is_broken_once():
    assert {contract for contract, _, _ in BREAKS} == set(CONTRACTS)


# Packaging


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the tracked files (setuptools writes beside its sources)."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for path in TRACKED:
        target = source / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    (source / "primus_ext" / "hydra_conf").symlink_to("../hydra_conf")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(out), str(source)], check=True)
    (built,) = out.glob("primus_ext-*.whl")
    return built


def test_the_wheel_ships_code_types_plugins_and_configuration(wheel: Path):
    shipped = set(zipfile.ZipFile(wheel).namelist())
    expected = {"primus_ext/py.typed"}
    for path in TRACKED:
        name = name_of(path)
        if name.startswith(("primus_ext/", "hydra_plugins/")) and path.suffix == ".py":
            expected.add(name)
        if name.startswith("hydra_conf/"):
            expected.add(f"primus_ext/{name}")
    assert expected - shipped == set()
    assert "hydra_plugins/__init__.py" not in shipped
    tops = {name.split("/")[0] for name in shipped}
    beside = {t for t in tops if not t.endswith((".dist-info", ".data"))}
    assert beside == {"primus_ext", "hydra_plugins"}
    assert any(name.endswith("/primus_ext_startup.pth") for name in shipped)


ASK = """
import primus_ext, sys
from pathlib import Path
from primus_ext.conf_dir import hydra_conf_dir
folder = hydra_conf_dir()
assert Path(primus_ext.__file__).is_relative_to(sys.argv[1]), primus_ext.__file__
names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.yaml"))
sys.stdout.write("\\n".join(names))
"""


def ask_for_configuration(site: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run ``ASK`` with the package found in ``site`` and nothing near the working folder."""
    command, env = [sys.executable, "-c", ASK, str(site)], {"PYTHONPATH": str(site)}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)


def test_installed_wheel_and_checkout_hold_the_same_configuration(wheel: Path, tmp_path: Path):
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    answers = [ask_for_configuration(place, tmp_path).stdout.splitlines() for place in (site, ROOT)]
    tracked = sorted(
        p.relative_to(ROOT / "hydra_conf").as_posix()
        for p in TRACKED
        if name_of(p).startswith("hydra_conf/") and p.suffix == ".yaml"
    )
    assert answers == [tracked, tracked]


def test_a_package_without_its_configuration_says_so(wheel: Path, tmp_path: Path):
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    shutil.rmtree(site / "primus_ext" / "hydra_conf", ignore_errors=True)
    done = ask_for_configuration(site, tmp_path)
    assert "installed without its configuration files" in done.stderr


def test_the_link_to_the_configuration_is_tracked_as_a_link():
    link = ROOT / "primus_ext" / "hydra_conf"
    assert link.is_symlink() and link.resolve() == ROOT / "hydra_conf"

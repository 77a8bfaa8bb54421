"""What runs when Python starts in an environment where the package is installed with pip."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.never_train.support import hydra_folder
from tests.test_house import ROOT, TRACKED

TOP = """
import megatron.core.models.gpt.gpt_layer_specs as specs
from megatron.training import pretrain
import hydra

@hydra.main(version_base=None, config_path=None)
def main(cfg):
    print("TRAINS", specs.HAVE_TE)
    raise SystemExit(9)

if __name__ == "__main__":
    main()
"""


def installed(base: Path, *options: str) -> str:
    """Interpreter of an environment with the package; what it needs is found in ours."""
    source = base / "source"
    for path in TRACKED:
        target = source / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    (source / "primus_ext" / "hydra_conf").symlink_to("../hydra_conf")
    venv.create(base / "venv", with_pip=False)
    found = str(base / "venv" / "bin" / "python")
    site = next((base / "venv" / "lib").glob("python*/site-packages"))
    # a line of a .pth file is a path; the .pth files in that folder don't run
    (site / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", found, "install", "--quiet", "--no-deps",
         "--no-build-isolation", "--ignore-installed", *options, str(source)],
        check=True, env=clean(),
    )  # fmt: skip
    assert (site / "primus_ext_startup.pth").is_file()
    return found


@pytest.fixture(scope="module")
def editable(tmp_path_factory: pytest.TempPathFactory) -> str:
    return installed(tmp_path_factory.mktemp("editable"), "-e")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    return installed(tmp_path_factory.mktemp("plain"))


def clean() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RANK")}


def run(python: str, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-W", "ignore", *words], cwd=cwd, env=clean(), capture_output=True, text=True
    )


def test_megatron_is_imported_at_the_top(editable: str, tmp_path: Path) -> None:
    """It would stop there, since Transformer Engine's wheel has no library here."""
    (tmp_path / "top.py").write_text(TOP)
    without = run(editable, tmp_path, "-S", "-c", "import sys; print('primus_ext' in sys.modules)")
    assert without.stdout.strip() == "False"
    done = run(editable, tmp_path, "top.py")
    assert (done.returncode, done.stdout.split()) == (9, ["TRAINS", "False"]), done.stderr[-2000:]
    target = ["+target_cluster=h100_1x8", "+projection.out=out"]
    projected = run(editable, tmp_path, "top.py", "+projection=simulate", *target)
    assert "TRAINS" not in projected.stdout, projected.stderr
    verdict = json.loads((tmp_path / "out" / "verdict.json").read_text())
    # the child got through the same imports, with Transformer Engine, and into main
    assert "exit code 9" in verdict["message"]
    assert "TRAINS True" in (tmp_path / "out" / "child.log").read_text()


def test_an_empty_transformer_engine_fails_with_its_own_words(plain: str, tmp_path: Path) -> None:
    code = (
        "try:\n    import transformer_engine.pytorch\n"
        "except ImportError as error:\n"
        "    print('ImportError', error, type(error.__cause__).__name__)\n"
    )
    done = run(plain, tmp_path, "-c", code * 2)
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and lines[0].startswith("ImportError Found empty"), done
    assert all(line.endswith(" RuntimeError") for line in lines)


def test_another_package_of_that_name_is_left_alone(editable: str, tmp_path: Path) -> None:
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("answer = 42\n")
    assert run(editable, tmp_path, "-c", "import transformer_engine as t; print(t.answer)").stdout
    (package / "__init__.py").write_text("raise RuntimeError('driver')\n")
    failing = run(editable, tmp_path, "-c", "import transformer_engine")
    assert failing.stderr.strip().endswith("RuntimeError: driver")
    assert "ImportError" not in failing.stderr


RERUN = """
import hydra

@hydra.main(version_base=None, config_path=None)
def main(cfg):
    print("TRAINS")

if __name__ == "__main__":
    main()
"""
PICKLED = "+hydra.callbacks.p._target_=hydra.experimental.callbacks.PickleJobInfoCallback"


def test_no_rerun_of_hydra_trains_where_a_projection_was_asked_for(
    editable: str, tmp_path: Path
) -> None:
    (tmp_path / "app.py").write_text(RERUN)
    first = run(editable, tmp_path, "app.py", PICKLED, "+x=1", "hydra.run.dir=first")
    config = tmp_path / "first" / ".hydra" / "config.pickle"
    assert "TRAINS" in first.stdout and config.exists(), first.stderr
    again = run(editable, tmp_path, "app.py", "--experimental-rerun", str(config))
    assert again.stdout.strip() == "TRAINS", again.stderr
    for option in (["--experimental-rerun", str(config)], [f"--exp={config}"]):
        refused = run(editable, tmp_path, "app.py", *option, "+projection=simulate",
                      "+projection.out=out")  # fmt: skip
        assert (refused.returncode, refused.stdout) == (2, ""), refused.stderr
        assert "can't be combined with +projection=simulate" in refused.stderr
        assert json.loads((tmp_path / "out" / "verdict.json").read_text())["exit_code"] == 2
        shutil.rmtree(tmp_path / "out")
    held = pickle.loads(config.read_bytes())
    OmegaConf.set_readonly(held.hydra, False)
    held.hydra.overrides.task.append("+projection=simulate")
    config.write_bytes(pickle.dumps(held))
    refused = run(editable, tmp_path, "app.py", "--experimental-rerun", str(config))
    assert (refused.returncode, refused.stdout) == (2, ""), refused.stderr
    assert "holds that override" in refused.stderr


def test_saved_overrides_of_hydra_1_4_do_not_train(editable: str, tmp_path: Path) -> None:
    """There a rerun composes again, from overrides that no plugin is told of."""
    folder = hydra_folder("1.4-pre")
    (tmp_path / "app.py").write_text(RERUN)

    def app(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [editable, "app.py", *words], cwd=tmp_path, capture_output=True, text=True,
            env=clean() | {"PYTHONPATH": str(folder)},
        )  # fmt: skip

    first = app("+x=1", "hydra.run.dir=first")
    again = app("--experimental-rerun", "first")
    assert "TRAINS" in first.stdout and "TRAINS" in again.stdout, again.stderr
    saved = tmp_path / "first" / ".hydra" / "overrides.yaml"
    saved.write_text(saved.read_text() + "- +projection=simulate\n")
    refused = app("--experimental-rerun", "first")
    assert (refused.returncode, refused.stdout) == (2, ""), refused.stderr
    assert "holds that override" in refused.stderr

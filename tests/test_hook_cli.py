"""The ``primus-ext`` command."""

from __future__ import annotations

from pathlib import Path

import pytest

from primus_ext import cli
from primus_ext.runner import Outcome, close


def test_targets(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["targets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "h100: 1x1 1x2 1x4 1x8 2x8 4x8 8x8 16x8 32x8 64x8 128x8 256x8 512x8 1024x8" in lines


@pytest.mark.parametrize("code", [0, 2, 4, 6])
def test_verdict_ends_with_the_code_of_the_run(
    code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """What torchrun folds into 1."""
    close(Outcome(exit_code=code, message="what happened"), tmp_path)
    assert cli.main(["verdict", str(tmp_path)]) == code
    assert capsys.readouterr().out == "what happened\n"


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"exit_code": 0}'])
def test_a_verdict_that_is_none(content: str | None, tmp_path: Path):
    if content is not None:
        (tmp_path / "verdict.json").write_text(content)
    assert cli.main(["verdict", str(tmp_path)]) == 2


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--version"], 0), (["--help"], 0), ([], 2), (["nothing"], 2)]
)
def test_arguments(arguments: list[str], code: int):
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    assert left.value.code == code

"""Projected step times are those that were committed."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from primus_ext.runner import runs

ROOT = Path(__file__).resolve().parents[1]
# Two of the cheapest: dense with its optimizer sharded over one replica, and without.
FEW = (
    "bloom-a100-18b-h14336-l6-a64-dp1tp8pp1-mbs2-gbs512-v2",
    "vtrain-a100-single-h1024-l16-4g-tp1dp4pp1-mbs1-gbs8",
)


@pytest.fixture(scope="module")
def gate() -> ModuleType:
    path = ROOT / "scripts" / "regression_gate.py"
    spec = importlib.util.spec_from_file_location("regression_gate", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["regression_gate"] = module
    spec.loader.exec_module(module)
    return module


def test_the_table_is_of_the_committed_runs(gate: ModuleType) -> None:
    wanted = {run["id"]: run for run in runs.load(gate.RUNS)}
    table = gate.committed(gate.TABLE)
    assert list(table) == list(wanted)
    for name, one in table.items():
        assert one.measured_s == pytest.approx(runs.measured_seconds(wanted[name]), rel=1e-5)
        assert sum(one.terms.values()) == pytest.approx(one.predicted_s, rel=1e-5)
    assert len({runs.source(run) for run in wanted.values()}) >= 10


def test_what_was_written_is_read_back(gate: ModuleType, tmp_path: Path) -> None:
    table = gate.committed(gate.TABLE)
    path = tmp_path / "t.csv"
    path.write_text(gate.written(table))
    assert gate.committed(path) == table
    assert path.read_text() == gate.TABLE.read_text()


def test_a_run_that_moves_is_named_with_its_terms(gate: ModuleType) -> None:
    old = {n: gate.Prediction(2.5, 2.0, {"gemm": 1.5, "bubble": 0.5}) for n in ("a", "b")}
    slower = gate.Prediction(2.5, 2.003, {"gemm": 1.503, "bubble": 0.5})
    new = {"a": dataclasses.replace(old["a"], predicted_s=2.0019), "b": slower}
    (line,) = gate.moved(new, old)
    assert line == "b: 2 s became 2.003 s (+0.15%); gemm +0.003 s"
    assert gate.moved(old, old) == []


def test_a_run_that_is_new_or_gone_is_named(gate: ModuleType) -> None:
    one = gate.Prediction(1.0, 1.0, {"gemm": 1.0})
    assert gate.moved({"a": one}, {"b": one}) == [
        "a is not in the table", "b is in the table and not projected",
    ]  # fmt: skip


def test_the_mean_error_counts_too_long_and_too_short_alike(gate: ModuleType) -> None:
    found = {"a": gate.Prediction(2.0, 2.2, {}), "b": gate.Prediction(4.0, 3.2, {})}
    assert gate.mean_error(found) == pytest.approx(15.0)


def test_two_runs_are_projected_as_committed(gate: ModuleType) -> None:
    table = gate.committed(gate.TABLE)
    now = gate.predictions(runs.load(gate.RUNS, FEW), lambda *_: None, 1)
    assert gate.moved(now, {name: table[name] for name in FEW}) == []


@pytest.mark.slow
def test_no_projection_moved(gate: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert gate.main([]) == 0, capsys.readouterr().err

"""The fit of training's factors: known factors come back, groups are left out as a whole."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from primus_ext.cluster_data import load_accelerator
from primus_ext.cluster_files import accelerator_names, sustained_name
from primus_ext.cost.sustained import KINDS, REFERENCE
from primus_ext.report import fit_errors
from primus_ext.runner import fit, fitting
from primus_ext.runner.fitting import Sample

GEMM, MEMORY = ("hopper", "gemm/bf16"), ("nvidia", "memory")
PRIOR = {GEMM: 1.0, MEMORY: 1.0}


def sample(number: int, parts: tuple[float, float], truth: dict, factors: dict) -> Sample:
    """A step of two parts; priced with ``factors``, measured with the true ones."""
    priced = parts[0] * factors[GEMM] + parts[1] * factors[MEMORY]
    measured = parts[0] * truth[GEMM] + parts[1] * truth[MEMORY]
    slopes = {GEMM: parts[0] * factors[GEMM] / priced, MEMORY: parts[1] * factors[MEMORY] / priced}
    return Sample(id=f"r{number}", source="s", group=f"g{number}", measured_s=measured,
                  priced_s=priced, slopes=slopes, stratum="dense")  # fmt: skip


def rounds(truth: dict, parts: list[tuple[float, float]], count: int = fit.ROUNDS) -> dict:
    factors = dict(PRIOR)
    for _ in range(count):
        samples = [sample(i, p, truth, factors) for i, p in enumerate(parts)]
        factors, _ = fitting.solve(samples, factors, PRIOR)
    return factors


@given(st.floats(0.7, 1.6), st.floats(0.7, 2.0))
def test_factors_that_made_the_times_come_back(gemm: float, memory: float) -> None:
    parts = [(1.0, 0.05) if i % 2 else (0.05, 1.0) for i in range(40)]
    found = rounds({GEMM: gemm, MEMORY: memory}, parts)
    assert found[GEMM] == pytest.approx(gemm, rel=0.02)  # the prior draws a little
    assert found[MEMORY] == pytest.approx(memory, rel=0.02)


def test_a_factor_without_rows_stays_at_its_prior() -> None:
    found = rounds({GEMM: 1.4, MEMORY: 3.0}, [(1.0, 0.0)] * 20)
    assert found[MEMORY] == 1.0 and found[GEMM] == pytest.approx(1.4, rel=0.02)


def test_one_row_far_off_does_not_decide() -> None:
    samples = [sample(i, (1.0, 0.0), {GEMM: 1.2, MEMORY: 1.0}, PRIOR) for i in range(9)]
    far = dataclasses.replace(samples[0], id="far", group="far", measured_s=12.0)
    found, _ = fitting.solve([*samples, far], PRIOR, PRIOR)
    assert found[GEMM] == pytest.approx(1.2, rel=0.06)


def test_rows_of_a_left_out_group_have_no_say() -> None:
    samples = [sample(i, (1.0, 0.5), {GEMM: 1.3, MEMORY: 1.1}, PRIOR) for i in range(12)]
    fold = fitting.fold_of("g0")
    off = fitting.left_out(samples, PRIOR, PRIOR)
    wild = [dataclasses.replace(s, measured_s=99.0) if fitting.fold_of(s.group) == fold else s
            for s in samples]  # fmt: skip
    again = fitting.left_out(wild, PRIOR, PRIOR)
    mine = np.array([fitting.fold_of(s.group) == fold for s in samples])
    assert mine.any() and not mine.all()
    moved = np.log(99.0 / np.array([s.measured_s for s in samples]))
    assert again[mine] == pytest.approx((off - moved)[mine])  # predicted as before
    assert again[~mine] != pytest.approx(off[~mine])


def test_the_interval_holds_the_share_it_is_meant_to() -> None:
    samples = [dataclasses.replace(sample(i, (1.0, 0.0), PRIOR, PRIOR), stratum=s)
               for s in ("dense", "experts") for i in range(100)]  # fmt: skip
    off = np.array([0.01 * i for i in range(100)] + [-0.02 * i for i in range(100)])
    found = fitting.quantile_of_errors(samples, off, 0.9)
    assert found["dense"] == pytest.approx(0.9, abs=0.011)
    assert found["experts"] == pytest.approx(1.8, abs=0.021)


def test_every_accelerator_has_a_table_of_its_generation() -> None:
    products = [name for name in accelerator_names() if name != "cpu"]
    assert {sustained_name(name) for name in products} == set(fit._REFERENCES)
    for name in products:
        table = load_accelerator(name).sustained
        strata = {"step_error/dense", "step_error/experts"}
        assert set(table) <= {*KINDS, REFERENCE, fit.HOST, *strata}
        assert table[fit.HOST].value > 0 and all(f.source for f in table.values())


def test_the_table_names_rows_and_error_of_each_factor() -> None:
    factors = fit.start()
    own = fit.parameter("ampere", "nvidia", "gemm/bf16")
    slopes = {own: 0.9}
    samples = [Sample(id=f"r{i}", source="s", group=f"g{i % 2}", measured_s=1.0, priced_s=1.0,
                      slopes=slopes, stratum="dense") for i in range(4)]  # fmt: skip
    found = fit.Fit({**factors, own: 1.234567}, samples, [math.log(1.1)] * 4, {"dense": 0.1})
    text = fit.table(found, "ampere")
    read = yaml.safe_load(text)
    assert read["gemm/bf16"]["value"] == 1.23
    assert "4 runs of 2 groups, held out 10.0% off" in read["gemm/bf16"]["source"]
    assert "memory" not in read and read["step_error/dense"]["value"] == 0.1
    assert read[fit.HOST]["source"] == "no rows; the prior"
    assert fit.table(found, "ampere") == text


def test_the_page_has_bias_and_worst_by_source_and_group() -> None:
    text = fit_errors.markdown([("a", "a, m", "1", math.log(1.2)), ("a", "a, n", "2", 0.0)])
    assert "| a | 2 | 10.0% | +10.0% | +20.0% |" in text
    assert "| a, m | 1 | 20.0% | +20.0% | +20.0% |" in text


def test_nothing_to_fit_to_is_said_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from primus_ext.cli import main

    runs = tmp_path / "runs.yaml"
    runs.write_text("[{id: a, completeness: partial}]")
    assert main(["fit", str(runs), "--out", str(tmp_path)]) == 2
    assert "holds no run that can be projected" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [runs]


@pytest.mark.slow
def test_the_same_runs_give_the_same_files(tmp_path: Path) -> None:
    from primus_ext.cli import main

    runs = Path(__file__).parents[1] / "validation" / "sanity_runs.yaml"
    folders = tmp_path / "a", tmp_path / "b"
    for folder in folders:
        assert main(["fit", str(runs), "--out", str(folder)]) == 0
    for path in sorted(folders[0].iterdir()):
        assert path.read_bytes() == (folders[1] / path.name).read_bytes()

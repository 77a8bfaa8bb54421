"""The page of rankings: figures against arithmetic by hand, and the committed sweeps."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from primus_ext.runner import runs, validate

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def rankings() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rankings", ROOT / "scripts" / "rankings.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rankings"] = module
    spec.loader.exec_module(module)
    return module


def run(name: str, layers: int, rate: float, gbs: int = 64) -> dict[str, Any]:
    """A run of 8 GPUs and 1,024 tokens a sequence."""
    recompute = {"granularity": "full", "num_layers": layers} if layers else {"granularity": "none"}
    return {
        "id": name, "source": {"name": "s"}, "model": {"name": "m", "num_layers": 8},
        "hardware": {"gpu": "g", "num_gpus": 8}, "batch": {"gbs": gbs, "seq_len": 1024},
        "recompute": recompute, "normalized": {"tokens_per_s_per_gpu": rate},
        "predictions": [{"tokens_per_s_per_gpu": 2 * rate}],
    }  # fmt: skip


def row(one: dict[str, Any], projected: float) -> validate.Row:
    """It, projected at a throughput."""
    measured = runs.measured_seconds(one)
    rate = one["normalized"]["tokens_per_s_per_gpu"]
    return validate.Row(
        id=one["id"], group="s, m, g", measured_s=measured, predicted_s=measured * rate / projected
    )


def test_a_sweep_by_hand(rankings: ModuleType) -> None:
    """Rates 100, 80, 50 projected as 110, 120, 50: the second is chosen, 20 % slower than best."""
    wanted = {one["id"]: one for one in (run("a", 0, 100), run("b", 0, 80, 32), run("c", 8, 50))}
    rows = [row(wanted["a"], 110), row(wanted["b"], 120), row(wanted["c"], 50)]
    found = rankings.summary(rows, wanted, sweep=True)
    assert found["regret"] == pytest.approx(25.0)  # 100 / 80 of the time
    assert found["spearman"] == pytest.approx(0.5)
    assert found["kendall"] == pytest.approx(1 / 3)
    assert found["k"] == pytest.approx((1.1 + 1.5 + 1.0) / 3)
    rule = rankings.trivial(rows, wanted)
    assert rule["regret"] == pytest.approx(12.5)  # undecided between a and b
    assert rule["spearman"] == pytest.approx(3**0.5 / 2)
    page = rankings.page(rows, wanted, False)
    assert "| a | 110 | 100 | -9.1 % | 1.100 |" in page
    assert page.index("| a |") < page.index("| b |") < page.index("| c |")
    assert "| the paper's tool, with its GPU | 3 | 50.0 | -50.0 | 1.000 | 1.000 | 0.0 |" in page


def test_figures_of_groups_and_what_was_not_projected(rankings: ModuleType) -> None:
    wanted = {one["id"]: one for one in (run("a", 0, 100), run("b", 0, 80))}
    rows = [row(wanted["a"], 100), validate.Row(id="b", group="s, m, g", skipped="no data")]
    page = rankings.page(rows, wanted, True)
    assert "| s, m, g | 1 | 0.0 | 0.0 | - |" in page
    assert "- b: no data" in page


def test_the_committed_sweeps_are_those_of_the_paper(rankings: ModuleType) -> None:
    """Best and worst of each table of arXiv 2610.19423, and the number of its runs."""
    every = runs.load(rankings.SEEDS)
    for model, count, best, worst in (
        ("mixtral", 6, 4213, 3558), ("qwen3", 6, 4380, 3802), ("gpt-oss", 6, 12168, 9489),
    ):  # fmt: skip
        rates = [one["normalized"]["tokens_per_s_per_gpu"]
                 for one in every if one["id"].startswith(f"seed-{model}-")]  # fmt: skip
        assert (len(rates), max(rates), min(rates)) == (count, best, worst)
    gathered = validate.gather(every, lambda _: False)
    assert not gathered.skipped and len(gathered.programs) == 18
    assert [len(rankings.thinned(every, n)) for n in (1, 4, 18)] == [18, 5, 1]

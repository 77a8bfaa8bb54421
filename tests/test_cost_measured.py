"""Measured neighbours of shapes, and prices that other packages bring."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from primus_ext.cluster_data import load_accelerator, load_cluster
from primus_ext.cost import attention_table, gemm, gemm_table, measured, tables
from primus_ext.cost.measured import Measured, product
from primus_ext.cost.model import CostModel
from primus_ext.cost.priced import MODEL, CostError
from tests.synthetic import Job, attention
from tests.synthetic import gemm as gemm_op

AXIS = np.array([512, 1024, 2048])
AXES = (AXIS, AXIS, AXIS)
INSTALLED = importlib.util.find_spec("pyarrow") and tables.source()


def model(m: int, n: int, k: int) -> float:
    return 2.0 * m * n * k / 1e15


def grid(ratio) -> gemm_table.GemmTable:
    seconds = np.array(
        [[[ratio(m, n, k) * model(m, n, k) for k in AXES[2]] for n in AXES[1]] for m in AXES[0]]
    )
    return gemm_table.GemmTable(AXES, seconds, "a table 1.0")


def test_a_constant_miss_is_found_everywhere_and_beyond_the_grid() -> None:
    table = grid(lambda m, n, k: 1.3)
    for shape in [(512, 512, 512), (700, 1800, 1024), (100000, 64, 4096)]:
        near = table.near(*shape, model)
        assert near is not None and near.ratio == pytest.approx(1.3)
    assert table.near(512, 512, 512, model).octaves == 0  # pyright: ignore
    assert table.near(512, 512, 4096, model).octaves == pytest.approx(1)  # pyright: ignore


def test_between_shapes_the_miss_is_interpolated_in_logarithms() -> None:
    table = grid(lambda m, n, k: {512: 1.0, 1024: 1.0, 2048: 4.0}[n])
    assert table.near(1024, 1448, 1024, model).ratio == pytest.approx(2.0, rel=1e-3)  # pyright: ignore


def test_one_odd_row_among_its_neighbours_is_smoothed_away() -> None:
    table = grid(lambda m, n, k: 9.0 if m == 1024 else 1.1)
    assert table.near(1024, 1024, 1024, model).ratio == pytest.approx(1.1)  # pyright: ignore


def test_nothing_is_said_where_nothing_was_measured() -> None:
    empty = gemm_table.GemmTable(AXES, np.full((3, 3, 3), np.nan), "a table 1.0")
    assert empty.near(1024, 1024, 1024, model) is None


def test_attention_takes_the_nearest_shapes() -> None:
    keys = np.array([[1, s, h, h] for s in (1024, 4096, 16384) for h in (8, 64)], dtype=float)
    slow = keys[:, 1] >= 16384

    def flat(batch: int, seq: int, heads: int, kv_heads: int) -> float:
        return 1e-9 * batch * seq * heads

    seconds = np.array([flat(*map(int, key)) for key in keys]) * np.where(slow, 2.0, 1.0)
    table = attention_table.AttentionTable(keys, seconds, "a table 1.0")
    exact = table.near(1, 16384, 64, 64, flat)
    assert exact is not None and exact.octaves == 0 and 1.7 < exact.ratio <= 2.0
    assert table.near(1, 1024, 8, 8, flat).ratio == pytest.approx(1.0, abs=0.06)  # pyright: ignore


def test_a_measured_neighbour_beats_the_formula_and_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accelerator = load_accelerator("h100")
    axis = np.array([1024, 4096])
    seconds = np.array([[[1.5 * gemm.price(accelerator, product(m, n, k, "bf16")).seconds
                          for k in axis] for n in axis] for m in axis])  # fmt: skip
    loaded: list[str] = []

    def load(system: str, number_format: str, without: tuple[str, ...] = ()):
        loaded.append(f"{system} {number_format}")
        return gemm_table.GemmTable((axis, axis, axis), seconds, "a table 1.0")

    monkeypatch.setattr(measured.gemm_table, "load", load)
    formula = CostModel(load_cluster("h100", 1, 8), tables=False, alone=True)
    both = CostModel(load_cluster("h100", 1, 8), alone=True)
    assert loaded == []  # lazy
    op = gemm_op(2048, 2048, 2048)
    priced = both.op_seconds(op)
    assert priced.seconds == pytest.approx(1.5 * formula.op_seconds(op).seconds)
    assert priced.evidence == "table: a table 1.0, 1.0 octaves away, x1.50"
    assert both.op_seconds(op) is priced  # priced once
    both.op_seconds(gemm_op(4096, 4096, 4096))
    assert loaded == ["h100_sxm bf16"]
    # what the tables do not hold keeps its formula: FP8 with scales, a backward
    for other in (gemm_op(2048, 2048, 2048, "fp8_e4m3/mxfp8"), attention(Job(), "backward")):
        model = CostModel(load_cluster("b200", 1, 8), alone=True)
        assert model.op_seconds(other).evidence == MODEL


@pytest.mark.parametrize("name", ["h100_hbm2e", "a100_pcie", "mi355x", "mi350x"])
def test_products_without_tables_are_never_corrected(name: str) -> None:
    accelerator = load_accelerator(name)
    assert accelerator.measured_tables == ""
    op = gemm_op(4096, 4096, 4096)
    priced = gemm.price(accelerator, op)
    assert Measured(accelerator).correct(op, priced) is priced


@pytest.mark.skipif(not INSTALLED, reason="the optional extra 'tables' is not installed")
def test_the_real_tables_bring_a_price_near_the_measured_one() -> None:
    model = CostModel(load_cluster("h100", 1, 8), alone=True)
    priced = model.op_seconds(gemm_op(4096, 4096, 4096))
    # medians of the frameworks on this very shape: 770, 789 and 828 TFLOP/s
    assert 2 * 4096**3 / priced.seconds / 1e12 == pytest.approx(789, rel=0.06)
    assert priced.evidence.startswith("table: aiconfigurator-core 0.12")


def test_without_the_extra_the_formulas_stand_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "source", lambda: None)
    cluster = load_cluster("h100", 1, 8)
    op = gemm_op(4096, 4096, 4096)
    formulas = CostModel(cluster, tables=False, alone=True)
    assert CostModel(cluster, alone=True).op_seconds(op) == formulas.op_seconds(op)


def test_a_package_prices_products_through_an_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny_prices.py").write_text(
        "from primus_ext.cost.priced import Priced\n"
        "def price(accelerator, op):\n"
        "    if dict(op.attrs)['k'] > 1000:\n"
        "        return None\n"
        "    return Priced(42.0, 'tiny: ' + accelerator.name, {})\n"
    )
    info = tmp_path / "tiny_prices-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-prices\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(
        "[primus_ext.gemm_backends]\ntiny = tiny_prices:price\nbroken = tiny_prices:nothing\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    cluster = load_cluster("h100", 1, 8)
    model = CostModel(cluster, gemm_backend="tiny", tables=False, alone=True)
    own = model.op_seconds(gemm_op(64, 64, 64))
    assert (own.seconds, own.evidence) == (42.0, "tiny: h100")
    op = gemm_op(4096, 4096, 4096)
    plain = CostModel(cluster, tables=False, alone=True)
    assert model.op_seconds(op) == plain.op_seconds(op)
    assert plain.op_seconds(gemm_op(64, 64, 64)).seconds < 1  # nothing is used by being installed
    with pytest.raises(CostError, match="gemm_backend=other is not known: .*broken, tiny"):
        CostModel(cluster, gemm_backend="other", alone=True)
    with pytest.raises(CostError, match="gemm_backend=broken can't be used"):
        CostModel(cluster, gemm_backend="broken", alone=True)

"""Measured NCCL times go before the formula where there are some."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from primus_ext.cluster_data import load_cluster
from primus_ext.cost import collective_tables
from primus_ext.cost.model import CostModel
from primus_ext.cost.priced import MODEL, TABLE, Priced
from primus_ext.trace import Collective, CollectiveKind

GATHER, REDUCE = CollectiveKind.ALL_GATHER, CollectiveKind.ALL_REDUCE
CURVE = [(1024, 10e-6), (2**20, 40e-6), (2**22, 90e-6)]


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"h100": {(GATHER, "fp16", 8): CURVE, (REDUCE, "fp16", 8): CURVE,
                      (REDUCE, "int8", 8): [(size, 2 * s) for size, s in CURVE]}}  # fmt: skip
    monkeypatch.setattr(collective_tables, "rows", lambda name: found.get(name, {}))


def price(
    kind: CollectiveKind, size: int, *, ranks: int = 8, name: str = "h100", dtype: str = "bf16"
) -> Priced:
    cost = CostModel(load_cluster(name, 2, 8), alone=True)
    return cost.collective_seconds(
        Collective(kind=kind, group="g", bytes=size, dtype=dtype), list(range(ranks))
    )


@pytest.mark.usefixtures("tables")
def test_measured_sizes_come_back_and_between_them_logarithms_are_straight() -> None:
    for size, seconds in CURVE:
        found = price(GATHER, size)
        assert found.seconds == seconds and found.evidence == TABLE
        assert sum(found.terms.values()) == pytest.approx(seconds)
    assert price(GATHER, 2**21).seconds == pytest.approx(math.sqrt(40e-6 * 90e-6))
    assert price(GATHER, 16).seconds == 10e-6


@pytest.mark.usefixtures("tables")
def test_beyond_the_last_size_the_formula_goes_on_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = price(GATHER, 2**28).seconds
    monkeypatch.setattr(collective_tables, "rows", lambda _name: {})
    ratio = 90e-6 / price(GATHER, 2**22).seconds
    assert measured == pytest.approx(price(GATHER, 2**28).seconds * ratio)


@pytest.mark.usefixtures("tables")
def test_sums_that_the_switch_can_not_add_have_a_curve_of_their_own() -> None:
    assert price(REDUCE, 2**20, dtype="fp32").seconds == 40e-6
    assert price(REDUCE, 2**20, dtype="fp8_e4m3").seconds == 80e-6
    assert price(GATHER, 2**20, dtype="uint8").seconds == 40e-6


@pytest.mark.usefixtures("tables")
def test_other_groups_kinds_and_products_keep_the_formula() -> None:
    for found in (
        price(GATHER, 2**20, ranks=16),
        price(GATHER, 2**20, ranks=6),
        price(CollectiveKind.BROADCAST, 2**20),
        price(GATHER, 2**20, name="h200"),
    ):
        assert found.evidence == MODEL


def test_without_the_package_there_are_no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_folder", "_reader"):
        monkeypatch.setattr(collective_tables, name, lambda: None)
    collective_tables.rows.cache_clear()
    assert not collective_tables.available()
    assert collective_tables.rows("h100") == {}
    assert price(GATHER, 2**20).evidence == MODEL
    collective_tables.rows.cache_clear()


@pytest.mark.usefixtures("tables")
def test_a_file_that_builds_on_a_product_does_not_take_its_measured_times(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("like: h100\nscale_up_bandwidth: {value: 9.0e+11, source: a test}\n")
    mine = CostModel(load_cluster(str(file), 2, 8), alone=True)
    asked = Collective(kind=GATHER, group="g", bytes=2**20, dtype="bf16")
    assert mine.collective_seconds(asked, range(8)).evidence == MODEL
    assert price(GATHER, 2**20).evidence == TABLE

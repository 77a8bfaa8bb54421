"""Prices between measurements: left-out residuals, intervals, and what is measured next."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path

import numpy as np
import pytest

from primus_ext.cluster_data import load_cluster
from primus_ext.cost.latency_db import (
    Clock,
    Device,
    LatencyDatabase,
    Origin,
    kinds,
    kriging,
)
from primus_ext.cost.latency_db.kriging import Field, quantile
from primus_ext.cost.latency_db.planning import Planner
from primus_ext.cost.latency_db.prices import Prices
from primus_ext.cost.latency_db.regression import Regression, Roofline
from primus_ext.cost.model import CostModel
from primus_ext.cost.priced import MODEL, TABLE
from primus_ext.trace import Family, Op, TensorSpec
from tests.latency_rows import CPU, product, row


def stream(elements: int, name: str = "aten.exp") -> Op:
    spec = TensorSpec((elements,), "fp32")
    return Op(name, Family.MEMORY, (spec,), (spec,), 0, 8 * elements)


def device(op: Op) -> float:
    """Seconds on a machine that the roofline describes but for one wave in the rate."""
    wave = 1 + 0.1 * math.sin(math.log2(op.attr("m", 64)))
    return 1e-6 + op.flops / 1e11 * wave + op.bytes / 1e10


def test_left_out_residuals_are_those_of_fields_without_the_point() -> None:
    places = [[0.0, 1.0], [1.5, 0.2], [2.0, 3.0], [4.0, 1.0], [5.0, 2.5], [7.0, 0.0]]
    values = [0.1, 0.3, -0.2, 0.05, 0.4, 0.0]
    field = Field(places, values)
    reach, scatter = field._reach, field._scatter
    for i, standard in enumerate(field.residuals):
        rest = [j for j in range(6) if j != i]
        near = np.array([[math.dist(places[a], places[b]) for b in rest] for a in rest])
        alike = np.exp(-near / reach) + scatter * np.eye(5)
        here = np.exp(-np.array([math.dist(places[i], places[b]) for b in rest]) / reach)
        # the textbook's system of ordinary kriging, with its multiplier
        system = np.block([[alike, np.ones((5, 1))], [np.ones((1, 5)), np.zeros((1, 1))]])
        solved = np.linalg.solve(system, np.append(here, 1.0))
        error = values[i] - float(solved[:5] @ np.array([values[j] for j in rest]))
        variance = 1 + scatter - float(solved @ np.append(here, 1.0))
        assert standard == pytest.approx(error / math.sqrt(variance), rel=1e-6)


def test_a_constant_is_found_everywhere_and_doubt_grows_with_distance() -> None:
    field = Field([[0.0], [1.0], [2.0], [3.0], [4.0]], [0.3] * 5)
    found = [field.at([x]) for x in (2.0, 2.5, 6.0, 60.0)]
    assert [f.value for f in found] == pytest.approx([0.3] * 4)
    deviations = [f.deviation for f in found]
    assert deviations == sorted(deviations) and deviations[0] < deviations[-1]
    assert [f.octaves for f in found] == [0.0, 0.5, 2.0, 56.0]


def test_many_values_are_answered_by_the_nearest(monkeypatch) -> None:
    places = [[i / 7, (i * 5 % 11) / 3] for i in range(60)]
    values = [math.sin(x) + 0.1 * y for x, y in places]
    whole = Field(places, values).at([4.1, 1.0]).value
    monkeypatch.setattr(kriging, "MOST", 20)
    assert Field(places, values).at([4.1, 1.0]).value == pytest.approx(whole, abs=0.05)


def test_the_quantile_is_that_of_conformal_prediction_or_of_students_t() -> None:
    # of n residuals the ceil((n + 1) 0.9)-th smallest
    assert quantile([float(i) for i in range(1, 20)]) == 18.0
    assert quantile([-float(i) for i in range(1, 10)]) == 9.0
    # too few for that: t of two degrees of freedom is 2.92
    assert quantile([1.0, -1.0, 1.0]) == pytest.approx(2.92)
    assert quantile([0.5]) == quantile([]) == math.inf


def test_nine_of_ten_unseen_shapes_lie_in_their_intervals() -> None:
    source = random.Random(3)
    sizes = [64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048]
    shapes = {tuple(source.choice(sizes) for _ in range(3)) for _ in range(160)}
    ops = [product(*shape) for shape in sorted(shapes)]
    times = {op: device(op) * math.exp(source.gauss(0, 0.02)) for op in ops}
    source.shuffle(ops)
    known, held = ops[:60], ops[60:]
    regression = Regression([(op, times[op]) for op in known])
    found = [regression.estimate(op) for op in held]
    inside = [f is not None and f.low <= times[op] <= f.high for op, f in zip(held, found)]  # noqa: B905
    errors = [abs(f.seconds / times[op] - 1) for op, f in zip(held, found) if f]  # noqa: B905
    assert len(errors) == len(held) and sum(inside) / len(inside) > 0.82
    assert sorted(errors)[len(errors) // 2] < 0.03 and max(errors) < 0.25


def test_the_roofline_is_the_one_behind_the_times() -> None:
    ops = [product(2**i, 256, 2 ** (12 - i)) for i in range(5, 10)]
    ops += [product(2**i, 256, 256) for i in range(6, 10)] + [stream(2**i) for i in range(8, 20)]
    found = Roofline.of([(op, op.flops / 1e11 + op.bytes / 1e10 + 1e-6) for op in ops])
    assert found.costs["gemm fp32"] == pytest.approx((1e-6, 1e-11, 1e-10), rel=1e-6)
    assert found.costs["memory "] == pytest.approx((1e-6, 0.0, 1e-10), rel=1e-6)
    # a time that falls with size has no negative cost
    falling = Roofline.of([(stream(2**8), 2e-6), (stream(2**9), 1e-6)])
    assert falling.costs["memory "][2] == 0.0 and falling.costs["memory "][0] > 0
    with pytest.raises(ValueError, match=r"aten\.mm"):
        falling.seconds(product(64))


def test_a_kind_without_measurements_is_priced_as_its_family_and_says_so() -> None:
    regression = Regression([(stream(2**i), 1e-9 * 2**i) for i in range(8, 14)])
    found = regression.estimate(stream(2**10, "aten.log"))
    assert found is not None and found.points == 0 and found.octaves == math.inf
    assert found.high == math.inf  # one other kind says nothing of how kinds differ
    assert regression.estimate(product(64)) is None
    assert Regression([]).estimate(product(64)) is None


def test_ops_of_one_kind_differ_in_size_alone() -> None:
    same = [product(64), product(128), product(64, name="primus_te.gemm")]
    assert len({kinds.kind_of(op) for op in same}) == 1
    assert kinds.place_of(product(128))[0] == kinds.place_of(product(64))[0] + 1
    row_spec, full = TensorSpec((8,), "fp32"), TensorSpec((4, 8), "fp32")
    one, column = TensorSpec((), "fp32"), TensorSpec((4, 1), "fp32")
    seen = [
        kinds.kind_of(Op("aten.mul", Family.MEMORY, (full, other), (full,), 0, 1))
        for other in (full, row_spec, one, column)
    ]
    assert len(set(seen)) == 4


def smooth(op: Op) -> float:
    """Seconds on a machine that the roofline describes but for its memory-bound ops' pace."""
    return 1e-6 + op.flops / 1e11 + op.bytes / (1e10 if op.flops else 0.4e10)


@pytest.mark.parametrize(
    ("seconds", "most", "off"),
    [(smooth, 0.3, 0.02), (device, 0.6, 0.1)],  # small shapes don't show the device's wave of 10 %
)
def test_a_plan_settles_every_op_in_less_time_than_measuring_all(
    seconds, most: float, off: float
) -> None:
    wide = [product(m, n, k) for m in (512, 1024) for n in (512, 768, 1024) for k in (512, 1024)]
    small = [product(m, n, k) for m in (64, 128) for n in (512, 768, 1024) for k in (512, 1024)]
    configurations = {
        "a": {op: 2 for op in wide[:8]} | {stream(2**20): 1, stream(2**20, "aten.log"): 1},
        "b": {op: 1 for op in wide[4:]} | {stream(2**21): 3},
    }
    planner = Planner(configurations, [*small, stream(2**18), stream(2**19)])
    known: dict[Op, float] = {}
    while chosen := planner.next(known):
        assert len({kinds.kind_of(op) for op in chosen}) == len(chosen)
        assert not known.keys() & set(chosen)
        known |= {op: seconds(op) for op in chosen}
    assert planner.between(known) == planner.wanted - known.keys()
    everything = sum(map(seconds, planner.wanted))
    assert sum(known.values()) < most * everything
    regression = Regression(known.items())
    for ops in configurations.values():
        priced = {op: known.get(op) or regression.estimate(op).seconds for op in ops}
        total = sum(seconds(op) * count for op, count in ops.items())
        assert sum(priced[op] * ops[op] for op in ops) == pytest.approx(total, rel=off)


def test_what_can_not_be_measured_is_asked_once() -> None:
    refused = stream(2**20)
    planner = Planner({"a": {refused: 1, product(512, 512, 512): 1}})
    first = planner.next({})
    assert refused in first
    assert refused not in planner.next({}, refused=[refused])


H100 = Device(product="NVIDIA H100 80GB HBM3", kind="gpu", accelerator="h100")


def bf16(m: int, n: int = 4096, k: int = 4096) -> Op:
    attrs = dict(product(m, n, k).attrs) | {"dtype": "bf16", "out_dtype": "bf16"}
    return dataclasses.replace(
        product(m, n, k), bytes=2 * (m * k + k * n + m * n), attrs=tuple(sorted(attrs.items()))
    )


def test_the_cost_model_asks_the_database_of_its_product_first(tmp_path: Path) -> None:
    cluster = load_cluster("h100", 1, 8)
    plain, alone = CostModel(cluster, tables=False), CostModel(cluster, tables=False, alone=True)
    modelled = {op: alone.op_seconds(op).seconds for op in map(bf16, (1024, 2048, 4096, 8192))}
    with LatencyDatabase(tmp_path / "a.sqlite") as database:
        for op, seconds in modelled.items():
            database.add([row(op, 1.25 * seconds, 1.25 * seconds * 1.01, device=H100)])
        other = dataclasses.replace(H100, product="B200", accelerator="b200")
        database.add([row(bf16(512), 1.0, device=other)])
        database.add([row(bf16(256), 1.0, device=H100, origin=Origin.IMPORTED)])
        model = CostModel(cluster, tables=False, database=database)
        for op in modelled:  # at boost clock: slowed in training as the formulas are
            found = model.op_seconds(op)
            assert found.evidence == TABLE
            assert found.seconds / plain.op_seconds(op).seconds == pytest.approx(1.25625)
            assert found.interval and found.interval[0] <= found.seconds <= found.interval[1]
        between, formula = (m.op_seconds(bf16(3072)) for m in (model, plain))
        assert between.evidence == TABLE and between.basis.startswith("4 of its kind measured")
        assert between.seconds / formula.seconds == pytest.approx(1.256, rel=0.02)
        assert between.interval and between.interval[0] < between.seconds < between.interval[1]
        for op in (bf16(8), stream(2**20)):  # too far, and nothing of its family
            assert model.op_seconds(op) == plain.op_seconds(op)
            assert model.op_seconds(op).evidence == MODEL


def test_times_of_training_are_not_slowed_again(tmp_path: Path) -> None:
    op = bf16(4096)
    with LatencyDatabase(tmp_path / "a.sqlite") as database:
        database.add([row(op, 2e-3, device=H100)])
        training = dataclasses.replace(row(op, 3e-3, device=H100), clock=Clock.SUSTAINED)
        database.add([training])
        model = CostModel(load_cluster("h100", 1, 8), tables=False, database=database)
        assert model.op_seconds(op).seconds == 3e-3
        renamed = dataclasses.replace(op, name="primus_te.gemm", inputs=(), outputs=())
        assert model.op_seconds(renamed).seconds == 3e-3


def test_a_cpu_is_priced_from_rows_of_that_very_one(tmp_path: Path) -> None:
    op, cluster = bf16(4096), load_cluster("h100", 1, 8)
    with LatencyDatabase(tmp_path / "a.sqlite") as database:
        database.add([row(op, 5.0), row(op, 9.0, device=dataclasses.replace(CPU, threads=2))])
        prices = Prices.of(database, device=CPU)
        model = CostModel(cluster, tables=False, alone=True, database=prices)
        assert model.op_seconds(op).seconds == 5.0
        assert model.op_seconds(op).basis == "1 samples of aten.mm on a CPU"
        nobody = CostModel(cluster, tables=False, alone=True, database=database)
        assert nobody.op_seconds(op).evidence == MODEL
        with pytest.raises(ValueError, match="one device"):
            Prices.of(database)


def test_the_newest_steady_row_counts(tmp_path: Path) -> None:
    op = product(512)
    old = row(op, 1e-3)
    new = dataclasses.replace(row(op, 2e-3), versions=dataclasses.replace(old.versions, torch="3"))
    shaky = dataclasses.replace(new, samples=(5e-3, 9e-3, 20e-3))
    found = Prices([old, new, shaky]).exact(op)
    assert found is not None and found.samples == (2e-3,)
    only = Prices([shaky]).exact(op)
    assert only is not None and only.samples == shaky.samples

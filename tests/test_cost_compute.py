"""Prices of matrix products, attention and memory-bound kernels."""

from __future__ import annotations

import dataclasses

import pytest

from primus_ext.cluster_data import ClusterError, load_cluster
from primus_ext.cost.model import CostModel
from primus_ext.cost.priced import CostError
from primus_ext.trace import Family, Op
from tests.synthetic import Job, attention, gemm, traffic


def price(name: str, op: Op) -> float:
    return CostModel(load_cluster(name, 1, 8)).op_seconds(op).seconds


@pytest.mark.parametrize(
    ("name", "m", "n", "k", "dtype", "measured", "within"),
    [
        # TFLOP/s that others measured.  cuBLASLt: Azure AI-benchmarking-guide; hipBLASLt:
        # HipKittens, ROCm blogs, Primus (MLPerf GPT-OSS).  None of them fixes a constant alone.
        ("a100", 8192, 8192, 8192, "bf16", 253.7, 0.05),
        ("h100", 16384, 16384, 16384, "fp8_e4m3/tensor", 1377.3, 0.05),
        ("h200", 6144, 12288, 12288, "fp8_e4m3/tensor", 1318.0, 0.05),
        ("b200", 8192, 8192, 8192, "bf16", 1460.7, 0.05),
        ("mi300x", 4096, 4864, 32896, "bf16", 708.0, 0.05),
        ("mi325x", 8192, 8192, 8192, "bf16", 785.3, 0.10),
        ("mi355x", 2880, 32768, 4096, "bf16", 1436.7, 0.08),
        ("mi355x", 5120, 32768, 2880, "fp8_e4m3/tensor", 2541.1, 0.20),
    ],
)
def test_large_products_run_as_fast_as_others_measured(
    name: str, m: int, n: int, k: int, dtype: str, measured: float, within: float
) -> None:
    op = gemm(m, n, k, dtype)
    assert op.flops / price(name, op) / 1e12 == pytest.approx(measured, rel=within)


@pytest.mark.parametrize("name", ["a100", "h100", "b200", "mi300x", "mi355x"])
def test_no_product_beats_the_peak_and_none_is_free(name: str) -> None:
    cluster = load_cluster(name, 1, 8)
    peak = cluster.accelerator.peak_flops["bf16"].value
    for m, n, k in [(1, 1, 1), (128, 128, 64), (8192, 8192, 8192), (2**17, 2**15, 2**14)]:
        op = gemm(m, n, k)
        seconds = price(name, op)
        assert seconds >= cluster.accelerator.kernel_launch_s.value
        assert op.flops / seconds < peak


def test_short_contractions_are_slower() -> None:
    # SimuMax A100, 4096 x 4096 outputs: 190.4 TFLOP/s at k = 512, 225.1 at k = 4096
    rates = [gemm(4096, 4096, k).flops / price("a100", gemm(4096, 4096, k)) for k in (512, 4096)]
    assert rates[0] / rates[1] == pytest.approx(190.35 / 225.08, rel=0.08)


def test_a_thin_product_is_bound_by_memory() -> None:
    cluster = load_cluster("h100", 1, 8)
    op = gemm(16, 65536, 8192)
    a = cluster.accelerator
    expected = op.bytes / (a.hbm_bandwidth.value * a.hbm_efficiency.value)
    assert price("h100", op) == pytest.approx(expected + a.kernel_launch_s.value, rel=1e-9)


def test_few_tiles_leave_compute_units_idle_on_amd_only() -> None:
    small, large = gemm(1024, 1024, 16384), gemm(8192, 8192, 16384)
    for name, slower in (("mi325x", True), ("h100", False)):
        rate = [op.flops / price(name, op) for op in (small, large)]
        assert (rate[0] < 0.5 * rate[1]) is slower


def test_time_grows_with_every_dimension() -> None:
    base = price("mi355x", gemm(4096, 4096, 4096))
    for shape in [(8192, 4096, 4096), (4096, 8192, 4096), (4096, 4096, 8192)]:
        assert price("mi355x", gemm(*shape)) > 1.5 * base


def grouped(layout: str, groups: int, rows: int, n: int, k: int) -> Op:
    dense = gemm(groups * rows, n, k, layout=layout)
    attrs = dict(dense.attrs) | {"groups": groups}
    return dataclasses.replace(
        dense, family=Family.GROUPED_GEMM, attrs=tuple(sorted(attrs.items()))
    )


@pytest.mark.parametrize(
    ("name", "layout", "groups", "rows", "n", "k", "low", "high"),
    [
        # Primus-Turbo PR 284, by library; SimuMax B200, Transformer Engine
        ("mi355x", "tn", 16, 4096, 4096, 7168, 1292, 1534),
        ("mi355x", "nn", 16, 2048, 4096, 7168, 1091, 1230),
        ("b200", "tn", 40, 9832, 3072, 5120, 1068, 1500),
    ],
)
def test_grouped_products_run_as_fast_as_others_measured(
    name: str, layout: str, groups: int, rows: int, n: int, k: int, low: float, high: float
) -> None:
    op = grouped(layout, groups, rows, n, k)
    assert 0.85 * low < op.flops / price(name, op) / 1e12 < 1.15 * high


def test_grouped_products_are_slower_than_dense_ones_and_need_a_layout() -> None:
    for layout in ("tn", "nn", "nt"):
        op = grouped(layout, 8, 4096, 4096, 4096)
        assert price("h100", op) > price("h100", gemm(8 * 4096, 4096, 4096, layout=layout))
    with pytest.raises(CostError, match="layout=tt"):
        price("h100", grouped("tt", 8, 4096, 4096, 4096))


@pytest.mark.parametrize(
    ("name", "dtype", "word"),
    [
        ("a100", "fp8_e4m3/tensor", "fp8"),
        ("mi325x", "fp8_e4m3/mxfp8", "mxfp8"),
        ("h100", "fp4_e2m1/nvfp4", "nvfp4"),
        ("mi355x", "fp4_e2m1/nvfp4", "nvfp4"),
    ],
)
def test_formats_that_the_target_lacks_are_refused(name: str, dtype: str, word: str) -> None:
    with pytest.raises(ClusterError, match=f"{word} is not available on {name}"):
        price(name, gemm(4096, 4096, 4096, dtype))


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(CostError, match="dtype=int3"):
        price("h100", gemm(64, 64, 64, "int3"))
    with pytest.raises(CostError, match="dtype=fp8_e4m3/odd"):
        price("h100", gemm(64, 64, 64, "fp8_e4m3/odd"))


@pytest.mark.parametrize(
    ("name", "mbs", "seq", "heads", "direction", "measured", "within"),
    [
        # ROCm/aiter op_tests/cpp/mha/README.md and SimuMax configs/system, causal TFLOP/s
        ("mi300x", 4, 8192, 32, "forward", 547.1, 0.15),
        ("mi300x", 8, 8192, 64, "backward", 432.7, 0.10),
        ("a100", 1, 4096, 64, "forward", 185.2, 0.10),
        ("a100", 1, 4096, 8, "forward", 122.0, 0.15),
        ("a100", 1, 4096, 8, "backward", 118.6, 0.10),
        ("b200", 1, 4096, 64, "forward", 980.5, 0.15),
        ("b200", 1, 32768, 8, "backward", 1074.2, 0.15),
    ],
)
def test_attention_runs_as_fast_as_others_measured(
    name: str, mbs: int, seq: int, heads: int, direction: str, measured: float, within: float
) -> None:
    job = Job(mbs=mbs, seq=seq, heads=heads, kv_heads=max(1, heads // 8), hidden=128 * heads)
    op = attention(job, direction)
    assert op.flops / price(name, op) / 1e12 == pytest.approx(measured, rel=within)


def test_attention_backward_takes_longer_than_forward_on_all() -> None:
    job = Job(seq=8192)
    for name in ("a100", "h100", "h200", "b200", "mi300x", "mi325x", "mi355x"):
        ratio = price(name, attention(job, "backward")) / price(name, attention(job, "forward"))
        assert 2.0 < ratio < 6.0, name


def test_a_window_shortens_the_wait_for_the_last_rows() -> None:
    full = attention(Job(seq=8192), "forward")
    attrs = dict(full.attrs) | {"window": (127, 0)}
    windowed = dataclasses.replace(full, attrs=tuple(sorted(attrs.items())))
    assert price("h100", windowed) < price("h100", full)


def test_fp8_attention_has_no_price() -> None:
    op = attention(Job(), "forward")
    attrs = dict(op.attrs) | {"dtype": "fp8_e4m3"}
    with pytest.raises(CostError, match="fused attention has no price"):
        price("h100", dataclasses.replace(op, attrs=tuple(sorted(attrs.items()))))


def test_memory_bound_work_is_traffic_and_a_launch() -> None:
    a = load_cluster("h200", 1, 8).accelerator
    one = price("h200", traffic("norm", 10**9))
    two = price("h200", traffic("norm", 2 * 10**9))
    assert two - one == pytest.approx(1e9 / (a.hbm_bandwidth.value * a.hbm_efficiency.value))
    assert one == price("h200", traffic("cast", 10**9, Family.QUANTIZE))


def test_host_work_is_free_and_a_collective_needs_its_group() -> None:
    assert price("h100", traffic("view", 10**9, Family.HOST)) == 0.0
    with pytest.raises(CostError, match="without its group"):
        price("h100", traffic("all_reduce", 0, Family.COLLECTIVE))

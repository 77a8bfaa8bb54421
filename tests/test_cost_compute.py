"""Prices of matrix products, attention and memory-bound kernels."""

from __future__ import annotations

import dataclasses

import pytest

from primus_ext.cluster import Figure
from primus_ext.cluster_data import ClusterError, load_accelerator, load_cluster
from primus_ext.cost.attention import price as attention_price
from primus_ext.cost.model import CostModel
from primus_ext.cost.priced import CostError
from primus_ext.trace import Family, Op
from tests.synthetic import Job, attention, gemm, traffic


def price(name: str, op: Op) -> float:
    """Of the formulas alone, whether or not the optional tables are installed."""
    cluster = load_cluster(name, 1, load_accelerator(name).host_gpus)
    return CostModel(cluster, tables=False, alone=True).op_seconds(op).seconds


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
    assert expected < price("h100", op) < 1.1 * expected


@pytest.mark.parametrize("name", ["h100", "mi355x"])
def test_a_tile_too_many_costs_part_of_a_wave(name: str) -> None:
    units = load_accelerator(name).multi_processors
    side = 256 * units  # one row of largest tiles fills the device exactly
    full, over = gemm(256, side, 8192), gemm(256, side + 256, 8192)
    step = price(name, over) / price(name, full)
    assert 1 + 1.5 / units < step <= 2
    assert step < price(name, gemm(256, 2 * side, 8192)) / price(name, full) + 1e-9


def test_the_layouts_of_a_backward_are_no_faster_than_the_forward() -> None:
    for name in ("h100", "b200", "mi355x"):
        forward = price(name, gemm(8192, 8192, 8192))
        for layout in ("nn", "nt"):
            assert forward <= price(name, gemm(8192, 8192, 8192, layout=layout)) < 1.1 * forward


def test_accumulating_in_fp32_moves_eight_bytes_an_element() -> None:
    a = load_accelerator("h100")
    op = gemm(16384, 16384, 64, layout="nt")  # hardly any work, all traffic
    out = 16384 * 16384
    more = dataclasses.replace(op, bytes=op.bytes + 6 * out)  # read 4, write 4 instead of write 2
    seconds = price("h100", more) - price("h100", op)
    expected = 6 * out / (a.hbm_bandwidth.value * a.hbm_efficiency.value)
    assert seconds == pytest.approx(expected, rel=0.1)


def test_training_slows_each_kind_of_work_by_its_own_factor() -> None:
    cluster = load_cluster("h100", 1, 8)
    factors = {"gemm/bf16": 1.25, "attention": 1.5, "memory": 2.0, "board_power_w": 700.0}
    table = {name: Figure(value=value, source="a test") for name, value in factors.items()}
    slower = dataclasses.replace(cluster.accelerator, sustained=table)
    model = CostModel(dataclasses.replace(cluster, accelerator=slower), tables=False)
    for op, expected in (
        (gemm(16384, 16384, 16384), 1.25),
        (gemm(16384, 16384, 16384, "fp8_e4m3/tensor"), 1.0),
        (attention(Job(seq=16384), "backward"), 1.5),
        (traffic("norm", 10**9), 2.0),
    ):
        assert model.op_seconds(op).seconds / price("h100", op) == pytest.approx(expected)


@pytest.mark.parametrize(("watts", "expected"), [(700, 1.2), (500, 1.42), (1400, 1.0)])
def test_a_board_with_less_power_computes_slower(watts: float, expected: float) -> None:
    """1.2 (700/500)^0.5 = 1.42; with twice the power it can't be faster than a short run."""
    cluster = load_cluster("h100", 1, 8)
    table = {"gemm/bf16": Figure(value=1.2, source="a test"),
             "board_power_w": Figure(value=700.0, source="a test")}  # fmt: skip
    board = dataclasses.replace(
        cluster.accelerator, sustained=table, board_power_w=Figure(value=watts, source="a test")
    )
    model = CostModel(dataclasses.replace(cluster, accelerator=board), tables=False)
    op = gemm(16384, 16384, 16384)
    assert model.op_seconds(op).seconds / price("h100", op) == pytest.approx(expected, rel=1e-3)


def test_time_grows_with_every_dimension() -> None:
    base = price("mi355x", gemm(4096, 4096, 4096))
    for shape in [(8192, 4096, 4096), (4096, 8192, 4096), (4096, 4096, 8192)]:
        assert price("mi355x", gemm(*shape)) > 1.5 * base


def grouped(layout: str, groups: int, rows: int, n: int, k: int) -> Op:
    """One product a group: in a weight gradient the rows are the contraction."""
    m, n, k = (n, k, rows) if layout == "nt" else (groups * rows, n, k)
    dense = gemm(m, n, k, layout=layout)
    attrs = dict(dense.attrs) | {"groups": groups}
    if layout == "nt":
        dense = dataclasses.replace(dense, flops=dense.flops * groups, bytes=dense.bytes * groups)
    else:
        more = 2 * (groups - 1) * n * k
        dense = dataclasses.replace(dense, bytes=dense.bytes + more)
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
    for layout in ("tn", "nn"):
        op = grouped(layout, 8, 4096, 4096, 4096)
        assert price("h100", op) > price("h100", gemm(8 * 4096, 4096, 4096, layout=layout))
    with pytest.raises(CostError, match="layout=tx"):
        price("h100", grouped("tx", 8, 4096, 4096, 4096))


def test_groups_that_differ_are_counted_one_by_one() -> None:
    even = grouped("tn", 8, 1024, 4096, 4096)
    attrs = dict(even.attrs)
    same = dataclasses.replace(even, attrs=tuple(sorted((attrs | {"rows": (1024,) * 8}).items())))
    assert price("h100", same) == price("h100", even)
    # the same tokens one off the tile's edge: another row of tiles in half of the groups
    ragged = attrs | {"rows": (1025, 1023) * 4}
    assert price("h100", dataclasses.replace(even, attrs=tuple(sorted(ragged.items())))) > price(
        "h100", even
    )


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


def test_a_window_costs_its_keys_and_both_its_edges() -> None:
    full = attention(Job(seq=8192), "forward")
    attrs = dict(full.attrs) | {"window": (1023, 0)}
    share = (1024 * 8192 - 1024 * 1023 // 2) / (8192 * 8193 // 2)
    windowed = dataclasses.replace(
        full, flops=int(full.flops * share), attrs=tuple(sorted(attrs.items()))
    )
    ratio = price("h100", windowed) / price("h100", full)
    assert share < ratio < 2.5 * share


def test_head_dimensions_have_shares_of_their_own() -> None:
    rates = {}
    for dim in (64, 96, 128, 192):
        op = attention(Job(seq=8192, heads=32, kv_heads=32, hidden=32 * dim), "forward")
        rates[dim] = op.flops / price("h100", op)
    assert rates[64] < rates[96] < rates[128]
    # FlashAttention-3's figures: 352 to 413 of 616 TFLOP/s at 64 (arXiv 2407.08608, figure 5)
    assert 0.6 < rates[64] / rates[128] < 0.85


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
    # quantisation: 2976 GB/s of 3350 on H100 (aiconfigurator-core 0.12.0, scale_matrix)
    cast = traffic("cast", 10**9, Family.QUANTIZE)
    seconds = price("h100", cast) - load_accelerator("h100").kernel_launch_s.value
    assert cast.bytes / seconds == pytest.approx(2976e9, rel=0.03)


def test_kinds_of_memory_bound_kernels_differ_where_someone_measured_them() -> None:
    stream = price("mi355x", traffic("add", 10**9))
    # HipKittens f09e968: 2.4 to 2.7 TB/s of 8 in compiled norms, against streams at 6
    norm = dataclasses.replace(traffic("add", 10**9), name="te.rmsnorm_fwd")
    assert 10**9 / price("mi355x", norm) == pytest.approx(2.55e12, rel=0.08)
    assert price("mi355x", norm) > 2 * stream
    l2norm = dataclasses.replace(norm, name="te.multi_tensor_l2norm")
    assert price("mi355x", l2norm) == stream


def test_host_work_is_free_and_a_collective_needs_its_group() -> None:
    assert price("h100", traffic("view", 10**9, Family.HOST)) == 0.0
    with pytest.raises(CostError, match="without its group"):
        price("h100", traffic("all_reduce", 0, Family.COLLECTIVE))


@pytest.mark.parametrize(
    ("name", "kernel", "direction", "teraflops"),
    [("h100", "flash2", "forward", 355.0), ("h100", "flash2", "backward", 337.0)],
)
def test_flash_attention_2_runs_as_fast_as_others_measured(
    name: str, kernel: str, direction: str, teraflops: float
) -> None:
    """Dao-AILab/flash-attention issue 1051: batch 1, 32,768 tokens, 8 heads of 128."""
    op = attention(Job(seq=32768, mbs=1, heads=8, kv_heads=8), direction)
    seconds = attention_price(load_accelerator(name), op, kernel).seconds
    assert op.flops / seconds / 1e12 == pytest.approx(teraflops, rel=0.15)
    assert attention_price(load_accelerator(name), op).seconds < 0.7 * seconds

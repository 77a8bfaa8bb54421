"""Accelerator files: complete, sourced, and refusing what does not exist."""

from __future__ import annotations

import dataclasses

import pytest

from primus_ext.cluster import Accelerator, Figure
from primus_ext.cluster_data import (
    ClusterError,
    accelerator_names,
    load_accelerator,
    load_cluster,
)
from primus_ext.cost.formats import require_precision
from primus_ext.plan import Precision

NAMES = ["a100", "a100_40gb", "a100_pcie", "b200", "b300", "gb200", "gb300", "h100", "h100_hbm2e",
         "h200", "mi300x", "mi325x", "mi350x", "mi355x"]  # fmt: skip


def figures(accelerator: Accelerator) -> list[tuple[str, Figure]]:
    found = []
    for field in dataclasses.fields(accelerator):
        value = getattr(accelerator, field.name)
        if isinstance(value, Figure):
            found.append((field.name, value))
        elif isinstance(value, dict):
            found += [(f"{field.name}.{key}", figure) for key, figure in value.items()]
    return found


def test_all_are_there() -> None:
    assert accelerator_names() == sorted([*NAMES, "cpu"])


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_is_positive_and_has_a_source(name: str) -> None:
    for key, figure in figures(load_accelerator(name)):
        assert figure.value > 0, key
        assert not figure.source.startswith("assumed"), key
        assert len(figure.source) > 8, key


@pytest.mark.parametrize("name", NAMES)
def test_shares_are_shares_and_every_format_has_one(name: str) -> None:
    accelerator = load_accelerator(name)
    assert set(accelerator.peak_flops) == set(accelerator.gemm_efficiency)
    factors = {"start", "latency", "ramp", "nvls_start"}  # not shares of a bandwidth
    reached = {k: f for k, f in accelerator.collectives.items() if k not in factors}
    assert {"ring", "direct", "message"} <= set(reached)
    assert factors - {"nvls_start"} <= set(accelerator.collectives)
    for table in (accelerator.gemm_efficiency, accelerator.attention_efficiency, reached):
        assert all(0.05 < figure.value <= 1 for figure in table.values())
    assert 0.5 < accelerator.hbm_efficiency.value < 1
    assert set(accelerator.residuals) == {"gemm", "attention", "memory", "communication"}


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("h100", "hbm_bandwidth", 3.35e12),  # vendor data sheets
        ("h200", "hbm_bandwidth", 4.8e12),
        ("a100", "scale_up_bandwidth", 300e9),
        ("mi300x", "hbm_bandwidth", 5.3e12),
        ("mi325x", "hbm_bandwidth", 6.0e12),
        ("mi355x", "hbm_bandwidth", 8.0e12),
    ],
)
def test_data_sheet_figures(name: str, key: str, value: float) -> None:
    assert getattr(load_accelerator(name), key).value == value


def test_a_variant_differs_in_what_its_file_says_and_in_nothing_else() -> None:
    base, variant = load_accelerator("a100"), load_accelerator("a100_40gb")
    differing = {
        field.name
        for field in dataclasses.fields(base)
        if getattr(base, field.name) != getattr(variant, field.name)
    }
    # tables were measured on the other one: they are not inherited
    assert differing == {"name", "hbm_bytes", "hbm_bandwidth", "measured_tables"}
    rack = load_accelerator("gb300")  # like gb200, which is like b200
    assert rack.peak_flops["bf16"].value == 2.5e15 and rack.peak_flops["nvfp4"].value == 1.5e16
    assert rack.hbm_efficiency == load_accelerator("b200").hbm_efficiency


@pytest.mark.parametrize(("nodes", "domain"), [(1, 4), (2, 8), (18, 72), (36, 72), (64, 64)])
def test_a_rack_is_one_scale_up_domain(nodes: int, domain: int) -> None:
    assert load_cluster("gb200", nodes, 4).scale_up_domain == domain
    with pytest.raises(ClusterError, match="at most 4 GPUs"):
        load_cluster("gb200", nodes, 8)


def test_capacity_is_what_a_process_sees_not_what_is_printed_on_the_box() -> None:
    assert 79e9 < load_accelerator("h100").hbm_bytes.value < 80 * 2**30
    assert 255 * 2**30 < load_accelerator("mi325x").hbm_bytes.value < 256 * 2**30


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 1), (1, 8), (8, 8), (1024, 8)])
def test_targets_from_one_to_8192_gpus(nodes: int, gpus: int) -> None:
    cluster = load_cluster("mi325x", nodes, gpus)
    assert cluster.world_size == nodes * gpus
    assert cluster.scale_up_domain == gpus


@pytest.mark.parametrize(
    ("name", "nodes", "gpus", "words"),
    [
        ("h100x", 1, 8, ["accelerator=h100x", "a100", "mi355x"]),
        ("h100", 0, 8, ["nodes=0", "positive"]),
        ("h100", 1, -2, ["gpus_per_node=-2", "positive"]),
        ("h100", True, 8, ["nodes=True", "positive"]),
        ("h100", 1, 2.0, ["gpus_per_node=2.0", "positive"]),
        ("mi300x", 2, 16, ["gpus_per_node=16", "mi300x", "8"]),
        ("../h100", 1, 8, ["accelerator=../h100"]),
    ],
)
def test_bad_targets_are_refused_in_one_sentence(
    name: str, nodes: int, gpus: int, words: list[str]
) -> None:
    with pytest.raises(ClusterError) as refused:
        load_cluster(name, nodes, gpus)
    message = str(refused.value)
    assert all(word in message for word in words)
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "compute", "recipe"),
    [
        ("a100", "fp8", "delayed"),
        ("mi325x", "fp8", "mxfp8"),
        ("mi300x", "fp4", "nvfp4"),
        ("h100", "fp4", "nvfp4"),
        ("h100", "fp8", "mxfp8"),
        ("mi355x", "fp4", "nvfp4"),
    ],
)
def test_precision_that_the_target_lacks_is_refused(
    name: str, compute: str, recipe: str
) -> None:
    with pytest.raises(ClusterError, match=f"not available on {name}"):
        require_precision(load_accelerator(name), Precision(compute=compute, recipe=recipe))


@pytest.mark.parametrize(
    ("name", "compute", "recipe"),
    [("b200", "fp4", "nvfp4"), ("mi355x", "fp8", "mxfp8"), ("h100", "fp8", "blockwise"),
     ("a100", "bf16", ""), ("mi325x", "fp8", "tensorwise")],
)  # fmt: skip
def test_precision_that_the_target_has(name: str, compute: str, recipe: str) -> None:
    require_precision(load_accelerator(name), Precision(compute=compute, recipe=recipe))

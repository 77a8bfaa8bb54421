"""Which algorithm and protocol is chosen, against NCCL's own model and published plateaus."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from primus_ext.cluster import Cluster, Figure
from primus_ext.cluster_data import load_cluster
from primus_ext.cost.collectives import Line, lines
from primus_ext.cost.placement import nic_bandwidth, placement
from primus_ext.trace import CollectiveKind

ALL_REDUCE, ALL_GATHER = CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER
ALL_TO_ALL, SEND_RECV = CollectiveKind.ALL_TO_ALL, CollectiveKind.SEND_RECV
KIB, MIB, GIB = 2**10, 2**20, 2**30


def group(cluster: Cluster, kind: CollectiveKind, ranks: Any, dtype: str = "bf16") -> list[Line]:
    return lines(cluster, kind, dtype, placement(cluster, tuple(ranks)))


def chosen(
    cluster: Cluster, kind: CollectiveKind, ranks: Any, size: int, dtype: str = "bf16"
) -> Line:
    return min(group(cluster, kind, ranks, dtype), key=lambda line: line.seconds(size))


def with_shares(cluster: Cluster, **values: float) -> Cluster:
    figures = {key: Figure(value=value, source="a test") for key, value in values.items()}
    table = cluster.accelerator.collectives | figures
    return dataclasses.replace(
        cluster, accelerator=dataclasses.replace(cluster.accelerator, collectives=table)
    )


def named(found: list[Line]) -> dict[str, Line]:
    return {line.name: line for line in found}


@pytest.mark.parametrize(
    ("nodes", "kind", "name", "microseconds"),
    [
        # baseLatencies + steps x hwLatencies of src/graph/tuning.cc, 8 GPUs a node
        (1, ALL_REDUCE, "ring LL", 6.6 + 14 * 0.6),
        (1, ALL_REDUCE, "ring LL128", 14.0 + 14 * 1.9),
        (1, ALL_REDUCE, "tree Simple", 8.4 + 2 * 7 * 4.0),
        (1, ALL_GATHER, "ring LL", 6.6 + 7 * 0.6),
        (1, ALL_REDUCE, "nvls", 25.0),
        (2, ALL_REDUCE, "tree LL", 6.8 + 2 * (7 * 0.6 + 5.0)),
        (8, ALL_REDUCE, "tree LL128", 14.0 + 2 * (7 * 1.25 + 3 * 8.5)),
        (8, ALL_REDUCE, "nvls", 25.0 + 2 * 3 * 20.9),
        (2, ALL_GATHER, "ring LL128", 14.0 + 14 * 1.9 + 4.0),
        (2, ALL_REDUCE, "ring Simple", 1.4 * (8.4 + 28 * 3.4 + 2 * 14.0)),
        (1, SEND_RECV, "chain LL", 6.6 + 0.6),
    ],
)
def test_starts_are_those_of_the_library(
    nodes: int, kind: CollectiveKind, name: str, microseconds: float
) -> None:
    cluster = with_shares(load_cluster("h100", nodes, 8), start=1.0, latency=1.0, nvls_start=1.0)
    line = named(group(cluster, kind, range(8 * nodes)))[name]
    assert line.start * 1e6 == pytest.approx(microseconds, rel=1e-6)


def test_small_messages_go_in_ll_large_ones_through_the_switch() -> None:
    cluster = load_cluster("h100", 1, 8)
    assert chosen(cluster, ALL_REDUCE, range(8), 64 * KIB).name.endswith("LL")
    assert chosen(cluster, ALL_REDUCE, range(8), GIB).name == "nvls"
    assert chosen(cluster, ALL_GATHER, range(8), GIB).name == "ring Simple"


@pytest.mark.parametrize(
    ("name", "ranks", "dtype"),
    [("h100", range(8), "int8"), ("h100", range(8), "fp8_e4m3"), ("h100", range(2), "bf16"),
     ("a100", range(8), "bf16"), ("mi300x", range(8), "bf16")],
)  # fmt: skip
def test_where_the_switch_can_not_add_it_is_not_asked(name: str, ranks: range, dtype: str) -> None:
    assert "nvls" not in named(group(load_cluster(name, 1, 8), ALL_REDUCE, ranks, dtype))


@pytest.mark.parametrize(("gpus", "measured"), [(5, 414.2), (6, 435.6), (7, 460.0), (8, 473.1)])
def test_the_switch_gains_with_the_group_as_measured_on_h200(gpus: int, measured: float) -> None:
    """stas00/ml-engineering 744d01e, NCCL 2.27.7, 8 GiB: S + S/n bytes each way."""
    size = 8 * GIB
    line = chosen(load_cluster("h200", 1, 8), ALL_REDUCE, range(gpus), size, "fp32")
    assert line.name == "nvls"
    bus = 2 * (gpus - 1) / gpus * size / line.seconds(size) / 1e9
    assert bus == pytest.approx(measured, rel=0.04)


def test_two_nodes_exchange_their_sums_only_once() -> None:
    """p5 of AWS: 487 GB/s over 400 GB/s of NICs (aws-samples 7217859), which no ring can."""
    network = {"fabric": "efa", "nic_bandwidth": 12.5e9, "nics_per_node": 32}
    cluster = load_cluster("h100", 2, 8, network)
    size = 16 * GIB
    bus = 2 * 15 / 16 * size / chosen(cluster, ALL_REDUCE, range(16), size).seconds(size)
    assert nic_bandwidth(cluster) * 8 < 400e9 < bus < 1.1 * 487e9


def test_a_mesh_has_one_more_ring_across_nodes() -> None:
    """8 MI325X reach 319 GB/s in a node, 350 over eight (AAC11 logs)."""
    size = 16 * GIB
    inside = chosen(load_cluster("mi325x", 1, 8), ALL_REDUCE, range(8), size).seconds(size)
    across = chosen(load_cluster("mi325x", 8, 8), ALL_REDUCE, range(64), size).seconds(size)
    assert 2 * 7 / 8 * size / inside / 1e9 == pytest.approx(319.1, rel=0.05)
    assert 2 * 63 / 64 * size / across / 1e9 == pytest.approx(350.8, rel=0.05)


def test_small_all_reduces_of_a_mesh_take_two_steps() -> None:
    """ROCm/rocm-blogs 0e81c2c: 13.1 us for 1 KiB on 8 MI300X, where 14 steps would take 23."""
    line = chosen(load_cluster("mi300x", 1, 8), ALL_REDUCE, range(8), KIB)
    assert line.name == "all pairs LL"
    assert line.seconds(KIB) * 1e6 == pytest.approx(13.1, rel=0.15)


def test_pcie_knows_no_ll128() -> None:
    found = named(group(load_cluster("a100_pcie", 1, 8), ALL_REDUCE, range(8)))
    assert {name.split()[-1] for name in found} == {"LL", "Simple"}


def test_point_to_point_leaves_ll_beyond_16_kib_a_peer() -> None:
    cluster = load_cluster("h100", 1, 8)
    assert chosen(cluster, ALL_TO_ALL, range(8), 128 * KIB).name == "direct LL"
    assert chosen(cluster, ALL_TO_ALL, range(8), 128 * KIB + 1).name == "direct Simple"
    assert chosen(cluster, SEND_RECV, (0, 1), 16 * KIB).name == "chain LL"
    assert chosen(cluster, SEND_RECV, (0, 1), MIB).name == "chain Simple"


def test_the_ramp_is_slow_and_ends_at_the_plateau() -> None:
    """dgxc-benchmarking 841f546: 64 MiB reach 0.75 of what 8 GiB reach."""
    cluster = load_cluster("h100", 1, 8)

    def bus(size: int) -> float:
        return size / chosen(cluster, ALL_REDUCE, range(8), size).seconds(size)

    assert bus(64 * MIB) / bus(8 * GIB) == pytest.approx(361.7 / 480.2, abs=0.05)
    assert bus(4 * MIB) / bus(8 * GIB) == pytest.approx(135.4 / 480.2, abs=0.06)


def rate(cluster: Cluster, kind: CollectiveKind, ranks: Any) -> float:
    """Bytes/s of a buffer so large that nothing else counts."""
    found = group(cluster, kind, ranks)
    return 1 / min(line.rate for line in found if line.name.endswith("Simple"))


def test_gpus_share_the_nics_of_their_node() -> None:
    whole = load_cluster("a100", 4, 8)
    half = load_cluster("a100", 4, 8, {"nics_per_node": 4})
    strided, full = [8 * node for node in range(4)], range(32)
    for ranks in (strided, full):
        assert rate(half, ALL_GATHER, ranks) == pytest.approx(rate(whole, ALL_GATHER, ranks) / 2)
    # one group of one GPU a node has an eighth of what the group of all has
    assert rate(half, ALL_GATHER, full) / rate(half, ALL_GATHER, strided) == pytest.approx(
        8 * (3 / 4) / (31 / 32)
    )


def test_rings_cross_a_switch_once_while_all_to_alls_send_everything_over_it() -> None:
    tiers = [{"nodes": 4, "oversubscription": 4.0}]
    flat, tiered = load_cluster("h100", 8, 8), load_cluster("h100", 8, 8, {"tiers": tiers})
    everyone, within = range(64), range(32)
    assert rate(tiered, ALL_GATHER, everyone) == rate(flat, ALL_GATHER, everyone)
    # half of the peers, 32 of 64, lie beyond; 56 of 64 take the NIC
    slower = rate(flat, ALL_TO_ALL, everyone) / rate(tiered, ALL_TO_ALL, everyone)
    assert slower == pytest.approx(32 * 4 / 56)
    assert rate(tiered, ALL_TO_ALL, within) == rate(flat, ALL_TO_ALL, within)
    # with one node below each switch a ring crosses it with all it sends
    lone = [0, 32]
    assert rate(tiered, ALL_GATHER, lone) == pytest.approx(rate(flat, ALL_GATHER, lone) / 4)
    assert rate(tiered, SEND_RECV, lone) == pytest.approx(rate(flat, SEND_RECV, lone) / 4)


def test_a_rack_is_left_only_by_groups_that_span_two() -> None:
    inside = load_cluster("gb200", 18, 4)
    across = load_cluster("gb200", 36, 4)
    assert placement(inside, range(72)).domains == 1
    assert placement(across, range(144)).domains == 2
    assert rate(across, ALL_TO_ALL, range(144)) < rate(inside, ALL_TO_ALL, range(72)) / 2

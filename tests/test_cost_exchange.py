"""Expert dispatch and combine kernels, against DeepEP's and HybridEP's own figures."""

from __future__ import annotations

import dataclasses

import pytest

from primus_ext.cluster import Cluster, Figure
from primus_ext.cluster_data import load_cluster
from primus_ext.cost.model import CostModel
from primus_ext.cost.priced import CostError
from primus_ext.trace import Collective, CollectiveKind, Family, Op

HIDDEN, TOPK = 7168, 8


def missed(places: int, experts: int = 256) -> float:
    """Probability that none of a token's experts is at one of ``places``."""
    result = 1.0
    for i in range(TOPK):
        result *= (experts - experts // places - i) / (experts - i)
    return result


def kernel(
    ranks: int, nodes: int, *, direction: str = "combine", tokens: int = 4096,
    row: int = 2 * HIDDEN, sms: int = 24, backend: str = "deepep",
) -> Op:  # fmt: skip
    """A kernel whose tokens fall on all experts alike."""
    rows = tokens * ranks * (1 - missed(ranks))
    away = tokens * (nodes - 1) * (1 - missed(nodes)) if nodes > 1 else 0.0
    return Op(
        name="deep_ep.combine", family=Family.COLLECTIVE, inputs=(), outputs=(), flops=0, bytes=0,
        attrs=(("backend", backend), ("direction", direction), ("node_bytes", int(away * row)),
               ("row_bytes", row), ("sms", sms)),
        collective=Collective(CollectiveKind.ALL_TO_ALL, "ep", int(rows * row), "bf16"),
    )  # fmt: skip


def seconds(cluster: Cluster, op: Op, ranks: int) -> float:
    return CostModel(cluster, alone=True).remote_seconds(op, range(ranks)).seconds


@pytest.mark.parametrize(
    ("direction", "row", "sms", "measured", "within"),
    [
        # DeepEP on 8 B200, GB/s of rows to ranks (DeepEP 94a9f8f docs/README_Hybrid-EP.md)
        ("dispatch", 2 * HIDDEN, 16, 348, 0.25),
        ("dispatch", 2 * HIDDEN, 24, 494, 0.25),
        ("combine", 2 * HIDDEN, 16, 302, 0.25),
        ("combine", 2 * HIDDEN, 24, 420, 0.25),
    ],
)
def test_one_node_is_as_fast_as_measured(
    direction: str, row: int, sms: int, measured: float, within: float
) -> None:
    op = kernel(8, 1, direction=direction, row=row, sms=sms)
    assert op.collective is not None
    rate = op.collective.bytes / seconds(load_cluster("b200", 1, 8), op, 8) / 1e9
    assert rate == pytest.approx(measured, rel=within)


@pytest.mark.parametrize(("nodes", "measured"), [(2, 43.0), (4, 58.0), (8, 51.0)])
def test_nodes_are_reached_as_fast_as_deepep_says(nodes: int, measured: float) -> None:
    """DeepEP docs/legacy.md, H800 with 50 GB/s NICs: GB/s of FP8 rows to nodes, its own counted.
    On two nodes NVLink is the slower part, on more the NIC."""
    ranks, row = 8 * nodes, HIDDEN + 4 * HIDDEN // 128
    cluster = load_cluster("h100", nodes, 8)
    h800 = dataclasses.replace(
        cluster.accelerator, scale_up_bandwidth=Figure(value=2e11, source="H800")
    )
    op = kernel(ranks, nodes, direction="dispatch", row=row)
    took = seconds(dataclasses.replace(cluster, accelerator=h800), op, ranks)
    counted = 4096 * nodes * (1 - missed(nodes)) * HIDDEN
    assert counted / took / 1e9 == pytest.approx(measured, rel=0.2)


def test_more_sms_help_until_the_links_are_full() -> None:
    cluster = load_cluster("b200", 1, 8)
    times = [seconds(cluster, kernel(8, 1, sms=sms), 8) for sms in (4, 8, 16, 128, 256)]
    assert times[0] > 1.8 * times[1] > 3.2 * times[2] > times[3] == times[4]


def test_hybrid_ep_needs_fewer_sms() -> None:
    cluster = load_cluster("b200", 1, 8)
    one, other = (seconds(cluster, kernel(8, 1, sms=16, backend=b), 8)
                  for b in ("hybridep", "deepep"))  # fmt: skip
    assert one < 0.8 * other


def test_what_leaves_the_node_takes_the_nic() -> None:
    slow = load_cluster("h100", 4, 8, {"nic_bandwidth": 1e9})
    op = kernel(32, 4)
    expected = op.attr("node_bytes") / (1e9 * slow.nic_efficiency.value)
    assert seconds(slow, op, 32) == pytest.approx(expected, rel=0.01)


def test_a_rack_needs_no_nic() -> None:
    rack = load_cluster("gb200", 8, 4)
    assert "nic" not in CostModel(rack, alone=True).remote_seconds(kernel(32, 1), range(32)).terms


def test_amd_has_no_limit_by_sms() -> None:
    prices = CostModel(load_cluster("mi300x", 1, 8), alone=True)
    terms = prices.remote_seconds(kernel(8, 1), range(8)).terms
    assert terms["sms"] == 0.0 < terms["links"]


def test_alone_is_free_and_too_many_ranks_are_refused() -> None:
    cluster = load_cluster("h100", 1, 8)
    assert seconds(cluster, kernel(8, 1), 1) == 0.0
    with pytest.raises(CostError, match="rank 15 of group ep does not exist"):
        seconds(cluster, kernel(16, 1), 16)

"""A target's own network: every figure can be stated, and is refused where it can't be."""

from __future__ import annotations

from typing import Any

import pytest

from primus_ext.cluster_data import ClusterError, load_cluster
from primus_ext.cluster_files import assumptions
from primus_ext.cost.placement import nic_bandwidth
from primus_ext.runner import UsageError, target


def test_every_figure_of_the_network_can_be_stated() -> None:
    cluster = load_cluster("h100", 4, 8, {
        "fabric": "efa", "nic_bandwidth": 12.5e9, "nics_per_node": 32, "nic_efficiency": 0.9,
        "nic_latency_s": {"value": 7e-5, "source": "our own ping"},
        "tiers": [{"nodes": 2, "oversubscription": 1}, {"nodes": 4, "oversubscription": 2.5}],
    })  # fmt: skip
    assert nic_bandwidth(cluster) == pytest.approx(12.5e9 * 4 * 0.9)
    assert cluster.nic_latency_s.source == "our own ping"
    assert cluster.nic_bandwidth.source == "the target's network.nic_bandwidth"
    assert [(t.nodes, t.oversubscription.value) for t in cluster.tiers] == [(2, 1.0), (4, 2.5)]
    assert not assumptions(cluster)


def test_what_is_not_stated_stays_as_usual() -> None:
    usual = load_cluster("mi300x", 4, 8)
    own = load_cluster("mi300x", 4, 8, {"nic_bandwidth": "1e11"})  # as YAML reads it
    assert nic_bandwidth(own) == pytest.approx(2 * nic_bandwidth(usual))
    assert own.nic_efficiency == usual.nic_efficiency
    assert usual.tiers == ()
    assert assumptions(usual)["nics_per_node"].value == 8


def test_a_fabric_brings_its_latency() -> None:
    cloud = load_cluster("h100", 2, 8, {"fabric": "efa"})
    assert cloud.nic_latency_s.value > load_cluster("h100", 2, 8).nic_latency_s.value


def test_part_of_a_host_has_a_nic_for_each_gpu() -> None:
    assert load_cluster("h100", 2, 4).nics_per_node.value == 4


@pytest.mark.parametrize(
    ("network", "words"),
    [
        ({"nic_bandwith": 5e10}, ["network.nic_bandwith", "nic_bandwidth", "tiers"]),
        ({"nic_bandwidth": "fast"}, ["network.nic_bandwidth='fast'", "number"]),
        ({"nic_bandwidth": 0}, ["network.nic_bandwidth=0", "positive"]),
        ({"nic_latency_s": -1e-6}, ["network.nic_latency_s", "negative"]),
        ({"nic_latency_s": True}, ["network.nic_latency_s=True"]),
        ({"nic_efficiency": 1.2}, ["nic_efficiency", "at most 1"]),
        ({"nics_per_node": None}, ["network.nics_per_node=None"]),
        ({"fabric": "myrinet"}, ["fabric=myrinet", "infiniband", "efa"]),
        ({"scale_up_domain": 12}, ["scale_up_domain=12", "multiple of gpus_per_node"]),
        ({"scale_up_domain": 16}, ["scale_up_domain=16", "at most 8"]),
        ({"tiers": 4}, ["network.tiers=4", "list"]),
        ({"tiers": [{"nodes": 4}]}, ["network.tiers[0]", "oversubscription"]),
        ({"tiers": [{"nodes": 4, "oversubscription": 0.5}]}, ["tiers[0].oversubscription=0.5"]),
        ({"tiers": [{"nodes": 4, "oversubscription": 1}, {"nodes": 6, "oversubscription": 1}]},
         ["tiers[1].nodes=6", "multiple of the 4"]),
    ],
)  # fmt: skip
def test_a_network_that_can_not_be_is_refused_in_one_sentence(
    network: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ClusterError) as refused:
        load_cluster("h100", 2, 8, network)
    assert all(word in str(refused.value) for word in words), refused.value
    assert "\n" not in str(refused.value)


def test_a_target_file_may_hold_a_network() -> None:
    node = {"accelerator": "h100", "nodes": 2, "gpus_per_node": 8}
    assert target.from_config(node).network is None
    network = {"nics_per_node": 4}
    assert target.from_config({**node, "network": network}).network == network
    with pytest.raises(UsageError, match="target_cluster.network=4 must be"):
        target.from_config({**node, "network": 4})

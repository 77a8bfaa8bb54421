"""Import of Primus's hardware files and of nccl-tests logs."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from primus_ext import cluster_import
from primus_ext.cli import main
from primus_ext.cluster_data import load_accelerator, load_cluster
from primus_ext.cluster_files import ClusterError
from primus_ext.cluster_import import logs
from primus_ext.cost.model import CostModel
from primus_ext.runner import target
from primus_ext.trace import Collective, CollectiveKind

HARDWARE = """\
hardware_config:
  node_bw: 448.0
  node_lat: 0.45
  pod_bw: 25.0
  pod_lat: 2.0
  cluster_bw: 12.5
  cluster_lat: 10.0
  node_size: 8
  pod_size: 64
  nics_per_node: 4
  switch_topology: false
  node_topology: "mesh"
  vector_flops: 163.0e12
"""
# NVIDIA/dgxc-benchmarking 841f546, 8 H100 of a DGX: bytes and microseconds, bus bandwidth.
DGX = (
    (1048576, 27.37, 67.04),
    (16777216, 123.8, 237.21),
    (67108864, 324.7, 361.67),
    (268435456, 1112.5, 422.25),
    (1073741824, 4029.4, 466.33),
    (8589934592, 31307.0, 480.16),
)
# AMD AAC14, 2 x 8 MI355X, RCCL 2.26.6
AAC14 = (
    (1048576, 81.37, 24.16),
    (8388608, 166.5, 94.49),
    (67108864, 614.3, 204.84),
    (268435456, 1652.0, 304.67),
    (1073741824, 5525.0, 364.39),
    (8589934592, 43643.0, 369.04),
)


def log(rows: tuple, hosts: int, product: str, collective: str = "all_reduce") -> str:
    """As nccl-tests prints it."""
    lines = [f"# Collective test starting: {collective}_perf",
             "# nThread 1 nGpus 1 minBytes 1048576 maxBytes 8589934592"]  # fmt: skip
    lines += [
        f"#  Rank {8 * host + gpu:2d} Group  0 Pid 1{gpu} on node{host} device  {gpu} "
        f"[0000:1{gpu}:00] {product}"
        for host in range(hosts) for gpu in range(8)
    ]  # fmt: skip
    lines += [
        "#       size         count      type   redop    root     time   algbw   busbw #wrong"
    ]
    lines += [
        f"{size:12d} {size // 4:12d}     float     sum      -1  {us:8.2f}  {bus / 1.75:6.2f}  "
        f"{bus:6.2f}      0   {us:8.2f}  {bus / 1.75:6.2f}  {bus:6.2f}      0"
        for size, us, bus in rows
    ]
    return "\n".join([*lines, "# Avg bus bandwidth    : 339.7"])


def test_a_hardware_file_becomes_a_network(tmp_path: Path) -> None:
    path = tmp_path / "mi300x.yaml"
    path.write_text(HARDWARE)
    found = cluster_import.read(path)
    assert found.base == "mi300x" and found.accelerator is None  # 448 GB/s is what is shipped
    cluster = load_cluster("mi300x", 16, 8, found.network)
    assert cluster.nic_bandwidth.value == 25e9 and cluster.nics_per_node.value == 4
    assert cluster.nic_bandwidth.source == "mi300x.yaml, hardware_config.pod_bw"
    assert [(t.nodes, t.oversubscription.value) for t in cluster.tiers] == [(8, 2.0)]
    assert {note.split(":")[0] for note in found.notes} == {
        "node_lat", "pod_lat", "cluster_lat", "vector_flops", "switch_topology"
    }  # fmt: skip


def test_other_links_make_an_accelerator_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "next.yaml"
    path.write_text(HARDWARE.replace("448.0", "900.0"))
    found = cluster_import.read(path, "mi300x")
    own = tmp_path / "own.yaml"
    own.write_text(yaml.safe_dump(found.accelerator))
    accelerator = load_accelerator(str(own))
    assert accelerator.scale_up_bandwidth.value == 9e11
    assert accelerator.scale_up_bandwidth.source == "next.yaml, hardware_config.node_bw"
    assert accelerator.hbm_bytes.value == load_accelerator("mi300x").hbm_bytes.value


def test_a_log_of_one_node_gives_the_share_of_the_links(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_text(log(DGX, 1, "NVIDIA H100 80GB HBM3"))
    found = cluster_import.read(path)
    assert found.base == "h100" and found.accelerator is not None
    figure = found.accelerator["collectives"]["nvls"]
    assert 0.65 < figure["value"] < 0.75 and "run.log: all_reduce of 8 GPUs" in figure["source"]
    own = tmp_path / "own.yaml"
    own.write_text(yaml.safe_dump(found.accelerator))
    cost = CostModel(load_cluster(str(own), 1, 8), alone=True)
    for size, us, _ in DGX[1:]:
        one = Collective(CollectiveKind.ALL_REDUCE, "g", size, "fp32")
        assert cost.collective_seconds(one, range(8)).seconds == pytest.approx(us * 1e-6, rel=0.12)


def test_a_log_of_two_nodes_gives_the_nics_efficiency() -> None:
    found = logs.read("a.log", log(AAC14, 2, "AMD Instinct MI355X"), None)
    assert found.accelerator is None and found.base == "mi355x"
    assert found.network["nic_efficiency"]["value"] == pytest.approx(370 / 400, abs=0.06)
    assert "median error" in found.notes[0]


def test_what_a_log_holds() -> None:
    sweep = logs.parse("x", log(DGX, 2, "NVIDIA H100 80GB HBM3", "alltoall"))
    assert (sweep.kind, sweep.dtype, sweep.ranks, sweep.hosts) == (
        CollectiveKind.ALL_TO_ALL, "fp32", 16, 2
    )  # fmt: skip
    assert sweep.points[0] == (1048576, pytest.approx(27.37e-6))
    assert len(sweep.points) == len(DGX)


@pytest.mark.parametrize(
    ("name", "text", "base", "words"),
    [
        ("a.log", log(DGX, 1, "Radeon"), None, ["a.log", "Radeon", "mi355x"]),
        ("a.log", log(DGX[:1], 1, "NVIDIA H100"), None, ["a.log", "3 sizes"]),
        ("a.log", "hello", None, ["a.log", "which collective", "all_reduce"]),
        ("all_reduce.log", "hello", None, ["no log of nccl-tests"]),
        ("new.yaml", HARDWARE, None, ["accelerator=new", "mi300x"]),
        ("mi300x.yaml", "a: 1\n", None, ["hardware_config"]),
        ("mi300x.yaml", HARDWARE.replace("25.0", "-1"), None, ["pod_bw=-1", "positive"]),
        ("mi300x.yaml", HARDWARE, "h100", ["node_topology=mesh", "switch"]),
    ],
)
def test_what_can_not_be_read_is_refused_in_one_sentence(
    name: str, text: str, base: str | None, words: list[str], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ClusterError) as refused:
        cluster_import.read(tmp_path / name, base)
    assert all(word in str(refused.value) for word in words), refused.value


def test_the_command_writes_files_that_a_target_can_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.log"
    path.write_text(log(DGX, 1, "NVIDIA H100 80GB HBM3"))
    out = tmp_path / "out"
    assert main(["cluster", "import", str(path), "--nodes", "4", "--out", str(out)]) == 0
    assert "collectives.nvls=" in capsys.readouterr().out
    text = (out / "target.yaml").read_text()
    assert text.startswith("# @package hydra.callbacks.primus_projection.target_cluster\n")
    asked = target.from_config(yaml.safe_load(text))
    cluster = load_cluster(asked.accelerator, asked.nodes, asked.gpus_per_node, asked.network)
    assert cluster.name == "h100_imported_4x8"
    assert main(["cluster", "import", str(tmp_path / "none.log"), "--out", str(out)]) == 2

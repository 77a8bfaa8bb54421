"""A GPU that does not exist yet is one file: every constant is in it, or marked as assumed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from primus_ext.cluster import Cluster, Figure, Tier
from primus_ext.cluster_data import ClusterError, load_cluster
from primus_ext.cost.model import CostModel
from primus_ext.project.compose import project
from primus_ext.project.result import Projection
from primus_ext.runner import target
from primus_ext.trace import Collective, CollectiveKind
from tests.synthetic import Job, plan, traces

JOB = Job(tp=8, pp=2, dp=2, microbatches=8)
STATED = "roadmap talk, slide 12"


def stated(value: float) -> dict[str, Any]:
    return {"value": value, "source": STATED}


INVENTED = {
    "name": "nova1", "vendor": "nvidia", "arch": "sm_120x", "compute_capability": [12, 0],
    "multi_processors": 224, "scale_up_topology": "switch", "scale_up_gpus": 16,
    "peak_flops": {"bf16": stated(5e15), "fp8": stated(1e16)},
    "hbm_bytes": stated(512e9), "hbm_bandwidth": stated(2e13), "scale_up_bandwidth": stated(1.8e12),
    "network": {"nic_bandwidth": stated(2e11)},
}  # fmt: skip


def write(folder: Path, content: dict[str, Any]) -> str:
    path = folder / "nova.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def projected(cluster: Cluster) -> Projection:
    return project(plan(JOB), traces(JOB), cluster, mode="simulate")


def all_figures(holder: Any) -> dict[str, Figure]:
    found: dict[str, Figure] = {}
    for field in dataclasses.fields(holder):
        value = getattr(holder, field.name)
        table = value if isinstance(value, dict) else {"": value}
        for key, figure in table.items():
            if isinstance(figure, Figure):
                found[f"{field.name}.{key}".rstrip(".")] = figure
        if isinstance(value, tuple):
            tiers = [tier for tier in value if isinstance(tier, Tier)]
            found |= {f"{field.name}.{i}": t.oversubscription for i, t in enumerate(tiers)}
    return found


def test_one_file_gives_a_projection_whose_constants_are_stated_or_assumed(tmp_path: Path) -> None:
    cluster = load_cluster(write(tmp_path, INVENTED), 2, 16)
    assert cluster.name == "nova1_2x16" and cluster.scale_up_domain == 16
    found = all_figures(cluster) | all_figures(cluster.accelerator)
    from_file = {key for key, figure in found.items() if figure.source == STATED}
    assert from_file == {"peak_flops.bf16", "peak_flops.fp8", "hbm_bytes", "hbm_bandwidth",
                         "scale_up_bandwidth", "nic_bandwidth"}  # fmt: skip
    rest = {key: figure for key, figure in found.items() if key not in from_file}
    assert len(rest) > 20
    assert all(figure.source.startswith("assumed: ") for figure in rest.values()), rest

    reduced = Collective(CollectiveKind.ALL_REDUCE, "g", 2**28, "bf16")
    assert CostModel(cluster).collective_seconds(reduced, range(32)).seconds > 0

    result = projected(cluster)
    assert result.throughput.step_s > 0
    assert set(result.provenance["assumed"]) == set(rest)
    warning = next(line for line in result.warnings if "assumed, not stated" in line)
    assert "nova1" in warning and "gemm_efficiency.bf16" in warning
    assert "collectives.ring" in warning


def test_what_the_file_states_moves_the_projection(tmp_path: Path) -> None:
    def step(**change: Any) -> float:
        return projected(
            load_cluster(write(tmp_path, {**INVENTED, **change}), 2, 16)
        ).throughput.step_s

    base = step()
    assert step(peak_flops={"bf16": stated(1e16), "fp8": stated(2e16)}) < 0.9 * base
    assert step(hbm_bandwidth=stated(1e13)) > 1.01 * base
    assert step(scale_up_bandwidth=stated(4.5e11)) > 1.02 * base
    assert step(gemm_efficiency={"bf16": stated(0.4)}) > 1.1 * base


def test_assumed_values_are_the_median_of_the_vendors_products(tmp_path: Path) -> None:
    amd = {**INVENTED, "name": "argo", "vendor": "amd", "arch": "gfx999",
           "scale_up_topology": "mesh"}  # fmt: skip
    argo = load_cluster(write(tmp_path, amd), 2, 8).accelerator
    ring = argo.collectives["ring"]
    shipped = [load_cluster(n, 1, 8).accelerator.collectives["ring"].value
               for n in ("mi300x", "mi325x", "mi350x", "mi355x")]  # fmt: skip
    assert ring.value == pytest.approx(sum(sorted(shipped)[1:3]) / 2)
    assert (
        ring.source == "assumed: median of mi300x, mi325x, mi350x, mi355x; nova.yaml does not say"
    )
    assert "nvls" not in argo.collectives


def test_a_file_may_build_on_a_shipped_accelerator(tmp_path: Path) -> None:
    own = {"like": "b200", "name": "nova2", "hbm_bandwidth": stated(1.2e13)}
    cluster = load_cluster(write(tmp_path, own), 4, 8)
    accelerator, base = cluster.accelerator, load_cluster("b200", 4, 8).accelerator
    assert accelerator.hbm_bandwidth.source == STATED
    assert accelerator.peak_flops["bf16"].value == base.peak_flops["bf16"].value
    assert accelerator.peak_flops["bf16"].source.startswith("assumed, as b200: ")
    assert cluster.nic_bandwidth.source.startswith("assumed, as b200: ")
    assert not load_cluster("b200", 2, 8).nic_bandwidth.source.startswith("assumed")
    shipped = projected(load_cluster("b200", 4, 8))
    assert projected(cluster).throughput.step_s < shipped.throughput.step_s
    assert shipped.provenance["assumed"].keys() == {"nics_per_node"}


def test_a_target_names_the_file_by_its_path(tmp_path: Path) -> None:
    path = write(tmp_path, INVENTED)
    asked = target.from_config({"accelerator": path, "nodes": 2, "gpus_per_node": 16})
    assert asked.name == "nova_2x16"
    assert load_cluster(asked.accelerator, asked.nodes, asked.gpus_per_node).world_size == 32


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vendor": "acme"}, ["vendor='acme'", "nvidia or amd"]),
        ({"hbm_bytes": None}, ["nova.yaml", "hbm_bytes"]),
        ({"hbm_bandwidth": {"value": 2e13}}, ["nova.yaml", "source"]),
        ({"peak_flops": {"bf16": {"value": "much", "source": STATED}}}, ["nova.yaml", "much"]),
        ({"compute_capability": 12}, ["nova.yaml", "int"]),
        ({"like": "h1000"}, ["like=h1000", "h100"]),
        ({"collectives": "warp"}, ["collectives=warp", "hopper"]),
    ],
)
def test_bad_files_are_refused_in_one_sentence(
    change: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    content = {key: value for key, value in {**INVENTED, **change}.items() if value is not None}
    with pytest.raises(ClusterError) as refused:
        load_cluster(write(tmp_path, content), 2, 16)
    assert all(word in str(refused.value) for word in words), refused.value
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_or_is_no_yaml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="is not a file"):
        load_cluster(str(tmp_path / "none.yaml"), 1, 8)
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [")
    with pytest.raises(ClusterError, match="can't be read as YAML"):
        load_cluster(str(broken), 1, 8)
    broken.write_text("- 1\n")
    with pytest.raises(ClusterError, match="holds no keys"):
        load_cluster(str(broken), 1, 8)

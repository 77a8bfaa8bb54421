"""Targets: the shipped files, a user's own, and the machine at hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from primus_ext.hydra import typed
from primus_ext.runner import MODES, UsageError, local_device, target
from tests.never_train.support import ROOT, run_app

sys.path.insert(0, str(ROOT / "scripts"))
import make_target_clusters as maker  # noqa: E402


def test_the_files_are_up_to_date():
    found = {path.name: path.read_text() for path in maker.FOLDER.glob("*")}
    assert found == maker.files()


def test_the_files_say_what_their_names_say():
    for path in maker.FOLDER.glob("*.yaml"):
        read = target.from_config(yaml.safe_load(path.read_text()))
        assert read.name == path.stem
    sizes = sorted({a * b for host in (4, 8) for a, b in maker.shapes(host)})
    assert sizes[0] == 1 and sizes[-1] == 8192


@pytest.mark.parametrize("group", typed.GROUPS)
def test_each_group_stands_alone_and_writes_below_hydra(group: str):
    """A folder with more than its one group would show that group to other people's apps."""
    root = ROOT / "hydra_conf" / group
    assert [path.name for path in root.iterdir()] == [group]
    for path in (root / group).iterdir():
        first, content = path.read_text().split("\n", 1)
        if group == "target_cluster":
            assert first == f"# @package {typed.CALLBACK}.target_cluster"
        else:
            assert first == "# @package _global_"
            assert set(yaml.safe_load(content)) <= {"hydra"}


def test_every_mode_has_its_option():
    files = (ROOT / "hydra_conf" / "projection" / "projection").iterdir()
    modes = {
        path.stem: yaml.safe_load(path.read_text())["hydra"]["callbacks"]["primus_projection"]
        for path in files
    }
    assert set(modes) == set(MODES)
    assert all(node["mode"] == mode for mode, node in modes.items())


def test_every_accelerator_of_the_targets_has_figures():
    shipped = {path.stem for path in (ROOT / "hydra_conf" / "accelerator").glob("*.yaml")}
    assert set(maker.ACCELERATORS) == shipped


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ({"accelerator": "h100", "nodes": 8}, "gpus_per_node is missing"),
        ({"accelerator": "h100", "nodes": None, "gpus_per_node": 8}, "nodes is missing"),
        ({"accelerator": "h100", "nodes": -1, "gpus_per_node": 8}, "nodes=-1 must be"),
        ({"accelerator": "h100", "nodes": 8, "gpus_per_node": 0}, "gpus_per_node=0 must be"),
        ({"accelerator": "h100", "nodes": 2.5, "gpus_per_node": 8}, "nodes=2.5 must be"),
        ({"accelerator": "h100", "nodes": True, "gpus_per_node": 8}, "nodes=True must be"),
        ({"accelerator": 100, "nodes": 1, "gpus_per_node": 8}, "accelerator=100 must be"),
        ({"accelerator": "h100", "nodes": 1, "gpus_per_node": 8, "gpus": 8}, "gpus is not a key"),
    ],
)
def test_a_target_that_is_not_legal(node: dict, words: str):
    with pytest.raises(UsageError, match=words):
        target.from_config(node)


OWN = "# @package hydra.callbacks.primus_projection.target_cluster\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (OWN + "accelerator: h1000\nnodes: 3\ngpus_per_node: 8\n", ["h1000", "mi355x"]),
        (OWN + "accelerator: h100\nnodes: -3\ngpus_per_node: 8\n", ["nodes=-3", "at least 1"]),
        (OWN + "accelerator: h100\nnodes: 3\n", ["gpus_per_node"]),
        ("accelerator: h100\nnodes: 3\ngpus_per_node: 8\n", ["must begin with the line"]),
        ("nodes: 3\n", ["must begin with the line"]),
    ],
)
def test_a_users_own_target_file(text: str, words: list[str], tmp_path: Path):
    own = tmp_path / "conf" / "target_cluster"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text(text)
    typed = ["--config-dir", str(own.parent), "+projection=simulate", "+target_cluster=mine"]
    run = run_app("plain", [*typed, "+projection.out={out}"], tmp_path / "run")
    assert run.code == 2 and run.did == []
    message = run.verdict["message"]
    assert all(word in message for word in words), message
    assert run.stderr.strip() == f"primus_ext: {message}"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("++target_cluster.nodes=3", "++target_cluster.nodes=3 does not reach the target"),
        (f"++{typed.CALLBACK}.target_cluster.nodes=-3", "target_cluster.nodes=-3 must be"),
    ],
)
def test_a_change_of_a_target_reaches_it_or_is_refused(change: str, words: str, tmp_path: Path):
    asked = ["+projection=simulate", "+target_cluster=h100_1x8", change]
    run = run_app("plain", [*asked, "+projection.out={out}"], tmp_path / "run")
    assert run.code == 2 and run.did == []
    assert words in run.verdict["message"]


def device(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    """Let nvidia-smi answer with these product names."""
    monkeypatch.setattr(local_device.shutil, "which", lambda _name: "/usr/bin/nvidia-smi")
    answer = subprocess.CompletedProcess([], 0, "".join(f"{name}\n" for name in names), "")
    monkeypatch.setattr(local_device.subprocess, "run", lambda *_a, **_k: answer)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"WORLD_SIZE": "64", "LOCAL_WORLD_SIZE": "8"}, (8, 8)),
        ({"WORLD_SIZE": "64", "LOCAL_WORLD_SIZE": "4"}, (16, 4)),
        ({"WORLD_SIZE": "64"}, (8, 8)),
        ({"WORLD_SIZE": "4"}, (1, 4)),
        ({"WORLD_SIZE": "64", "CUDA_VISIBLE_DEVICES": "0,1"}, (32, 2)),
    ],
)
def test_the_machine_at_hand(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: tuple[int, int]
):
    device(monkeypatch, ["NVIDIA H100 80GB HBM3"] * 8)
    found = target.from_surroundings(environment)
    assert (found.accelerator, found.nodes, found.gpus_per_node) == ("h100", *expected)


@pytest.mark.parametrize(
    ("names", "environment", "words"),
    [
        ([], {"WORLD_SIZE": "8"}, r"\+target_cluster=NAME_AxB.*WORLD_SIZE.*no accelerator"),
        (["NVIDIA H200"], {}, r"\+target_cluster=NAME_AxB.*WORLD_SIZE is not set"),
        (["NVIDIA H200"], {"WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": ""}, "no accelerator"),
        (["NVIDIA L4"], {"WORLD_SIZE": "1"}, "'NVIDIA L4' is none"),
        (["NVIDIA H200"] * 8, {"WORLD_SIZE": "12"}, "WORLD_SIZE=12 is not a multiple"),
        (["NVIDIA H200"], {"WORLD_SIZE": "x"}, "WORLD_SIZE='x'"),
    ],
)
def test_a_machine_that_is_no_target(
    monkeypatch: pytest.MonkeyPatch, names: list[str], environment: dict[str, str], words: str
):
    device(monkeypatch, names)
    with pytest.raises(UsageError, match=words):
        target.from_surroundings(environment)


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", None),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA B200", "b200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI325X", "mi325x"),
        ("AMD Instinct MI355X", "mi355x"),
        ("AMD Instinct MI250X", None),
    ],
)
def test_products(product: str, name: str | None):
    assert local_device.accelerator_of(product) == name


def test_amd_devices_are_read_from_the_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(local_device.shutil, "which", lambda _name: None)
    for card, product in ((0, "ASPEED"), (1, "AMD Instinct MI300X"), (2, "AMD Instinct MI300X")):
        folder = tmp_path / "class" / "drm" / f"card{card}" / "device"
        folder.mkdir(parents=True)
        (folder / "product_name").write_text(f"{product}\n")
    found = local_device.find({}, tmp_path)
    assert found == local_device.LocalDevice("AMD Instinct MI300X", "mi300x", 2)
    assert local_device.find({"HIP_VISIBLE_DEVICES": ""}, tmp_path) is None

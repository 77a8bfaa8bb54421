"""Primus's hardware files: nominal bandwidths and the shape of the network."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

import yaml

from primus_ext.cluster_data import load_accelerator
from primus_ext.cluster_files import ClusterError, accelerator_names
from primus_ext.cluster_import import Imported

_LEFT = {
    "node_lat": "latencies come from the collective library's own model",
    "pod_lat": "latencies come from the collective library's own model",
    "cluster_lat": "latencies come from the collective library's own model",
    "vector_flops": "reductions are bound by links and memory here",
    "switch_topology": "a network between nodes is always one of switches here",
}
_USED = ("node_bw", "pod_bw", "cluster_bw", "node_size", "pod_size", "nics_per_node",
         "node_topology")  # fmt: skip


def read(name: str, text: str, base: str | None) -> Imported:
    """Import a hardware file.

    Args:
        name: Of the file; without its suffix it is the accelerator unless ``base`` says.
        text: Its content.
        base: A shipped accelerator.

    Raises:
        ClusterError: it is no such file, or a figure can't be.
    """
    chosen = base or PurePath(name).stem
    if chosen not in accelerator_names():
        raise ClusterError(
            f"accelerator={chosen} is not known: say which {name} describes, legal are "
            f"{', '.join(accelerator_names())}"
        )
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ClusterError(f"{name} can't be read as YAML: {str(error).splitlines()[0]}") from error
    node = content.get("hardware_config") if isinstance(content, dict) else None
    if not isinstance(node, dict):
        raise ClusterError(f"{name} is no hardware file: it has no key hardware_config")
    return _imported(name, chosen, node)


def _number(name: str, node: dict[str, Any], key: str) -> float | None:
    value = node.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise ClusterError(f"{key}={value!r} in {name} is not legal: it must be a positive number")
    return float(value)


def _imported(name: str, base: str, node: dict[str, Any]) -> Imported:
    accelerator = load_accelerator(base)
    value = {key: _number(name, node, key) for key in _USED if key != "node_topology"}
    source = f"{name}, hardware_config"
    network: dict[str, Any] = {}
    if value["pod_bw"]:
        network["nic_bandwidth"] = {"value": value["pod_bw"] * 1e9, "source": f"{source}.pod_bw"}
    if value["nics_per_node"]:
        network["nics_per_node"] = {
            "value": value["nics_per_node"], "source": f"{source}.nics_per_node"
        }  # fmt: skip
    if all(value[key] for key in ("pod_bw", "cluster_bw", "node_size", "pod_size")):
        below = int(value["pod_size"] // value["node_size"])  # type: ignore[operator]
        ratio = max(1.0, value["pod_bw"] / value["cluster_bw"])  # type: ignore[operator]
        network["tiers"] = [{
            "nodes": below,
            "oversubscription": {"value": ratio, "source": f"{source}.pod_bw over cluster_bw"},
        }]  # fmt: skip
    own = None
    links = (value["node_bw"] or 0) * 1e9
    if links and abs(links / accelerator.scale_up_bandwidth.value - 1) > 1e-3:
        own = {"like": base, "name": f"{base}_imported",
               "scale_up_bandwidth": {"value": links, "source": f"{source}.node_bw"}}  # fmt: skip
    topology = node.get("node_topology")
    if topology not in (None, accelerator.scale_up_topology):
        raise ClusterError(
            f"node_topology={topology} in {name} is not that of {base}, a "
            f"{accelerator.scale_up_topology}: import it as another accelerator"
        )
    notes = [f"{key}: not used, {_LEFT[key]}" for key in node if key in _LEFT]
    notes += [f"{key}: not known, not used" for key in node if key not in (*_LEFT, *_USED)]
    return Imported(base, own, network, tuple(notes))

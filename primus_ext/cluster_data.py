"""Make target clusters of the accelerators in ``hydra_conf/accelerator`` and of a user's own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from primus_ext.cluster import Accelerator, Cluster, Figure, Tier
from primus_ext.cluster_files import (
    ASSUMED,
    NETWORK,
    ClusterError,
    accelerator_names,
    figure,
    is_file,
    parsed,
    read,
    shared_table,
)

__all__ = ["ClusterError", "accelerator_names", "load_accelerator", "load_cluster"]

NETWORK_KEYS = ("fabric", *NETWORK, "nics_per_node", "scale_up_domain", "tiers")
"""What a target may say of its network."""


def load_accelerator(name: str) -> Accelerator:
    """An accelerator, each figure with its source.

    Args:
        name: A shipped one, or the path of a file.

    Raises:
        ClusterError: No such accelerator, or its file is not one.
    """
    return _load(name)[0]


def load_cluster(
    name: str, nodes: int, gpus_per_node: int, network: Mapping[str, Any] | None = None
) -> Cluster:
    """A target of ``nodes`` hosts with ``gpus_per_node`` accelerators each.

    Args:
        name: Accelerator, e.g. ``h100``, or the path of a user's file.
        nodes: Hosts.
        gpus_per_node: GPUs of a host; they form one scale-up domain, or are part of a rack that
            does.
        network: What differs from the accelerator's usual network (:data:`NETWORK_KEYS`).

    Raises:
        ClusterError: Unknown accelerator, a size that does not exist, or a network that can't be.
    """
    accelerator, usual = _load(name)
    _positive("nodes", nodes)
    _positive("gpus_per_node", gpus_per_node)
    if gpus_per_node > accelerator.host_gpus:
        raise ClusterError(
            f"gpus_per_node={gpus_per_node} is not legal for {accelerator.name}: a host joins at "
            f"most {accelerator.host_gpus} GPUs"
        )
    if accelerator.host_cores is not None:  # its processes share the memory of the host
        whole = accelerator.hbm_bytes
        part = Figure(value=whole.value // gpus_per_node, source=f"{whole.source}, shared alike")
        accelerator = dataclasses.replace(accelerator, hbm_bytes=part)
    rack = accelerator.host_gpus < accelerator.scale_up_gpus and nodes > 1
    own = Figure(value=float(gpus_per_node), source=f"{ASSUMED}: one NIC for each GPU")
    if gpus_per_node < accelerator.host_gpus:
        usual = {key: value for key, value in usual.items() if key != "nics_per_node"}
    fields: dict[str, Any] = {"nics_per_node": own, **usual}
    domain = gpus_per_node
    if rack:
        domain *= _nodes_of_a_rack(nodes, accelerator.scale_up_gpus // gpus_per_node)
    fields["scale_up_domain"] = domain
    fields |= _overrides(network or {}, gpus_per_node, accelerator)
    return Cluster(
        name=f"{accelerator.name if is_file(name) else name}_{nodes}x{gpus_per_node}",
        accelerator=accelerator,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        **fields,
    )


def _nodes_of_a_rack(nodes: int, most: int) -> int:
    """How many nodes of a job a scheduler places in one rack: the most that divide it evenly.

    Slurm's block topology does so when asked for segments; Megatron-Bridge's recipes for 256 GPUs
    of NVL72 racks count on 64 GPUs a rack (NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN, v0.6.0).
    """
    return next(count for count in range(most, 0, -1) if nodes % count == 0)


def _overrides(
    network: Mapping[str, Any], gpus_per_node: int, accelerator: Accelerator
) -> dict[str, Any]:
    """What a target says of its own network."""
    fields: dict[str, Any] = {}
    for key in network:
        if key not in NETWORK_KEYS:
            raise ClusterError(
                f"network.{key} is not a key of a network: legal are {', '.join(NETWORK_KEYS)}"
            )
    if "fabric" in network:
        table = shared_table("fabric", str(network["fabric"]))
        fields |= {key: figure(entry) for key, entry in table.items()}
    for key in (*NETWORK, "nics_per_node"):
        if key in network:
            fields[key] = _stated(f"network.{key}", network[key])
    if fields.get("nic_efficiency", Figure(value=1, source="-")).value > 1:
        raise ClusterError("network.nic_efficiency is not legal: it is a share, at most 1")
    if "scale_up_domain" in network:
        domain = network["scale_up_domain"]
        _positive("network.scale_up_domain", domain)
        if domain % gpus_per_node or domain > accelerator.scale_up_gpus:
            raise ClusterError(
                f"network.scale_up_domain={domain} is not legal: it must be a multiple of "
                f"gpus_per_node and at most {accelerator.scale_up_gpus}"
            )
        fields["scale_up_domain"] = domain
    if "tiers" in network:
        fields["tiers"] = _tiers(network["tiers"])
    return fields


def _tiers(entries: Any) -> tuple[Tier, ...]:
    """Tiers from the NICs up, e.g. ``[{nodes: 32, oversubscription: 1}, ...]``."""
    if not isinstance(entries, (list, tuple)):
        raise ClusterError(f"network.tiers={entries!r} is not legal: it must be a list")
    tiers: list[Tier] = []
    for index, entry in enumerate(entries):
        key = f"network.tiers[{index}]"
        if not isinstance(entry, Mapping) or set(entry) != {"nodes", "oversubscription"}:
            raise ClusterError(f"{key} is not legal: a tier has nodes and oversubscription")
        _positive(f"{key}.nodes", entry["nodes"])
        if tiers and entry["nodes"] % tiers[-1].nodes:
            raise ClusterError(
                f"{key}.nodes={entry['nodes']} is not legal: it must be a multiple of the "
                f"{tiers[-1].nodes} of the tier below"
            )
        stated = _stated(f"{key}.oversubscription", entry["oversubscription"])
        if stated.value < 1:
            raise ClusterError(f"{key}.oversubscription={stated.value} is not legal: at least 1")
        tiers.append(Tier(nodes=entry["nodes"], oversubscription=stated))
    return tuple(tiers)


def _stated(key: str, entry: Any) -> Figure:
    """A figure of the target's own: a number, or a value with its source."""
    value, source = entry, f"the target's {key}"
    if isinstance(entry, Mapping):
        value, source = entry.get("value"), str(entry.get("source") or source)
    if isinstance(value, str):  # YAML reads 5e10 as text
        try:
            value = float(value)
        except ValueError:
            value = None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ClusterError(f"{key}={entry!r} is not legal: it must be a number, not negative")
    if value == 0 and "latency" not in key:
        raise ClusterError(f"{key}={entry!r} is not legal: it must be positive")
    return Figure(value=float(value), source=source)


def _positive(key: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ClusterError(f"{key}={value} is not legal: it must be a positive integer")


def _load(name: str) -> tuple[Accelerator, dict[str, Figure]]:
    return parsed(read(name), name) if is_file(name) else _shipped(name)


@functools.lru_cache(maxsize=32)
def _shipped(name: str) -> tuple[Accelerator, dict[str, Figure]]:
    return parsed(read(name), f"{name}.yaml")

"""The target cluster that was asked for, or the machine at hand where none was."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from primus_ext.runner import local_device
from primus_ext.runner.outcome import UsageError

KEYS = ("accelerator", "nodes", "gpus_per_node")
OPTIONAL = ("network",)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """``nodes`` hosts of ``gpus_per_node`` accelerators."""

    accelerator: str
    """Name of a file in ``hydra_conf/accelerator``, or the path of a user's own."""
    nodes: int
    gpus_per_node: int
    network: Mapping[str, Any] | None = None
    """What differs from the accelerator's usual network."""

    @property
    def world_size(self) -> int:
        """GPUs in the target, one rank on each."""
        return self.nodes * self.gpus_per_node

    @property
    def name(self) -> str:
        """As ``+target_cluster`` spells it, e.g. ``h100_8x8``."""
        return f"{Path(self.accelerator).stem}_{self.nodes}x{self.gpus_per_node}"


def from_config(node: Mapping[str, Any]) -> Target:
    """Read the content of a ``target_cluster`` file.

    Args:
        node: ``accelerator``, ``nodes``, ``gpus_per_node`` and, where it differs from the usual
            one, ``network``; nothing else.

    Raises:
        UsageError: a key is missing or unknown, or a value is not legal.  Whether an accelerator
            of that name exists is left to the accelerator data.
    """
    missing = [key for key in KEYS if node.get(key) is None]
    if missing:
        raise UsageError(f"target_cluster.{missing[0]} is missing; a target has {', '.join(KEYS)}")
    legal = (*KEYS, *OPTIONAL)
    unknown = sorted(str(key) for key in node if key not in legal)
    if unknown:
        raise UsageError(
            f"target_cluster.{unknown[0]} is not a key of a target; legal: {', '.join(legal)}"
        )
    for key in ("nodes", "gpus_per_node"):
        value = node[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"target_cluster.{key}={value!r} must be a whole number of at least 1")
    if not isinstance(node["accelerator"], str):
        raise UsageError(
            f"target_cluster.accelerator={node['accelerator']!r} must be the name of an "
            "accelerator, such as h100"
        )
    network = node.get("network")
    if network is not None and not isinstance(network, Mapping):
        raise UsageError(f"target_cluster.network={network!r} must be keys and values")
    return Target(**{key: node[key] for key in KEYS}, network=network)


def from_surroundings(environment: Mapping[str, str]) -> Target:
    """The cluster this very command runs on: its ``WORLD_SIZE`` and the local device.

    Args:
        environment: ``os.environ``.  ``LOCAL_WORLD_SIZE`` gives the GPUs a node; without it a
            node has the visible devices, or the whole world where that is smaller.

    Raises:
        UsageError: either of the two is missing or unusable; both ways are named.
    """
    device = local_device.find(environment)
    world = environment.get("WORLD_SIZE", "")
    if device is None or not world:
        absent = "no accelerator is here" if device is None else "WORLD_SIZE is not set"
        raise UsageError(
            f"no target to project for: add +target_cluster=NAME_AxB (A nodes of B GPUs, such as "
            f"h100_8x8), or run on the target itself with WORLD_SIZE set ({absent})"
        )
    if device.accelerator is None:
        raise UsageError(
            f"the local device {device.product!r} is none that primus_ext has figures for; "
            "add +target_cluster=NAME_AxB"
        )
    ranks = _positive("WORLD_SIZE", world)
    local = environment.get("LOCAL_WORLD_SIZE", "")
    per_node = _positive("LOCAL_WORLD_SIZE", local) if local else min(device.count, ranks)
    if ranks % per_node:
        raise UsageError(
            f"WORLD_SIZE={ranks} is not a multiple of the {per_node} GPUs of a node; "
            "add +target_cluster=NAME_AxB"
        )
    return Target(accelerator=device.accelerator, nodes=ranks // per_node, gpus_per_node=per_node)


def _positive(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{name}={text!r} must be a whole number of at least 1")
    return int(text)

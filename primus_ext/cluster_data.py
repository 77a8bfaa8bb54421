"""Read accelerators from ``hydra_conf/accelerator/*.yaml`` and make target clusters of them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import yaml

from primus_ext.cluster import Accelerator, Cluster, Figure
from primus_ext.conf_dir import hydra_conf_dir

_PLAIN = ("name", "vendor", "arch", "multi_processors", "scale_up_topology", "scale_up_gpus")
_FIGURES = ("hbm_bytes", "hbm_bandwidth", "hbm_efficiency", "kernel_launch_s",
            "scale_up_bandwidth", "scale_up_latency_s", "context_bytes",
            "communicator_bytes", "communicator_pair_bytes", "all_to_all_peer_bytes")  # fmt: skip
_TABLES = ("peak_flops", "gemm_efficiency", "attention_efficiency", "scale_up_efficiency",
           "residuals")  # fmt: skip
_NETWORK = ("nic_bandwidth", "nic_efficiency", "nic_latency_s")


class ClusterError(ValueError):
    """A target that can't be built or can't do what is asked; the message is one sentence."""


def accelerator_names() -> list[str]:
    """Names that :func:`load_cluster` knows, sorted."""
    return sorted(path.stem for path in _folder().glob("*.yaml"))


def load_accelerator(name: str) -> Accelerator:
    """The accelerator ``name``, each figure with its source.

    Raises:
        ClusterError: No such accelerator.
    """
    return _load(_checked(name))[0]


def load_cluster(name: str, nodes: int, gpus_per_node: int) -> Cluster:
    """A target of ``nodes`` hosts with ``gpus_per_node`` accelerators each.

    Args:
        name: Accelerator, e.g. ``h100``.
        nodes: Hosts.
        gpus_per_node: GPUs of a host; they form one scale-up domain, or are part of a rack that
            does.

    Raises:
        ClusterError: Unknown accelerator, or a size that does not exist.
    """
    accelerator, network = _load(_checked(name))
    _positive("nodes", nodes)
    _positive("gpus_per_node", gpus_per_node)
    if gpus_per_node > accelerator.host_gpus:
        raise ClusterError(
            f"gpus_per_node={gpus_per_node} is not legal for {accelerator.name}: a host joins at "
            f"most {accelerator.host_gpus} GPUs"
        )
    rack = accelerator.host_gpus < accelerator.scale_up_gpus and nodes > 1
    return Cluster(
        name=f"{name}_{nodes}x{gpus_per_node}",
        accelerator=accelerator,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        scale_up_domain=accelerator.scale_up_gpus if rack else gpus_per_node,
        **network,
    )


def _positive(key: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ClusterError(f"{key}={value} is not legal: it must be a positive integer")


def _checked(name: str) -> str:
    """``name`` if there is a file for it; the accelerators there are, otherwise."""
    known = accelerator_names()
    if name not in known:
        raise ClusterError(f"accelerator={name} is not known: legal are {', '.join(known)}")
    return name


def _folder() -> Path:
    return hydra_conf_dir() / "accelerator"


@functools.lru_cache(maxsize=32)
def _load(name: str) -> tuple[Accelerator, dict[str, Figure]]:
    path = _folder() / f"{name}.yaml"
    raw = _raw(path)
    try:
        fields: dict[str, Any] = {key: raw[key] for key in _PLAIN}
        fields["host_gpus"] = raw.get("host_gpus", raw["scale_up_gpus"])
        fields |= {key: _figure(raw[key]) for key in _FIGURES}
        fields |= {key: {k: _figure(v) for k, v in raw[key].items()} for key in _TABLES}
        major, minor = raw["compute_capability"]
        accelerator = Accelerator(compute_capability=(major, minor), **fields)
        network = {key: _figure(raw["network"][key]) for key in _NETWORK}
    except (KeyError, TypeError, ValueError) as error:
        raise ClusterError(f"{path.name} is not a description of an accelerator: {error!r}") \
            from error
    return accelerator, network


def _raw(path: Path) -> dict[str, Any]:
    """A file, laid over the one that it says it is ``like``."""
    own = yaml.safe_load(path.read_text(encoding="utf-8"))
    base = own.pop("like", None)
    if base is None:
        return own
    merged = _raw(path.with_name(f"{base}.yaml"))
    for key, value in own.items():
        inherited = merged.get(key)
        # A figure (value and source) and a table of a variant's own links are taken as a whole.
        merged[key] = value
        if isinstance(inherited, dict) and "value" not in value and key != "scale_up_efficiency":
            merged[key] = {**inherited, **value}
    return merged


def _figure(entry: dict[str, Any]) -> Figure:
    """A number with its source; neither may be missing."""
    value, source = float(entry["value"]), str(entry["source"])
    if not source:
        raise ValueError("a figure without source")
    return Figure(value=value, source=source)

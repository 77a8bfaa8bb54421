"""Accelerator files: where they are, one laid over another, what stands in for what is lacking.

A user's own accelerator (a GPU that does not exist yet) is one file, named by its path.  It may be
``like: NAME`` of a shipped one, or leave out what is not known: such figures are filled, and their
source says ``assumed``.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from primus_ext.cluster import Accelerator, Cluster, Figure
from primus_ext.conf_dir import hydra_conf_dir
from primus_ext.this_machine import FIGURES as HERE

ASSUMED = "assumed"
"""First word of the source of a figure that no file states."""
PLAIN = ("name", "vendor", "arch", "multi_processors", "scale_up_topology", "scale_up_gpus")
FIGURES = ("hbm_bytes", "hbm_bandwidth", "hbm_efficiency", "kernel_launch_s", "l2_bytes",
           "boost_clock_hz", "board_power_w", "scale_up_bandwidth", "context_bytes",
           "communicator_bytes", "communicator_pair_bytes", "all_to_all_peer_bytes")  # fmt: skip
TABLES = ("peak_flops", "gemm_efficiency", "attention_efficiency", "memory_efficiency",
          "kernel_model", "collectives", "exchange", "sustained", "residuals")  # fmt: skip
_NOT_INHERITED = ("measured_tables",)
"""What was measured on a product says nothing about one that is like it."""
NETWORK = ("nic_bandwidth", "nic_efficiency", "nic_latency_s")
FABRICS = {"nvidia": "infiniband", "amd": "roce"}
"""The usual scale-out network of each vendor's reference platforms, where a file names none."""
VENDORS = (*FABRICS, "cpu")
_ASSUMABLE = {*FIGURES, *TABLES} - {
    "hbm_bytes", "hbm_bandwidth", "scale_up_bandwidth", "peak_flops",
}  # fmt: skip
_REFERENCES = {"collectives": "collectives", "exchange": "exchange", "sustained": "sustained"}
"""Tables that may be given as the name of a file, and the folder it is in."""


class ClusterError(ValueError):
    """A target that can't be built or can't do what is asked; the message is one sentence."""


def accelerator_names() -> list[str]:
    """Names of the shipped accelerators, sorted."""
    return sorted(path.stem for path in (hydra_conf_dir() / "accelerator").glob("*.yaml"))


def sustained_name(accelerator: str) -> str:
    """The table of factors that a shipped accelerator shares, e.g. ``hopper``."""
    own = _document(hydra_conf_dir() / "accelerator" / f"{accelerator}.yaml")
    if "sustained" in own:
        return str(own["sustained"])
    return sustained_name(str(own["like"]))


def is_file(name: str) -> bool:
    """Whether an accelerator is named by the path of its file."""
    return name.endswith((".yaml", ".yml"))


def read(name: str) -> dict[str, Any]:
    """What is said of an accelerator, inherited and assumed figures filled in.

    Args:
        name: A shipped one, or the path of a file.

    Raises:
        ClusterError: there is no such accelerator or file, or it can't be read.
    """
    if not is_file(name):
        if name not in (known := accelerator_names()):
            raise ClusterError(
                f"accelerator={name} is not known: legal are {', '.join(known)}, or the path of "
                "a .yaml file"
            )
        return _laid_over(hydra_conf_dir() / "accelerator" / f"{name}.yaml")
    path = Path(name)
    if not path.is_file():
        raise ClusterError(
            f"accelerator={name} is not a file: name an accelerator file that exists"
        )
    raw = _laid_over(path)
    _fill(raw, path.name)
    return raw


def _document(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ClusterError(f"{path} can't be read as YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(content, dict):
        raise ClusterError(f"{path} is not a description of an accelerator: it holds no keys")
    return content


def _laid_over(path: Path) -> dict[str, Any]:
    """A file, laid over the one that it says it is ``like``."""
    own = _document(path)
    _resolve(own)
    base = own.pop("like", None)
    if base is None:
        return own
    merged = _inherited(base, path)
    for key in _NOT_INHERITED:
        merged.pop(key, None)
    for key, value in own.items():
        inherited = merged.get(key)
        # A figure (value and source) and a table of a variant's own links are taken as a whole.
        merged[key] = value
        if isinstance(inherited, dict) and "value" not in value and key not in _REFERENCES:
            merged[key] = {**inherited, **value}
    return merged


def _inherited(base: str, path: Path) -> dict[str, Any]:
    """The accelerator that a file builds on; for a user's file its figures are assumptions."""
    folder = hydra_conf_dir() / "accelerator"
    if base not in accelerator_names():
        raise ClusterError(
            f"like={base} in {path.name} is not known: legal are {', '.join(accelerator_names())}"
        )
    merged = _laid_over(folder / f"{base}.yaml")
    if path.resolve().parent != folder:
        for figure in _entries(merged):
            figure["source"] = f"{ASSUMED}, as {base}: {figure['source']}"
    return merged


def _entries(node: Any) -> Iterator[dict[str, Any]]:
    """All figures below a node."""
    if isinstance(node, dict):
        if "value" in node:
            yield node
        else:
            for value in node.values():
                yield from _entries(value)


def _resolve(raw: dict[str, Any]) -> None:
    """Put the tables in the place of their names."""
    for key, folder in _REFERENCES.items():
        if isinstance(raw.get(key), str):
            raw[key] = shared_table(folder, raw[key])
    network = raw.get("network")
    if isinstance(network, dict) and "fabric" in network:
        network |= {**shared_table("fabric", network.pop("fabric")), **network}


@functools.cache
def _shared_text(folder: str, name: str) -> str | None:
    path = hydra_conf_dir() / folder / f"{name}.yaml"
    return path.read_text(encoding="utf-8") if path.is_file() else None


def shared_table(folder: str, name: str) -> dict[str, Any]:
    """Figures that several accelerators share: ``hydra_conf/FOLDER/NAME.yaml``.

    Raises:
        ClusterError: there is no such file.
    """
    text = _shared_text(folder, name)
    if text is None:
        known = sorted(p.stem for p in (hydra_conf_dir() / folder).glob("*.yaml"))
        raise ClusterError(f"{folder}={name} is not known: legal are {', '.join(known)}")
    return yaml.safe_load(text)


def _fill(raw: dict[str, Any], where: str) -> None:
    """Assume what a file leaves out: the median over this vendor's shipped accelerators."""
    vendor = raw.get("vendor")
    if vendor not in VENDORS:
        raise ClusterError(
            f"vendor={vendor!r} in {where} is not legal: it must be {' or '.join(VENDORS)}"
        )
    peers = {n: r for n in accelerator_names() if (r := read(n))["vendor"] == vendor}
    for key in sorted(_ASSUMABLE):
        if key in FIGURES and key not in raw:
            raw[key] = _median({n: r[key] for n, r in peers.items()}, where)
        elif key in TABLES:
            table = raw.setdefault(key, {})
            for name in _wanted(raw, key, peers):
                if name not in table:
                    found = {n: r[key][name] for n, r in peers.items() if name in r[key]}
                    table[name] = _median(found, where)
    network = raw.setdefault("network", {})
    fabric = shared_table("fabric", FABRICS[vendor]) if vendor in FABRICS else {}
    for key in NETWORK:
        if key not in network:
            entry = fabric.get(key) or _median({n: r["network"][key] for n, r in peers.items()}, "")
            source = str(entry["source"]).removeprefix(f"{ASSUMED}: ")
            network[key] = {**entry, "source": f"{ASSUMED}: {source}; {where} does not say"}


def _wanted(raw: dict[str, Any], key: str, peers: Mapping[str, dict[str, Any]]) -> list[str]:
    """Entries that a table must have: those of all its peers, of gemm one for each format."""
    if key == "gemm_efficiency":
        known = {name for peer in peers.values() for name in peer[key]}
        return [name for name in raw["peak_flops"] if name in known]
    names = set.intersection(*(set(peer[key]) for peer in peers.values()))
    if key == "collectives" and raw["vendor"] == "nvidia" and raw["scale_up_topology"] == "switch":
        names |= {"nvls", "nvls_start"}
    return sorted(names)


def _median(found: Mapping[str, dict[str, Any]], where: str) -> dict[str, Any]:
    value = statistics.median(float(entry["value"]) for entry in found.values())
    suffix = f"; {where} does not say" if where else ""
    return {"value": value, "source": f"{ASSUMED}: median of {', '.join(found)}{suffix}"}


def assumptions(cluster: Cluster) -> dict[str, Figure]:
    """The figures of a target that no file states, by name."""
    found: dict[str, Figure] = {}
    for holder in (cluster, cluster.accelerator):
        for field in dataclasses.fields(holder):
            value = getattr(holder, field.name)
            table = value if isinstance(value, dict) else {"": value}
            for key, figure in table.items():
                if isinstance(figure, Figure) and figure.source.startswith(ASSUMED):
                    found[f"{field.name}.{key}".rstrip(".")] = figure
    return found


def parsed(raw: dict[str, Any], where: str) -> tuple[Accelerator, dict[str, Figure]]:
    """The accelerator and its usual network of what :func:`read` gave.

    Raises:
        ClusterError: something is missing or no number; ``where`` is named.
    """
    try:
        fields: dict[str, Any] = {key: raw[key] for key in PLAIN}
        fields["measured_tables"] = str(raw.get("measured_tables", ""))
        fields["host_gpus"] = raw.get("host_gpus", raw["scale_up_gpus"])
        fields |= {key: figure(raw[key]) for key in FIGURES}
        fields |= {key: {k: figure(v) for k, v in raw[key].items()} for key in TABLES}
        if "host_cores" in raw:
            fields["host_cores"] = figure(raw["host_cores"])
        others = raw.get("attention_kernels", {})
        fields["attention_kernels"] = {k: figure(v) for k, v in others.items()}
        major, minor = raw["compute_capability"]
        accelerator = Accelerator(compute_capability=(major, minor), **fields)
        network = {key: figure(raw["network"][key]) for key in NETWORK}
        if "nics_per_node" in raw["network"]:
            network["nics_per_node"] = figure(raw["network"]["nics_per_node"])
    except KeyError as error:
        raise ClusterError(
            f"{where} is not a description of an accelerator: {error} is missing"
        ) from error
    except (TypeError, ValueError, AttributeError) as error:
        raise ClusterError(f"{where} is not a description of an accelerator: {error}") from error
    return accelerator, network


def figure(entry: dict[str, Any]) -> Figure:
    """A number with its source; neither may be missing.

    ``here: NAME`` takes one of :data:`primus_ext.this_machine.FIGURES` from the machine at hand.

    Raises:
        ValueError: the source is empty, or the value no number, or there is no such figure.
    """
    if "here" in entry:
        if entry["here"] not in HERE:
            raise ValueError(f"here={entry['here']} is none of {', '.join(HERE)}")
        measure, told = HERE[entry["here"]]
        return Figure(value=float(measure()), source=told)
    value, source = float(entry["value"]), str(entry["source"])
    if not source:
        raise ValueError("a figure without source")
    return Figure(value=value, source=source)

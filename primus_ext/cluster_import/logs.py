"""Logs of nccl-tests and rccl-tests: one figure of ours fitted to each sweep.

A sweep inside one host gives the share of the links that its algorithm reaches, one across hosts
the NICs' efficiency and what a step takes beyond the library's own latency.
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Iterable
from typing import Any

from primus_ext.cluster import Cluster, Figure
from primus_ext.cluster_data import load_cluster
from primus_ext.cluster_files import ClusterError, accelerator_names
from primus_ext.cluster_import import Imported
from primus_ext.cost.collectives import lines
from primus_ext.cost.placement import placement
from primus_ext.trace import CollectiveKind

_KINDS = {
    "all_reduce": CollectiveKind.ALL_REDUCE, "all_gather": CollectiveKind.ALL_GATHER,
    "reduce_scatter": CollectiveKind.REDUCE_SCATTER, "alltoall": CollectiveKind.ALL_TO_ALL,
    "sendrecv": CollectiveKind.SEND_RECV, "broadcast": CollectiveKind.BROADCAST,
}  # fmt: skip
_TYPES = {"float": "fp32", "half": "fp16", "bfloat16": "bf16", "int8": "int8", "uint8": "uint8"}
_PRODUCTS = (("A100", "a100"), ("H100", "h100"), ("H200", "h200"), ("GB200", "gb200"),
             ("GB300", "gb300"), ("B200", "b200"), ("B300", "b300"), ("MI300X", "mi300x"),
             ("MI325X", "mi325x"), ("MI350X", "mi350x"), ("MI355X", "mi355x"))  # fmt: skip
_RANK = re.compile(r"#\s+Rank\s+(\d+).*?\bon\s+(\S+)\s+device\s+\d+\s+\[\S+\]\s*(.*)")
_ROW = re.compile(r"^\s*(\d+)\s+\d+\s+([a-z0-9_]+)\s+(?:[a-z]+\s+)?(?:-?\d+\s+)?([\d.]+)\s+[\d.]+")
_SHARES = [round(0.3 + 0.005 * i, 3) for i in range(141)]
# 24 of 25 GB/s is the practical peak of a NIC (NVIDIA/nccl-tests issue 119, its maintainer).
_NIC_SHARES = [share for share in _SHARES if share <= 0.96]
_ENOUGH = 3
"""Sizes that a sweep must have."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sweep:
    """The out-of-place times of one log."""

    kind: CollectiveKind
    dtype: str
    ranks: int
    hosts: int
    product: str
    points: tuple[tuple[int, float], ...]
    """Bytes, seconds."""


def parse(name: str, text: str) -> Sweep:
    """Read a log.

    Raises:
        ClusterError: it is none, or does not say of what.
    """
    kind = next((k for word, k in _KINDS.items() if f"{word}_perf" in text), None)
    kind = kind or next((k for word, k in _KINDS.items() if word in name), None)
    if kind is None:
        raise ClusterError(
            f"{name} does not say which collective it is of: neither it nor its name holds one of "
            f"{', '.join(_KINDS)}"
        )
    found = [m for line in text.splitlines() if (m := _RANK.match(line))]
    rows = [m for line in text.splitlines() if (m := _ROW.match(line))]
    points = tuple((int(m[1]), float(m[3]) * 1e-6) for m in rows if int(m[1]) and float(m[3]))
    if not found or len(points) < _ENOUGH:
        raise ClusterError(
            f"{name} is no log of nccl-tests with {_ENOUGH} sizes or more: it has {len(found)} "
            f"lines '# Rank' and {len(points)} with times"
        )
    dtype = _TYPES.get(rows[0][2], rows[0][2])
    return Sweep(kind, dtype, len(found), len({m[2] for m in found}), found[0][3].strip(), points)


def read(name: str, text: str, base: str | None) -> Imported:
    """Import a log.

    Args:
        name: Of the file.
        text: Its content.
        base: A shipped accelerator; by default the one whose product name the log holds.

    Raises:
        ClusterError: it is no log, or its GPU is not known.
    """
    sweep = parse(name, text)
    chosen = base or next((a for word, a in _PRODUCTS if word in sweep.product), None)
    if chosen not in accelerator_names():
        raise ClusterError(
            f"accelerator={chosen or sweep.product!r} of {name} is not known: legal are "
            f"{', '.join(accelerator_names())}"
        )
    if sweep.ranks % sweep.hosts:
        raise ClusterError(
            f"{name} has {sweep.ranks} ranks on {sweep.hosts} hosts: not the same on each"
        )
    cluster = load_cluster(chosen, sweep.hosts, sweep.ranks // sweep.hosts)
    source = f"{name}: {sweep.kind} of {sweep.ranks} GPUs on {sweep.hosts} hosts"
    inside = placement(cluster, range(sweep.ranks)).domains == 1
    return (_links if inside else _network)(chosen, cluster, sweep, source)


def _with(cluster: Cluster, key: str, value: float) -> Cluster:
    """The cluster with another figure."""
    figure = Figure(value=value, source="-")
    if key in ("nic_efficiency", "nic_latency_s"):
        return dataclasses.replace(cluster, **{key: figure})
    table = cluster.accelerator.collectives | {key: figure}
    return dataclasses.replace(
        cluster, accelerator=dataclasses.replace(cluster.accelerator, collectives=table)
    )


def _errors(cluster: Cluster, sweep: Sweep) -> list[float]:
    """|ln(modelled / measured)| of every size."""
    where = placement(cluster, range(sweep.ranks))
    choices = lines(cluster, sweep.kind, sweep.dtype, where)
    return [
        abs(math.log(min(line.seconds(size) for line in choices) / seconds))
        for size, seconds in sweep.points
    ]


def _best(candidates: Iterable[Cluster], sweep: Sweep) -> tuple[Cluster, float]:
    """The cluster with the smallest mean error, and its median one."""
    best = min(candidates, key=lambda cluster: statistics.fmean(_errors(cluster, sweep)))
    return best, math.expm1(statistics.median(_errors(best, sweep)))


def _algorithm(cluster: Cluster, sweep: Sweep) -> str:
    """The share that decides the largest size of a sweep inside one domain."""
    where = placement(cluster, range(sweep.ranks))
    size = max(size for size, _ in sweep.points)
    choices = lines(cluster, sweep.kind, sweep.dtype, where)
    name = min(choices, key=lambda line: line.seconds(size)).name.split()[0]
    pair = sweep.ranks == 2 and cluster.accelerator.scale_up_topology == "switch"
    return (
        "message"
        if pair
        else {"nvls": "nvls", "direct": "direct", "chain": "message"}.get(name, "ring")
    )


def _links(base: str, cluster: Cluster, sweep: Sweep, source: str) -> Imported:
    key = _algorithm(cluster, sweep)
    best, error = _best((_with(cluster, key, value) for value in _SHARES), sweep)
    value = best.accelerator.collectives[key].value
    figure = {"value": value, "source": f"{source}, median error {error:.1%}"}
    table: dict[str, Any] = {
        k: {"value": f.value, "source": f"as {base}: {f.source}"}
        for k, f in cluster.accelerator.collectives.items()
    }
    own = {"like": base, "name": f"{base}_imported", "collectives": table | {key: figure}}
    return Imported(base, own, {}, (f"collectives.{key}={value}, {figure['source']}",))


def _network(base: str, cluster: Cluster, sweep: Sweep, source: str) -> Imported:
    coarse = [_with(cluster, "nic_latency_s", step * 5e-6) for step in range(31)]
    best, _ = _best(
        (_with(c, "nic_efficiency", share) for c in coarse for share in _NIC_SHARES[::4]), sweep
    )
    around = best.nic_latency_s.value
    fine = [_with(best, "nic_latency_s", max(0.0, around + i * 1e-6)) for i in range(-4, 5)]
    best, error = _best(
        (_with(c, "nic_efficiency", share) for c in fine for share in _NIC_SHARES), sweep
    )
    share, latency = best.nic_efficiency.value, round(best.nic_latency_s.value, 7)
    text = f"{source}, median error {error:.1%}"
    network = {
        "nic_efficiency": {"value": share, "source": text},
        "nic_latency_s": {"value": latency, "source": text},
    }
    note = (
        f"nic_efficiency={share}, nic_latency_s={latency:.1e}, {text}; of NICs of "
        f"{cluster.nic_bandwidth.value:.3g} bytes/s, the usual ones of {base}"
    )
    return Imported(base, None, network, (note,))

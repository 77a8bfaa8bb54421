"""Measured expert dispatch and combine kernels, each with the rows that it moves."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from primus_ext.cluster import Cluster, Figure
from primus_ext.cluster_data import load_cluster
from primus_ext.cost import collective_tables, exchange
from primus_ext.trace import Collective, CollectiveKind, Family, Op

PRODUCTS = {
    "B200": "b200", "GB200": "gb200", "H100": "h100", "MI300X": "mi300x", "MI355X": "mi355x",
    "SM100 (B200-class)": "b200", "SM90 (H800/H100)": "h100", "H800": "h100",
}  # fmt: skip
# NVLink of the H800, which is an H100 else (DeepEP docs/legacy.md: about 160 GB/s are reached).
_OTHER_LINKS = {"H800": 200e9}
_SHAPE = re.compile(
    r"EP(?P<ep>\d+)|(?P<tokens>\d+) tokens|top-(?P<topk>\d+)|hidden (?P<hidden>\d+)"
    r"|(?P<sms>\d+) SMs"
)
_EXPERTS_PER_RANK = {"hybridep": 8}
"""Local experts where the source gives them; 256 experts in all otherwise (DeepSeek-V3)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """One measured kernel."""

    source: str
    accelerator: str
    backend: str
    direction: str
    nodes: int
    ranks: int
    sms: int
    rows: float
    """To ranks, the own one counted."""
    node_rows: float
    """To other nodes."""
    row_bytes: float
    seconds: float
    own_links: float = 0.0
    """Bytes/s of the GPU's links, where they are not those of the accelerator."""

    @property
    def links(self) -> float:
        """Bytes/s of all scale-up links of the GPU."""
        return self.own_links or links(self.accelerator)

    @property
    def rate(self) -> float:
        """Bytes/s to ranks."""
        return self.rows * self.row_bytes / self.seconds

    def predicted(self) -> float:
        """Seconds by the product's own formula and files."""
        op = Op(
            name="deep_ep", family=Family.COLLECTIVE, inputs=(), outputs=(), flops=0, bytes=0,
            attrs=(("backend", self.backend), ("direction", self.direction),
                   ("node_bytes", int(self.node_rows * self.row_bytes)),
                   ("row_bytes", int(self.row_bytes)), ("sms", self.sms)),
            collective=Collective(CollectiveKind.ALL_TO_ALL, "ep",
                                  int(self.rows * self.row_bytes), "bf16"),
        )  # fmt: skip
        cluster = _cluster(self.accelerator, self.nodes, self.ranks)
        if self.own_links:
            figure = Figure(value=self.own_links, source="-")
            accelerator = dataclasses.replace(cluster.accelerator, scale_up_bandwidth=figure)
            cluster = dataclasses.replace(cluster, accelerator=accelerator)
        return exchange.price(cluster, op, range(self.ranks)).seconds


@functools.cache
def _cluster(accelerator: str, nodes: int, ranks: int) -> Cluster:
    if accelerator.startswith("gb"):
        return load_cluster(accelerator, ranks // 4, 4)
    return load_cluster(accelerator, nodes, ranks // nodes)


@functools.cache
def links(accelerator: str) -> float:
    """Bytes/s of all scale-up links of a GPU."""
    return _cluster(accelerator, 1, 8).accelerator.scale_up_bandwidth.value


def distinct(tokens: float, topk: int, experts: int, places: int) -> float:
    """Expected (token, place) pairs if top-k falls on any experts alike, places of equal size."""
    missed = 1.0
    here = experts // places
    for i in range(topk):
        missed *= max(0, experts - here - i) / (experts - i)
    return tokens * places * (1 - missed)


def published(path: Path) -> Iterator[Kernel]:
    """The evidence file's dispatch and combine figures of throughput kernels."""
    for point in yaml.safe_load(path.read_text(encoding="utf-8"))["points"]:
        if point["op"] not in ("moe_dispatch", "moe_combine") or point["gpu"] not in PRODUCTS:
            continue
        shape = {k: int(v) for m in _SHAPE.finditer(str(point["shape"]))
                 for k, v in m.groupdict().items() if v}  # fmt: skip
        if not {"ep", "tokens", "topk", "hidden"} <= shape.keys():
            continue
        if shape["tokens"] < 1024 or "stale" in str(point.get("conf")):
            continue
        kernel = _kernel(point, shape)
        if kernel is not None:
            yield kernel


def _kernel(point: dict, shape: dict[str, int]) -> Kernel | None:
    """One figure; None where its unit does not say what was counted."""
    source, ranks = str(point["src"]), shape["ep"]
    accelerator = PRODUCTS[point["gpu"]]
    nodes = 1 if accelerator.startswith("gb") else int(point.get("nodes") or 1)
    experts = _EXPERTS_PER_RANK[source] * ranks if source in _EXPERTS_PER_RANK else 256
    if experts % ranks:
        return None
    rows = distinct(shape["tokens"], shape["topk"], experts, ranks)
    to_nodes = distinct(shape["tokens"], shape["topk"], experts, nodes)
    fp8 = point["dtype"] == "fp8"
    payload = shape["hidden"] * (1 if fp8 else 2)
    unit, value = str(point["unit"]), float(point["value"])
    if unit == "us":
        seconds = value * 1e-6
    elif nodes == 1 and unit.startswith("GB/s"):
        seconds = rows * payload / (value * 1e9)
    elif "RDMA" in unit or "algorithm" in unit:  # the own node counted
        seconds = to_nodes * payload / (value * 1e9)
    else:
        return None
    return Kernel(
        source=source, accelerator=accelerator,
        backend="hybridep" if "HybridEP" in str(point.get("sw")) else "deepep",
        direction=point["op"].removeprefix("moe_"), nodes=nodes, ranks=ranks,
        sms=shape.get("sms", 0), rows=rows, node_rows=to_nodes * (nodes - 1) / nodes,
        row_bytes=payload + (4 * shape["hidden"] // 128 if fp8 else 0), seconds=seconds,
        own_links=_OTHER_LINKS.get(point["gpu"], 0.0),
    )  # fmt: skip


EVERY = 7
"""Of the tables' rows one in so many is taken: they hold 22 000, in the order of their shapes."""


def tabled() -> Iterator[Kernel]:
    """DeepEP in one node, of the optional package; nothing where it is not installed."""
    columns = ["hidden_size", "num_token", "num_topk", "num_experts", "dispatch_sms",
               "combine_sms", "dispatch_transmit_us", "combine_transmit_us"]  # fmt: skip
    for accelerator in collective_tables.SYSTEMS:
        for row in collective_tables.table(
            accelerator, "sglang", "wideep_deepep_normal_perf.parquet", columns
        )[::EVERY]:
            tokens, hidden = row["num_token"], row["hidden_size"]
            rows = distinct(tokens, row["num_topk"], row["num_experts"], 8)
            for direction, width in (("dispatch", hidden + 4 * hidden // 128),
                                     ("combine", 2 * hidden)):  # fmt: skip
                yield Kernel(
                    source="aic", accelerator=accelerator, backend="deepep",
                    direction=direction, nodes=1, ranks=8, sms=row[f"{direction}_sms"],
                    rows=rows, node_rows=0.0, row_bytes=width,
                    seconds=row[f"{direction}_transmit_us"] * 1e-6,
                )  # fmt: skip

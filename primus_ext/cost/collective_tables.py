"""Measured NCCL times of the optional package ``aiconfigurator-core``, read where it is installed.

``systems/data/SYSTEM/comm/nccl/VERSION/nccl_perf.parquet``: nccl-tests in one process, groups of 2,
4 and 8 GPUs of one node, 512 B to 512 MiB in powers of two.  ``message_size`` counts elements.
"""

from __future__ import annotations

import bisect
import functools
import importlib
import importlib.resources
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from primus_ext.trace import CollectiveKind

SYSTEMS = {
    "a100": "a100_sxm", "h100": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm",
    "b300": "b300_sxm", "gb200": "gb200", "gb300": "gb300",
}  # fmt: skip
"""Accelerators that have a table, and its name."""
_KINDS = {
    "all_reduce": CollectiveKind.ALL_REDUCE, "all_gather": CollectiveKind.ALL_GATHER,
    "reduce_scatter": CollectiveKind.REDUCE_SCATTER, "alltoall": CollectiveKind.ALL_TO_ALL,
}  # fmt: skip
_WIDTH = {"half": 2, "int8": 1}

SWITCH_TYPES = frozenset({"bf16", "fp16", "fp32"})
"""Numbers that an NVLink switch adds (NCCL ``ncclNvlsSupported``, those of training)."""

Curve = list[tuple[int, float]]
"""Bytes and seconds, rising."""
Curves = dict[tuple[CollectiveKind, str, int], Curve]
"""By kind, number format (fp16, int8) and GPUs."""


def available() -> bool:
    """Whether the tables can be read."""
    return _folder() is not None and _reader() is not None


@functools.cache
def _folder() -> Path | None:
    try:
        found = Path(str(importlib.resources.files("aiconfigurator_core"))) / "systems" / "data"
    except ModuleNotFoundError:
        return None
    return found if found.is_dir() else None


@functools.cache
def _reader() -> Callable[..., Any] | None:
    try:
        return importlib.import_module("pyarrow.parquet").read_table
    except ImportError:
        return None


def curve(accelerator: str, kind: CollectiveKind, dtype: str, gpus: int) -> Curve | None:
    """Measured times of a group of ``gpus`` in one node, None where there are none.

    What only moves data does not depend on the number format; sums are those of fp16, or of int8
    where the switch does not add.
    """
    adds = dtype in SWITCH_TYPES or kind is not CollectiveKind.ALL_REDUCE
    return rows(accelerator).get((kind, "fp16" if adds else "int8", gpus))


def seconds(known: Curve, size: int, model: Callable[[float], float]) -> float:
    """Time of ``size`` bytes: between two measured sizes by their logarithms.

    Args:
        known: A measured curve.
        size: Bytes.
        model: Seconds of a size by formula; beyond the measured sizes it is scaled so that it meets
            the last of them.
    """
    if size <= known[0][0]:
        return known[0][1]
    last, longest = known[-1]
    if size >= last:
        return longest * model(size) / model(last)
    place = bisect.bisect_left(known, (size, 0.0))
    if known[place][0] == size:
        return known[place][1]
    (small, short), (large, long) = known[place - 1], known[place]
    part = math.log(size / small) / math.log(large / small)
    return math.exp((1 - part) * math.log(short) + part * math.log(long))


def _version(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path.parent.name)]


def table(
    accelerator: str, framework: str, name: str, columns: Sequence[str]
) -> list[dict[str, Any]]:
    """Rows of the newest version of a communication table; none where it is not there.

    Args:
        accelerator: Of :data:`SYSTEMS`.
        framework: Folder of the software that was measured: nccl, sglang.
        name: File of the table.
        columns: To read.
    """
    folder, read = _folder(), _reader()
    if folder is None or read is None or accelerator not in SYSTEMS:
        return []
    versions = (folder / SYSTEMS[accelerator] / "comm" / framework).glob(f"*/{name}")
    newest = max(versions, default=None, key=_version)
    return [] if newest is None else read(newest, columns=list(columns)).to_pylist()


@functools.cache
def rows(accelerator: str) -> Curves:
    """All curves of an accelerator, of the newest NCCL; empty where there is no table.

    Repeated measurements are their median.
    """
    columns = ["nccl_dtype", "op_name", "num_gpus", "message_size", "latency"]
    found: defaultdict[tuple, defaultdict[int, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for row in table(accelerator, "nccl", "nccl_perf.parquet", columns):
        if row["op_name"] in _KINDS and row["nccl_dtype"] in _WIDTH:
            dtype = "fp16" if row["nccl_dtype"] == "half" else row["nccl_dtype"]
            key = (_KINDS[row["op_name"]], dtype, int(row["num_gpus"]))
            size = int(row["message_size"]) * _WIDTH[row["nccl_dtype"]]
            found[key][size].append(float(row["latency"]) * 1e-3)
    return {
        key: sorted((size, statistics.median(times)) for size, times in curve.items())
        for key, curve in found.items()
    }

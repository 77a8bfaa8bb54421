"""Measured kernel tables of the optional package ``aiconfigurator-core``, read when first needed.

The package (Apache-2.0, NVIDIA) holds forward kernels measured through serving frameworks on
NVIDIA products, one file for each product, kind of kernel, framework and version.  Nothing of it is
copied here; without it, or without ``pyarrow``, the formulas stand alone.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import re
from pathlib import Path
from typing import Any

PACKAGE = "aiconfigurator-core"
_MODULE = "aiconfigurator_core"

Columns = dict[str, Any]
"""Columns of one table by name, as numpy arrays."""


@functools.lru_cache(maxsize=1)
def source() -> str | None:
    """Name and version of the tables, None where they or their reader are not installed."""
    if importlib.util.find_spec(_MODULE) is None or importlib.util.find_spec("pyarrow") is None:
        return None
    return f"{PACKAGE} {importlib.metadata.version(PACKAGE)}"


def files(system: str, family: str, table: str) -> dict[str, Path]:
    """The newest file of a table by serving framework.

    Args:
        system: A product as the package calls it, e.g. ``h100_sxm``.
        family: Folder, e.g. ``gemm``.
        table: File name without its ending, e.g. ``gemm_perf``.
    """
    if source() is None:
        return {}
    spec = importlib.util.find_spec(_MODULE)
    root = Path(next(iter((spec and spec.submodule_search_locations) or ())))
    found = sorted(
        (root / "systems" / "data" / system / family).glob(f"*/*/{table}.parquet"),
        key=lambda path: [int(part) for part in re.findall(r"\d+", path.parent.name)],
    )
    return {path.parent.parent.name: path for path in found}


def _parquet() -> Any:
    """The reader: an optional dependency, and 0.2 s to import."""
    return importlib.import_module("pyarrow.parquet")


def read(path: Path, columns: list[str], where: list[tuple[str, str, Any]]) -> Columns:
    """Some columns of a file, of the rows that all conditions hold for.

    Args:
        path: A file of :func:`files`.
        columns: Names of the wanted columns.
        where: Column, comparison and value, as ``pyarrow.parquet.read_table`` takes them.
    """
    table = _parquet().read_table(path, columns=columns, filters=where)
    return {name: table[name].to_numpy() for name in columns}


def names(path: Path) -> list[str]:
    """Names of all columns of a file."""
    return list(_parquet().read_schema(path).names)

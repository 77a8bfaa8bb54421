"""``primus-ext db``: what the latency database holds, in and out of it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console

from primus_ext.cluster_data import load_accelerator
from primus_ext.cost.latency_db import (
    DatabaseError,
    LatencyDatabase,
    Origin,
    Row,
    aiconfigurator,
    default_path,
    evidence,
    files,
)
from primus_ext.report import latency
from primus_ext.runner.database_fill import measure, missing
from primus_ext.runner.outcome import Exit, UsageError, write_asked

__all__ = ["export", "import_", "measure", "missing", "opened", "prune", "stats"]

TABLES = "aiconfigurator-core"
"""Given for a file: the tables of that package."""
_AT_ONCE = 5000
"""Rows of one transaction of an import."""


def opened(path: Path | None, create: bool = False) -> LatencyDatabase:
    """The database that a command works on.

    Raises:
        UsageError: It can't be used.
    """
    try:
        return LatencyDatabase(path or default_path(os.environ), create=create)
    except DatabaseError as error:
        raise UsageError(str(error)) from error


def stats(path: Path | None) -> int:
    """Print what there is, by device, origin, clock and family."""
    with opened(path) as database:
        latency.stats(str(database.path), database.counts(), Console())
    return Exit.DONE


def export(path: Path | None, out: Path, origin: str | None) -> int:
    """Write rows to a file of JSON lines.

    Args:
        path: The database.
        out: The file.
        origin: Only measured, or only imported ones; None: all.

    Raises:
        UsageError: The file can't be written.
    """
    with opened(path) as database:
        chosen = None if origin is None else Origin(origin)
        lines = list(files.text(database.rows(origin=chosen)))
    write_asked("--out", out, "".join(lines))
    latency.lines([f"{len(lines) - 1:,} rows in {out}"], Console())
    return Exit.DONE


def import_(path: Path | None, source: str, accelerator: str | None) -> int:
    """Take in rows of a file, or of the tables of ``aiconfigurator-core``.

    Args:
        path: The database, made where there is none.
        source: An exported file, a YAML file of operator figures, or :data:`TABLES`.
        accelerator: Whose tables.

    Raises:
        UsageError: There is no such file, or it holds something else.
    """
    left: dict[str, int] = {}
    try:
        with opened(path, create=True) as database:
            read = new = 0
            for batch in _batches(_rows(source, accelerator, left)):
                read, new = read + len(batch), new + database.add(batch)
            where = database.path
    except (DatabaseError, ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    said = [f"{read:,} rows read, {new:,} of them new in {where}"]
    said += [f"{count:,} left out: {reason}" for reason, count in sorted(left.items())]
    latency.lines(said, Console())
    return Exit.DONE


def _rows(source: str, accelerator: str | None, left: dict[str, int]) -> Iterable[Row]:
    if source == TABLES:
        if not accelerator:
            raise UsageError(f"{TABLES} needs --accelerator NAME, e.g. h100")
        return aiconfigurator.read(load_accelerator(accelerator).measured_tables, accelerator)
    path = Path(source)
    if not path.is_file():
        raise UsageError(f"{source} is no file; legal is a file of rows or figures, or {TABLES}")
    if files.is_one(path):
        return files.read(path)
    if evidence.is_one(path):
        return evidence.read(path, left)
    raise UsageError(
        f"{source} is neither an exported file of rows nor operator figures in YAML (.yaml)"
    )


def _batches(rows: Iterable[Row]) -> Iterable[list[Row]]:
    batch: list[Row] = []
    for row in rows:
        batch.append(row)
        if len(batch) == _AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch


def prune(
    path: Path | None, source: str, product: str, before: str, unsteady: bool, superseded: bool
) -> int:
    """Remove rows for which everything holds that is asked.

    Raises:
        UsageError: Nothing was asked.
    """
    with opened(path) as database:
        try:
            removed = database.prune(
                source=source, product=product, before=before, unsteady=unsteady,
                superseded=superseded,
            )  # fmt: skip
        except DatabaseError as error:
            raise UsageError(f"{error}: name --source, --device, --before, --unsteady or "
                             "--superseded") from error  # fmt: skip
        latency.lines([f"{removed:,} rows removed from {database.path}"], Console())
    return Exit.DONE

"""Rows as a plain file: JSON, one row a line, after a line that says what the file is."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from primus_ext.cost.latency_db import rows
from primus_ext.cost.latency_db.rows import Row
from primus_ext.cost.latency_db.store import DatabaseError

FORMAT = "primus_ext latency rows"
VERSION = 1


def text(found: Iterable[Row]) -> Iterator[str]:
    """Lines of the file, each with its end."""
    yield json.dumps({"format": FORMAT, "version": VERSION}) + "\n"
    for row in found:
        yield rows.to_json(row) + "\n"


def is_one(path: Path) -> bool:
    """Whether a file begins as one of these does."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return FORMAT in file.readline(200)


def read(path: Path) -> Iterator[Row]:
    """Rows of a file.

    Raises:
        DatabaseError: It is of another version, or a line of it is no row.
    """
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                if number == 1:
                    _check(path, json.loads(line))
                elif line.strip():
                    yield rows.from_json(line)
            except DatabaseError:
                raise
            except (ValueError, TypeError) as error:
                raise DatabaseError(f"{path}, line {number}, is no row: {error}") from error


def _check(path: Path, head: object) -> None:
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise DatabaseError(f"{path} is no file of latency rows")
    if head.get("version") != VERSION:
        raise DatabaseError(
            f"{path} has version {head.get('version')} of latency rows, legal is {VERSION}"
        )

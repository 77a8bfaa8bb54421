"""The latency database on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from primus_ext.report import units

_LEFT = ("device", "origin", "clock", "family")
_WIDE = 120
"""Columns that a table may have: what it says is not cut for a narrow terminal."""


def stats(path: str, counts: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print what a database holds.

    Args:
        path: Of the file.
        counts: As ``LatencyDatabase.counts`` gives them.
        console: Where to.
    """
    console.print(path, soft_wrap=True, highlight=False)
    table = Table(box=None, pad_edge=False)
    for name in (*_LEFT, "rows", "signatures", "samples", "device time", "unsteady"):
        table.add_column(name, justify="left" if name in _LEFT else "right")
    for count in counts:
        table.add_row(
            *(count[name] for name in _LEFT),
            *(f"{count[name]:,}" for name in ("rows", "signatures", "samples")),
            units.seconds(count["seconds"]),
            f"{count['unsteady']:,}",
        )
    console.print(table, width=max(_WIDE, console.width), soft_wrap=True)


def lines(found: Sequence[str], console: Console) -> None:
    """Print sentences, one a line."""
    for line in found:
        console.print(line, soft_wrap=True, highlight=False, markup=False)

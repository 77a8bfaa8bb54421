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
    table(
        [
            {**{name: count[name] for name in (*_LEFT, "rows", "signatures", "samples")},
             "device time": units.seconds(count["seconds"]), "unsteady": count["unsteady"]}
            for count in counts
        ],
        console,
    )  # fmt: skip


def table(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print rows of equal keys; numbers stand on the right.

    Args:
        rows: By column; none prints nothing.
        console: Where to.
    """
    if not rows:
        return
    made = Table(box=None, pad_edge=False)
    for name, value in rows[0].items():
        made.add_column(name, justify="left" if isinstance(value, str) else "right")
    for row in rows:
        made.add_row(*(v if isinstance(v, str) else f"{v:,}" for v in row.values()))
    console.print(made, width=max(_WIDE, console.width), soft_wrap=True)


def lines(found: Sequence[str], console: Console) -> None:
    """Print sentences, one a line."""
    for line in found:
        console.print(line, soft_wrap=True, highlight=False, markup=False)

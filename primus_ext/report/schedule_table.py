"""Pipeline schedules side by side, for the terminal."""

from __future__ import annotations

import re

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from primus_ext.project.result import Projection, ScheduleRow
from primus_ext.report.units import gib, percent, seconds

_NUMBERS = 60
"""Columns that the table needs beside who offers a schedule."""
_HOW = re.compile(r" \([^)]*\)")
_ROLES = {"runs": " (runs)", "asked": " (asked)"}


def schedules(projection: Projection, width: int) -> list[RenderableType]:
    """A table of the schedules that were asked for, quickest first; nothing if none was.

    Args:
        projection: The answer.
        width: Columns of the terminal.
    """
    if not projection.schedules:
        return []
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("schedule", no_wrap=True)
    for name in ("step", "bubble", "in flight", "peak"):
        table.add_column(name, justify="right", no_wrap=True)
    offered = max(16, width - _NUMBERS)
    table.add_column("offered by", overflow="fold", style="dim", max_width=offered)
    possible = [row for row in projection.schedules if row.step_s is not None]
    for row in sorted(possible, key=lambda row: row.step_s or 0.0):
        table.add_row(*_cells(row), style="bold" if row.role else "")
    found: list[RenderableType] = [Text(), Text("Pipeline schedules", style="bold"), table]
    if any(row.fits is False for row in possible):
        found.append(Text("! does not fit", style="dim"))
    found.append(
        Text("in flight: microbatches of a whole rank; peak: live tensors of the heaviest rank, "
             "estimated but for what the program runs", style="dim")
    )  # fmt: skip
    for row in projection.schedules:
        if row.refused:
            found.append(Text(f"{row.schedule}: {row.refused}", style="dim"))
    return found


def _cells(row: ScheduleRow) -> list[str]:
    assert row.step_s is not None and row.bubble_share is not None and row.in_flight is not None
    mark = "" if row.fits is not False else "! "
    return [
        f"{row.schedule}{_ROLES.get(row.role, '')}", seconds(row.step_s), percent(row.bubble_share),
        f"{row.in_flight:.1f}", f"{mark}{gib(max(row.peak_bytes))}",
        _HOW.sub("", row.offered_by),
    ]  # fmt: skip

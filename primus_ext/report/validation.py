"""Measured and projected runs side by side, for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


def render(result: Mapping[str, Any], console: Console) -> None:
    """Print the rows, then a line for each group.

    Args:
        result: ``rows``, ``groups`` and ``summary`` as ``primus-ext validate --json`` writes them.
        console: Where to.
    """
    table = Table(title="projected over measured step time", title_justify="left")
    for name, justify in (("run", "left"), ("measured", "right"), ("projected", "right"),
                          ("ratio", "right"), ("peak GiB", "right"), ("note", "left")):  # fmt: skip
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in result["rows"]:
        table.add_row(*_cells(row))
    console.print(table)
    for name, group in (*result["groups"].items(), ("all", result["summary"])):
        console.print(_line(name, group))


def _cells(row: Mapping[str, Any]) -> Sequence[str]:
    measured = f"{row['measured_s']:.3f} s"
    if row["predicted_s"] is None:
        return (row["id"], measured, "-", "-", "-", f"skipped: {row['skipped']}")
    return (
        row["id"],
        measured,
        f"{row['predicted_s']:.3f} s",
        f"{row['ratio']:.3f}",
        _peak(row),
        "; ".join(row["approximations"]),
    )


def _peak(row: Mapping[str, Any]) -> str:
    """Projected peak, and the measured one in its unit."""
    predicted = f"{row['peak_predicted'] / 2**30:.1f}"
    if row["peak_measured"] is None:
        return predicted
    error = (row["peak_predicted"] / row["peak_measured"] - 1) * 100
    return f"{predicted} ({error:+.1f} % of {row['memory_kind']})"


def _line(name: str, group: Mapping[str, Any]) -> str:
    if not group["rows"]:
        return f"{name}: no row could be projected"
    order = "" if group["spearman"] is None else f", Spearman {group['spearman']:.3f}"
    memory = "".join(
        f"; {unit} memory: {found['rows']} rows, mean error {found['mean']:.2f} %, "
        f"worst {found['worst']:+.2f} %"
        for unit, found in group["memory"].items()
    )
    return (
        f"{name}: {group['rows']} rows, mean error {group['mape']:.1f} %, "
        f"bias {group['bias']:+.1f} %, worst factor {group['worst_factor']:.2f}{order}{memory}"
    )

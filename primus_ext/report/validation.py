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
    console.print(_summaries(result, console.width))


def _cells(row: Mapping[str, Any]) -> Sequence[str]:
    measured = "-" if row["measured_s"] is None else f"{row['measured_s']:.3f} s"
    if row["predicted_s"] is None:
        return (row["id"], measured, "-", "-", "-", f"skipped: {row['skipped']}")
    return (
        row["id"],
        measured,
        f"{row['predicted_s']:.3f} s",
        f"{row['ratio']:.3f}",
        _peak(row),
        _note(row),
    )


def _note(row: Mapping[str, Any]) -> str:
    newer = row["superseded_by"]
    first = [] if newer is None else [f"not scored: {newer} is newer"]
    if row["confidence"] == "low":
        first.append("not scored: its confidence is low")
    return "; ".join([*first, *row["approximations"]])


def _peak(row: Mapping[str, Any]) -> str:
    """Projected peak, and the measured one in its unit."""
    if row["peak_predicted"] is None:
        return "-"
    predicted = f"{row['peak_predicted'] / 2**30:.1f}"
    if row["peak_measured"] is None:
        return predicted
    error = (row["peak_predicted"] / row["peak_measured"] - 1) * 100
    return f"{predicted} ({error:+.1f} % of {row['memory_kind']})"


_COLUMNS = {"rows": 4, "error": 5, "bias": 5, "worst": 5, "rho": 5, "regret": 6, "k": 5, "cv": 4,
            "inside": 6, "width": 5}  # fmt: skip


def _summaries(result: Mapping[str, Any], width: int) -> Table:
    """One line for each source, and one for all scored rows."""
    title = (
        "scored rows by source: mean error, bias, regret, cv of k, share inside the interval and "
        "its half width in percent; rho: Spearman; k: projected over measured throughput"
    )
    table = Table(
        title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), header_style="underline"
    )
    room = width - sum(_COLUMNS.values()) - len(_COLUMNS) - 1
    table.add_column("source", max_width=max(12, min(40, room)), no_wrap=True)
    for name, least in _COLUMNS.items():
        table.add_column(name, justify="right", min_width=least, no_wrap=True)
    for name, group in (*result["sources"].items(), ("all", result["summary"])):
        if group["rows"]:
            table.add_row(name, *_figures(group))
    return table


def _figures(group: Mapping[str, Any]) -> Sequence[str]:
    def number(key: str, form: str) -> str:
        return "-" if group[key] is None else format(group[key], form)

    return (
        str(group["rows"]),
        number("mape", ".1f"),
        number("bias", "+.1f"),
        f"x{group['worst_factor']:.2f}",
        number("spearman", ".3f"),
        number("regret", ".1f"),
        number("k", ".3f"),
        number("k_cv", ".1f"),
        number("inside", ".0f"),
        number("half_width", ".0f"),
    )

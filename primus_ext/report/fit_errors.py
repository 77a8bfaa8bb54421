"""Errors of held-out runs, by source and by group."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence

from rich.console import Console
from rich.markdown import Markdown

Off = tuple[str, str, str, float]
"""Source, group and id of a run, ln(projected/measured)."""


def _line(name: str, off: Sequence[float]) -> str:
    errors = [math.expm1(e) for e in off]
    return (
        f"| {name} | {len(errors)} | {statistics.mean(map(abs, errors)):.1%} | "
        f"{statistics.mean(errors):+.1%} | {max(errors, key=abs):+.1%} |"
    )


def markdown(off: Sequence[Off]) -> str:
    """A page with a table of sources and one of groups.

    Args:
        off: One entry for every run.
    """
    sources: dict[str, list[float]] = defaultdict(list)
    groups: dict[str, list[float]] = defaultdict(list)
    for source, group, _, error in off:
        sources[source].append(error)
        groups[group].append(error)
    head = "| runs | mean error | bias | worst |\n|---|---|---|---|---|"
    every = [e for *_, e in off]
    return "\n".join([
        "# Step times of runs left out of the fit", "",
        "`primus-ext fit RUNS.yaml`: five folds, all runs of a group (source, model, GPU) in one; "
        "each run is projected with factors fitted without its fold, the newest of each "
        "configuration.  Error: projected over measured, less 1.", "",
        f"| source {head}", *(_line(name, sources[name]) for name in sorted(sources)),
        _line("all", every), "",
        f"| group {head}", *(_line(name, groups[name]) for name in sorted(groups)), "",
    ])  # fmt: skip


def render(text: str, console: Console) -> None:
    """Print the page's first table."""
    console.print(Markdown(text.split("\n| group ")[0]))

"""What was measured beside what the model says, for the terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from primus_ext.project.result import Projection, Term
from primus_ext.report.units import percent, seconds


def comparison(projection: Projection) -> list[RenderableType]:
    """Exposed seconds of each term, measured and simulated; nothing where only one is known.

    Args:
        projection: The answer.
    """
    if not projection.simulated:
        return []
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("term", no_wrap=True)
    for name in ("measured", "simulated", "measured / simulated"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows(projection):
        table.add_row(*row)
    return [Text(), Text("Measured against simulated", style="bold"), table]


def rows(projection: Projection) -> list[tuple[str, str, str, str]]:
    """Cells of :func:`comparison`, the whole step last."""
    measured = {term.term: term.exposed_seconds for term in projection.breakdown}
    modelled = {term.term: term.exposed_seconds for term in projection.simulated}
    names = list(dict.fromkeys([*measured, *modelled]))
    found = [_row(name, measured.get(name, 0.0), modelled.get(name, 0.0)) for name in names]
    whole = _row("step", _total(projection.breakdown), _total(projection.simulated))
    return [*found, whole]


def _total(terms: tuple[Term, ...]) -> float:
    return sum(term.exposed_seconds for term in terms)


def _row(name: str, measured: float, modelled: float) -> tuple[str, str, str, str]:
    ratio = percent(measured / modelled) if modelled else "-"
    return name, seconds(measured), seconds(modelled), ratio

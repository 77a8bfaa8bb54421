"""One run: mode -> child process -> traces -> projection -> outputs.

Nothing here imports torch.  The user's program runs in a child process under
``primus_ext.emulate.bootstrap``, since frameworks decide at import what they are; what it hands
back is priced and composed in this process.
"""

from pathlib import Path
from types import ModuleType

from primus_ext.runner.guard import Place, arm_tripwire, place
from primus_ext.runner.job import MODES, Request, run
from primus_ext.runner.outcome import Exit, Outcome, UsageError, close, say


def validate_runs(
    runs: Path, subset: str | None, ids: list[str], out: Path | None, which: str, memory: str
) -> int:
    """``primus-ext validate``; see :func:`primus_ext.runner.validate.command`."""
    from primus_ext.runner import validate  # NumPy and the pricing rooms, only where needed

    return validate.command(runs, subset, ids, out, which, memory)


def fit_runs(runs: Path, out: Path | None, report: Path | None) -> int:
    """``primus-ext fit``; see :func:`primus_ext.runner.fit.command`."""
    from primus_ext.runner import fit

    return fit.command(runs, out or fit.default_out(), report)


def measure_collectives(out: Path, options: list[str]) -> int:
    """``primus-ext collectives``; see :func:`primus_ext.runner.collectives.command`."""
    from primus_ext.runner import collectives

    return collectives.command(out, options)


def databases() -> ModuleType:
    """``primus-ext db``: :mod:`primus_ext.runner.database`."""
    from primus_ext.runner import database

    return database


__all__ = [
    "MODES",
    "Exit",
    "Outcome",
    "Place",
    "Request",
    "UsageError",
    "arm_tripwire",
    "close",
    "databases",
    "fit_runs",
    "measure_collectives",
    "place",
    "run",
    "say",
    "validate_runs",
]

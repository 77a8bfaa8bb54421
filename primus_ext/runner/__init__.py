"""One run: mode -> child process -> traces -> projection -> outputs.

Nothing here imports torch.  The user's program runs in a child process under
``primus_ext.emulate.bootstrap``, since frameworks decide at import what they are; what it hands
back is priced and composed in this process.
"""

from pathlib import Path

from primus_ext.runner.guard import Place, arm_tripwire, place
from primus_ext.runner.job import MODES, Request, run
from primus_ext.runner.outcome import Exit, Outcome, UsageError, close, say


def validate_runs(
    runs: Path, subset: str | None, ids: list[str], out: Path | None, which: str, memory: str
) -> int:
    """``primus-ext validate``; see :func:`primus_ext.runner.validate.command`."""
    from primus_ext.runner import validate  # NumPy and the pricing rooms, only where needed

    return validate.command(runs, subset, ids, out, which, memory)


__all__ = [
    "MODES",
    "Exit",
    "Outcome",
    "Place",
    "Request",
    "UsageError",
    "arm_tripwire",
    "close",
    "place",
    "run",
    "say",
    "validate_runs",
]

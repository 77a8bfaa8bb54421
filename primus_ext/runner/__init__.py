"""One run: mode -> child process -> traces -> projection -> outputs.

Nothing here imports torch.  The user's program runs in a child process under
``primus_ext.emulate.bootstrap``, since frameworks decide at import what they are; what it hands
back is priced and composed in this process.
"""

from primus_ext.runner.guard import Place, arm_tripwire, place
from primus_ext.runner.job import MODES, Request, run
from primus_ext.runner.outcome import Exit, Outcome, UsageError, close, say

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
]

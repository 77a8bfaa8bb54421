"""One run: mode -> child process -> traces -> projection -> outputs.

Nothing here imports torch.  The user's program runs in a child process under
``primus_ext.emulate.bootstrap``, since frameworks decide at import what they are; what it hands
back is priced and composed in this process.
"""

from primus_ext.runner.guard import arm_tripwire
from primus_ext.runner.outcome import Exit, Outcome, UsageError, close, say
from primus_ext.runner.run import Request, run

__all__ = ["Exit", "Outcome", "Request", "UsageError", "arm_tripwire", "close", "run", "say"]

"""The tripwire of the process that the user started."""

from __future__ import annotations

import sys
from typing import NoReturn

from primus_ext.emulate import tripwire
from primus_ext.runner.outcome import Exit, say


def arm_tripwire() -> None:
    """End this process with exit code 4 should it come to an optimizer step all the same.

    A second line: the callback leaves the process before the user's task runs.  It catches what
    never gets that far, such as a program that composes its configuration without
    ``@hydra.main``, or one whose configuration drops our callback.  Does not import torch.
    """
    tripwire.arm(_leave)


def _leave(what: str) -> NoReturn:
    say(
        f"stopped: {what} although +projection was asked for, since the projection was never "
        "started; it needs a program that runs under @hydra.main and keeps "
        "hydra.callbacks.primus_projection in its configuration"
    )
    sys.exit(Exit.INTERNAL)

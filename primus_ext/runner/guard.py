"""Where in a projection this process stands, and its tripwire."""

from __future__ import annotations

import os
import sys
from enum import Enum
from typing import NoReturn

from primus_ext.emulate import tripwire
from primus_ext.runner.child import MARK
from primus_ext.runner.outcome import Exit, say


class Place(Enum):
    """Which process of a projection this is."""

    USER = "the process that the user started"
    CHILD = "the process that runs the user's program for us"
    DESCENDANT = "a process that the user's program started inside a projection"


def place() -> Place:
    """Which process of a projection this is."""
    if MARK not in os.environ:
        return Place.USER
    session = sys.modules.get("primus_ext.emulate.session")
    if session is None:
        return Place.DESCENDANT
    try:
        session.current()
    except RuntimeError:
        return Place.DESCENDANT
    return Place.CHILD


def arm_tripwire() -> None:
    """End this process with exit code 4 should it come to an optimizer step all the same.

    A second line: the callback leaves the process before the user's task runs.  It catches what
    never gets that far, such as a program that composes its configuration without
    ``@hydra.main``, or one whose configuration drops our callback.  Does not import torch.  In the
    child process of a projection the bootstrap has armed it already.
    """
    if place() is not Place.CHILD:
        tripwire.arm(_leave)


def _leave(what: str) -> NoReturn:
    say(
        f"stopped: {what} although +projection was asked for, since the projection was never "
        "started; it needs a program that runs under @hydra.main and keeps "
        "hydra.callbacks.primus_projection in its configuration"
    )
    sys.exit(Exit.INTERNAL)

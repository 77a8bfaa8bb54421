"""How many steps are measured, and when each of them begins."""

from __future__ import annotations

import dataclasses
import os
from multiprocessing.connection import Client, Connection
from multiprocessing.synchronize import Barrier
from typing import Any, Protocol

WARM_UP, STEPS = 3, 9
TIMEOUT_S = 600.0
"""How long a process waits for the others of this machine before it gives up."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a measurement consists of."""

    warm_up: int = WARM_UP
    """Steps that don't count: the first ones make workspaces and optimizer states."""
    steps: int = STEPS
    """Steps that count."""
    profile: bool = True
    """Whether a further step runs under a profiler."""
    parts: bool = True
    """Whether the parts of a step are told apart; False: no hook is installed."""
    beside: int = 1
    """Processes measured at the same time on this machine, each of them counted."""

    @classmethod
    def of(cls, request: dict[str, Any]) -> Asked:
        """What a request's ``measure`` asks for."""
        given = request["measure"]
        names = ("warm_up", "steps", "profile", "parts")
        return cls(**{name: given[name] for name in names if name in given})


class Gate(Protocol):
    """Lets processes that load the same machine begin their steps together."""

    def pass_(self) -> None:
        """Wait until the next step may begin."""
        ...

    def done(self, seconds: float) -> None:
        """The step is over; ``seconds`` without what answering for others took."""
        ...


class Free:
    """Nobody else is measured."""

    def pass_(self) -> None:
        """Nothing is waited for."""

    def done(self, seconds: float) -> None:
        """Nobody is told."""


class Together:
    """Processes that were forked from one begin every step at the same time."""

    def __init__(self, barrier: Barrier, timeout_s: float) -> None:
        """Wait at ``barrier``, but no longer than ``timeout_s``."""
        self._barrier, self._timeout_s = barrier, timeout_s

    def pass_(self) -> None:
        """Wait for the others.

        Raises:
            threading.BrokenBarrierError: One of them is not there in time, or died.
        """
        self._barrier.wait(self._timeout_s)

    def done(self, seconds: float) -> None:
        """Nobody is told."""


class Led:
    """Another process says when a step begins, and hears how long it took."""

    def __init__(self, address: str, timeout_s: float) -> None:
        """Not connected before the first step: until then there may be more forks.

        Args:
            address: Of a :class:`multiprocessing.connection.Listener`.
            timeout_s: How long to wait for it.
        """
        self._address, self._timeout_s = address, timeout_s
        self._connection: Connection | None = None

    def pass_(self) -> None:
        """Say that this process is ready, and wait.

        Raises:
            TimeoutError: Nobody led in time.
            EOFError: Whoever led is gone.
        """
        if self._connection is None:
            self._connection = Client(self._address)
        self._connection.send(("ready", os.environ.get("RANK", "")))
        if not self._connection.poll(self._timeout_s):
            raise TimeoutError(f"no step was begun within {self._timeout_s:.0f} s")
        self._connection.recv()

    def done(self, seconds: float) -> None:
        """Tell how long the step took."""
        if self._connection is not None:
            self._connection.send(("done", seconds))


def gate(request: dict[str, Any], barrier: Barrier) -> Gate:
    """What a request's measurement begins its steps with."""
    leader = request["measure"].get("leader")
    if leader is not None:
        return Led(leader, TIMEOUT_S)
    return Together(barrier, float(request["measure"].get("timeout_s", TIMEOUT_S)))

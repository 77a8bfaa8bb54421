"""The allocations and frees of a rank whose microbatches differ (FSDP), as they were recorded.

Whole steps are in the trace, so nothing is composed: the first step, of one microbatch, and one
of up to three.  More microbatches repeat the middle one and don't raise what is live.
"""

from __future__ import annotations

from collections.abc import Iterator

from primus_ext.project.replay import Piece
from primus_ext.trace import AllocationKind, RankTrace


class Recorded:
    """A :class:`~primus_ext.project.replay.Source` of what was recorded."""

    def __init__(self, trace: RankTrace, workspaces: tuple[int, int] = (0, 0)) -> None:
        """Nothing is allocated yet.

        Args:
            trace: Of the rank, with its recorded events.
            workspaces: Bytes that libraries take in the first forward and in the first backward.
        """
        self._pieces = trace.recorded_events
        self._next = 1
        self._made = sum(event >= 0 for event in self._pieces[0])
        self.kinds = list(trace.allocations)
        """What the events refer to: the trace's kinds, and one for each workspace."""
        self._workspaces: list[int] = []
        for size in filter(None, workspaces):
            self._workspaces.append(len(self.kinds))
            self.kinds.append(AllocationKind(size, "cublas", "", "workspaces"))

    @property
    def steps(self) -> int:
        """How many steps were recorded."""
        return len(self._pieces) - 1

    def setup(self) -> Piece:
        """Building the model and the optimizer."""
        return Piece("setup", list(self._pieces[0]))

    def step(self, *, first: bool) -> Iterator[Piece]:
        """The next recorded step, workspaces before the first; frees are numbered past them."""
        events = self._pieces[self._next]
        self._next += 1
        ahead = len(self._workspaces)
        moved = [e if e >= 0 or e >= -self._made else e - ahead for e in events]
        yield Piece("step", [*self._workspaces, *moved] if first else moved)

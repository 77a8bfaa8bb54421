"""The events of one microbatch through one chunk, ready to be repeated for every microbatch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from primus_ext.trace import ChunkEvents


@dataclasses.dataclass(slots=True)
class Template:
    """One phase of a chunk; frees count allocations from 0, external tensors left out."""

    events: list[int] = dataclasses.field(default_factory=list)
    kept: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """Allocations that outlive the microbatch: the position among the events that frees what the
    one before left, and the number."""
    logged: list[int] = dataclasses.field(default_factory=list)
    """Numbers of the allocations that stay until the step ends."""
    first: int = 0
    """Number of its first allocation."""
    allocations: int = 0


class ChunkTemplate:
    """Events of a chunk, with the tensors that cross its boundaries taken out."""

    def __init__(self, events: ChunkEvents) -> None:
        self._received = {events.received, events.gradient} - {-1}
        # With outputs that are not deallocated, sending leaves the tensor to the graph.
        output = events.output if -events.output - 1 in events.forward else -1
        self._crossing = self._received | {output, events.input_gradient}
        self._kept = set(events.kept) - self._crossing
        self._logged = set(events.logged)
        self._slots: dict[int, int] = {}
        self._number = 0
        self._live: set[int] = set()
        self.forward = self._read(events.forward)
        self.backward = self._read(events.backward)
        self.backward.events += [-self._slots[number] - 1 for number in sorted(self._live)]
        self.receives = events.received >= 0, events.gradient >= 0
        self.output = self._slots.get(output, -1)
        self.input_gradient = self._slots.get(events.input_gradient, -1)

    def _read(self, phase: Sequence[int]) -> Template:
        slots = self._slots
        found = Template(first=len(slots))
        for event in phase:
            if event < 0:
                if -event - 1 not in self._crossing:
                    self._live.discard(-event - 1)
                    found.events.append(-slots[-event - 1] - 1)
                continue
            number, self._number = self._number, self._number + 1
            if number in self._received:
                continue
            slots[number] = len(slots)
            found.events.append(event)
            if number in self._kept:
                found.kept.append((len(found.events), slots[number]))
                found.events.append(0)
            elif number in self._logged:
                found.logged.append(slots[number])
            elif number not in self._crossing:
                self._live.add(number)
        found.allocations = len(slots) - found.first
        return found

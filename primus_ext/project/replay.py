"""The allocations and frees of a pipeline rank over whole steps, from those of one microbatch.

A microbatch's events are recorded once per model chunk; the schedule says when they happen, the
exchanges between stages what is allocated and freed beside them, and :class:`Held` what outlives
its use.  The result is one list of numbers a step: ``n >= 0`` allocates a tensor of kind
``n``, ``n < 0`` frees the ``-n - 1``-th allocation of the whole replay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Protocol

from primus_ext.project.held import Held
from primus_ext.project.programs import FORWARD, TRANSFER, Program, Shape, Transfers
from primus_ext.project.retained import COUNTER
from primus_ext.project.templates import ChunkTemplate, Template
from primus_ext.trace import AllocationKind, RankTrace

COMMUNICATION = "communication"
"""Phase of tensors that are received, or wait to be sent."""


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive events of a step."""

    name: str
    """E.g. ``forward 3`` or ``backward 3, chunk 1``; ``exchange`` and ``optimizer``."""
    events: list[int]


class Source(Protocol):
    """Produces the events of one rank: of the setup, then step by step."""

    kinds: list[AllocationKind]
    """What the events refer to."""

    def setup(self) -> Piece:
        """Building the model and the optimizer."""
        ...

    def step(self, *, first: bool) -> Iterator[Piece]:
        """All microbatches and the optimizer step."""
        ...


class Replay:
    """Produces the events of one rank, step by step."""

    def __init__(
        self, trace: RankTrace, rank: int, shape: Shape, program: Program, sizes: Sequence[int],
        workspaces: tuple[int, int] = (0, 0),
    ) -> None:
        """Nothing is allocated yet.

        Args:
            trace: Of the rank, with its events.
            rank: Pipeline rank.
            shape: The schedule.
            program: Of this rank.
            sizes: Bytes that cross each boundary between stages.
            workspaces: Bytes that libraries take in the first forward and in the first backward.

        Raises:
            ValueError: The trace has no events.
        """
        static = trace.static_events
        chunks = [ChunkTemplate(c.events) for c in trace.chunks if c.events is not None]
        if static is None or len(chunks) != len(trace.chunks):
            raise ValueError("the trace has no allocations to replay")
        self._static, self._chunks = static, chunks
        self._shape, self._rank, self._program, self._sizes = shape, rank, program, sizes
        self._of = Transfers(shape)
        self.kinds = list(trace.allocations)
        """What the events refer to: the trace's kinds, and one for each size of a transfer."""
        self._transfer_kind: dict[int, int] = {}
        for size in sizes:
            if size not in self._transfer_kind:
                self._transfer_kind[size] = len(self.kinds)
                self.kinds.append(AllocationKind(size, "", "", COMMUNICATION))
        self._left = {True: list(static.workspaces), False: list(static.late_workspaces)}
        for forward, size in zip((True, False), workspaces, strict=True):
            if size:
                self._left[forward].insert(0, len(self.kinds))
                self.kinds.append(AllocationKind(size, "cublas", "", "workspaces"))
        self._leftovers: dict[tuple[int, int], int] = {}
        self._logged: list[int] = []
        self._counter = len(self.kinds)
        self.kinds.append(AllocationKind(COUNTER, "total_num_tokens", "", COMMUNICATION))
        self._count = 0
        self._transfer_of: dict[int, int] = {}
        self._inputs: dict[tuple[int, int], int] = {}
        self._held = Held(shape)

    def setup(self) -> Piece:
        """Building the model and the optimizer."""
        self._count += sum(event >= 0 for event in self._static.setup)
        return Piece("setup", list(self._static.setup))

    def _workspaces(self, forward: bool) -> list[int]:
        """What the first forward or backward leaves behind, when that begins."""
        made, self._left[forward] = self._left[forward], []
        self._count += len(made)
        return made

    def step(self, *, first: bool) -> Iterator[Piece]:
        """All microbatches and the optimizer step.

        Args:
            first: Whether the optimizer makes its state in this step.
        """
        started: dict[tuple[int, int], int] = {}
        counter = self._count
        self._count += 1
        yield Piece("begin", [self._counter])
        for kind, chunk, detail in self._program:
            if kind == TRANSFER:
                yield Piece("exchange", self._exchange(chunk, detail))
                continue
            if kind == FORWARD:
                events = self._workspaces(True)
                started[chunk, detail] = self._count
                events += self._forward(chunk, detail)
            else:
                events = self._workspaces(False)
                events += self._backward(chunk, detail, started.pop((chunk, detail)))
            name = f"{'forward' if kind == FORWARD else 'backward'} {detail}"
            yield Piece(f"{name}, chunk {chunk}" if self._shape.vpp > 1 else name, events)
        events = [*self._held.end_of_step(), -counter - 1, *self._optimizer(first)]
        events += [-number - 1 for number in self._logged]
        self._logged = []
        yield Piece("optimizer", events)

    def _size(self, transfer: int) -> int:
        return self._sizes[self._of.boundary(transfer)]

    def _sends(self, transfer: int) -> bool:
        """Whether this rank is the sender."""
        boundary = self._of.boundary(transfer)
        return (boundary + (transfer & 1)) % self._shape.pp == self._rank

    def _exchange(self, posts: Sequence[int], waits: Sequence[int]) -> list[int]:
        """Receive buffers come with the post; what was sent can go when that is complete."""
        events = []
        for transfer in posts:
            if not self._sends(transfer):
                self._transfer_of[transfer] = self._count
                self._count += 1
                events.append(self._transfer_kind[self._size(transfer)])
        for transfer in waits:
            if self._sends(transfer):
                events += self._held.drop(self._transfer_of.pop(transfer, -1))
        return events

    def _forward(self, chunk: int, microbatch: int) -> list[int]:
        found, of = self._chunks[chunk], self._of
        events = self._held.forward_starts(chunk)
        arrived = self._transfer_of.pop(of.forward_in(self._rank, chunk, microbatch), -1)
        if not found.receives[0]:
            events += self._held.drop(arrived)
        else:
            self._inputs[chunk, microbatch] = arrived
        base = self._count
        made = [e if e >= 0 else e - base for e in found.forward.events]
        events += self._remembered(chunk, found.forward, made)
        leaving = of.forward_out(self._rank, chunk, microbatch)
        output = base + found.output if leaving >= 0 and found.output >= 0 else -1
        if output >= 0:
            self._transfer_of[leaving] = output
        return events + self._held.forward_ends(chunk, microbatch, output)

    def _backward(self, chunk: int, microbatch: int, ahead: int) -> list[int]:
        found, of, rank = self._chunks[chunk], self._of, self._rank
        events = self._held.backward_starts()
        gradient = self._transfer_of.pop(of.backward_in(rank, chunk, microbatch), -1)
        if not found.receives[1]:
            events += self._held.drop(gradient)
            gradient = -1
        split = found.forward.allocations
        back = self._count - split
        made = [
            e if e >= 0 else e - ahead if e >= -split else e - back
            for e in found.backward.events
        ]
        events += self._remembered(chunk, found.backward, made)
        leaving = of.backward_out(rank, chunk, microbatch)
        sent = back + found.input_gradient if leaving >= 0 and found.input_gradient >= 0 else -1
        if sent >= 0:
            self._transfer_of[leaving] = sent
        arrived = self._inputs.pop((chunk, microbatch), -1)
        return events + self._held.backward_ends(chunk, microbatch, arrived, gradient, sent)

    def _remembered(self, chunk: int, template: Template, events: list[int]) -> list[int]:
        """Free what the microbatch before left, when this one makes the same again."""
        base = self._count - template.first
        self._count += template.allocations
        missing = set()
        for position, slot in template.kept:
            before = self._leftovers.get((chunk, slot), -1)
            events[position] = -before - 1
            if before < 0:
                missing.add(position)
            self._leftovers[chunk, slot] = base + slot
        self._logged += [base + slot for slot in template.logged]
        return [e for i, e in enumerate(events) if i not in missing] if missing else events

    def _optimizer(self, first: bool) -> list[int]:
        """The optimizer step; what it leaves behind beside the optimizer's state is freed."""
        static, base = self._static, self._count
        events = static.step
        if first:
            made = sum(event >= 0 for event in static.setup)
            ahead = base - made
            found = [e if e >= 0 or e >= -made else e - ahead for e in static.first_step]
            self._count += sum(event >= 0 for event in found)
            return found
        live: dict[int, None] = {}
        number = 0
        for event in events:
            if event >= 0:
                live[number] = None
                number += 1
            else:
                del live[-event - 1]
        self._count += number
        found = [e if e >= 0 else e - base for e in events]
        return found + [-number - 1 - base for number in live]


def highest(replay: Source, steps: int) -> int:
    """The most bytes of tensors that are live at once in some steps, the first included."""
    live = peak = 0
    made: list[int] = []
    sizes = [kind.bytes for kind in replay.kinds]
    for piece in _pieces(replay, steps):
        for event in piece.events:
            if event >= 0:
                made.append(event)
                live += sizes[event]
                if live > peak:
                    peak = live
            else:
                live -= sizes[made[-event - 1]]
    return peak


def _pieces(replay: Source, steps: int) -> Iterator[Piece]:
    yield replay.setup()
    for number in range(steps):
        yield from replay.step(first=number == 0)

"""Live activations of a pipeline rank over its program, and the highest moment of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from primus_ext.project.programs import FORWARD, TRANSFER, Program, Shape, Transfers
from primus_ext.project.retained import Retained
from primus_ext.trace import ChunkMemory


@dataclasses.dataclass(frozen=True, slots=True)
class Moment:
    """What is live beside the static tensors, bytes."""

    activations: int
    """Held between forward and backward by all microbatches in flight, this one included."""
    temporaries: int
    """Above that, inside the forward or backward that runs."""
    communication: int
    """Received and not used yet, computed and not sent yet, or used and not forgotten yet."""
    microbatches: tuple[int, ...]
    """In flight, by chunk."""
    absent: int = 0
    """Of the static tensors, not there: copies of quantized weights for the backward."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.activations + self.temporaries + self.communication - self.absent


def steady(shape: Shape) -> Shape:
    """A schedule with fewer microbatches that reaches the same highest moment.

    What is in flight repeats with every group of microbatches once the warm-up is over; the last,
    incomplete group is kept.
    """
    group = shape.group_size if shape.vpp > 1 else 1
    enough = 5 * group if shape.vpp > 1 else 2 * shape.pp
    surplus = max(0, shape.microbatches - enough) // group * group
    return dataclasses.replace(shape, microbatches=shape.microbatches - surplus)


class _Live:
    """Counts bytes while a program is walked."""

    def __init__(self, shape: Shape, rank: int, sizes: Sequence[int]) -> None:
        self._transfers, self._rank, self._pp = Transfers(shape), rank, shape.pp
        self._sizes, self._interleaved = sizes, shape.vpp > 1
        self._kept_after_send = not shape.waits_for_sends and not self._interleaved
        self.buffers = 0

    def size(self, transfer: int) -> int:
        """Bytes of a transfer; 0 for none."""
        return self._sizes[self._transfers.boundary(transfer)] if transfer >= 0 else 0

    def _is_mine(self, transfer: int) -> bool:
        """Whether this rank is the sender."""
        boundary, backward = self._transfers.boundary(transfer), transfer & 1
        return (boundary + backward) % self._pp == self._rank

    def transfer(self, posts: Sequence[int], waits: Sequence[int]) -> None:
        """Receive buffers are allocated when posted; sent tensors are freed when complete.

        Interleaved, what is sent is freed when local variables forget it: see ``Retained``.
        """
        for t in posts:
            if not self._is_mine(t):
                self.buffers += self.size(t)
            elif self._kept_after_send and not t & 1 and t not in waits:
                self.buffers -= self.size(t)
        if self._interleaved:
            return
        for t in waits:
            if self._is_mine(t):
                self.buffers -= self.size(t)

    def work(self, forward: bool, chunk: int, microbatch: int) -> tuple[int, int]:
        """Bytes that a forward or backward takes over from the buffers and hands to them."""
        of = self._transfers
        if forward:
            taken = of.forward_in(self._rank, chunk, microbatch)
            made = of.forward_out(self._rank, chunk, microbatch)
        else:
            taken = of.backward_in(self._rank, chunk, microbatch)
            made = of.backward_out(self._rank, chunk, microbatch)
        return self.size(taken), 0 if self._interleaved else self.size(made)


def peak(
    shape: Shape,
    program: Program,
    rank: int,
    chunks: Sequence[ChunkMemory],
    sizes: Sequence[int],
    skipped: int = 0,
) -> Moment:
    """The highest moment of one pipeline rank.

    A chunk's own memory holds the activation that it received (forward) and the gradient that it
    received (backward), as the recording of one microbatch has it.

    Args:
        shape: The schedule.
        program: Of this rank.
        rank: Pipeline rank.
        chunks: Memory of one microbatch, by chunk.
        sizes: Bytes that cross each boundary between stages.
        skipped: Microbatches that :func:`steady` left out of ``shape``.
    """
    live = _Live(shape, rank, sizes)
    retained = Retained(shape, rank, sizes, chunks, skipped)
    counts = [0 for _ in chunks]
    incomplete: set[int] = set()  # chunks whose first backward has yet to run
    best = Moment(0, 0, 0, tuple(counts))
    for kind, first, second in program:
        if kind == TRANSFER:
            live.transfer(first, second)
            continue
        forward, memory = kind == FORWARD, chunks[first]
        taken, made = live.work(forward, first, second)
        live.buffers -= taken
        counts[first] += forward
        incomplete.discard(first) if second == 0 else None
        held = live.buffers + retained.during(forward, first, second)
        saved = sum(_saved(chunks[i], count) for i, count in enumerate(counts))
        top = _top(memory, forward, second == 0, counts[first] > 1, retained)
        # what this microbatch has in the sum: a new one comes last, the oldest goes first
        others = _saved(memory, counts[first] - 1)
        own = memory.saved_bytes if forward else _saved(memory, counts[first]) - others
        absent = sum(_absent(chunks[chunk]) for chunk in incomplete)
        if second == 0:  # its own are in its highest point
            absent += min(_absent(memory), max(0, own - top))
        moment = Moment(saved, max(0, top - own), held, tuple(counts), absent)
        if moment.total > best.total:
            best = moment
        retained.after(forward, first, second)
        if forward and second == 0:
            incomplete.add(first)
        counts[first] -= not forward
        live.buffers += made
    return best


def _absent(memory: ChunkMemory) -> int:
    return memory.first.absent_bytes if memory.first else 0


def _saved(memory: ChunkMemory, count: int) -> int:
    """Bytes of ``count`` microbatches in flight in one chunk."""
    older = memory.saved_bytes
    if memory.inflight_saved_bytes is not None:
        older = memory.inflight_saved_bytes
    return memory.saved_bytes + (count - 1) * older if count else 0


def _top(memory: ChunkMemory, forward: bool, first: bool, several: bool, retained: Retained) -> int:
    """Highest point of the work on one microbatch above the others in its chunk.

    Args:
        memory: Of a microbatch.
        forward: Whether it is the forward.
        first: Whether the microbatch is the first of the step.
        several: Whether others are in flight in the chunk.
        retained: What the work finds there.
    """
    apart = memory.first if first else None
    after = memory.after_backward if retained.after_backward else None
    if forward:
        if apart is not None:
            return apart.forward_peak_bytes
        found = memory.inflight_forward_peak_bytes if several else None
        if several and after is not None:
            found = after.forward_peak_bytes
        elif not several and retained.after_another:
            found = memory.forward_peak_after_bytes
            if retained.beside_output and memory.forward_peak_beside_bytes is not None:
                found = memory.forward_peak_beside_bytes
        return memory.forward_peak_bytes if found is None else found
    found = memory.inflight_backward_peak_bytes if several else None
    if after is not None:
        found = after.backward_peak_bytes if several else after.last_backward_peak_bytes
    if apart is not None:
        its = apart.inflight_backward_peak_bytes if several else apart.backward_peak_bytes
        found = found if its is None else its
    return memory.backward_peak_bytes if found is None else found

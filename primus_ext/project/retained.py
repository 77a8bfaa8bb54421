"""Tensors that outlive their use because Megatron's schedule or a model chunk still refers to them.

Megatron-core 0.19, ``pipeline_parallel/schedules.py``, local variables of the loops:

- the gradient of the input that the last backward returned, until the next backward is through;
- without interleaving, the number of tokens of the last forward; and until the next forward is
  through, what is left of the output of the last backward and its graph keep, its gradient, and
  the stage's input;
- interleaved, the output just made until the next forward (it is sent meanwhile), after that what
  took its place, and with overlapped exchanges the input that the last warm-up exchange received,
  to the end.

A model chunk keeps the last input that it was given (``set_input_tensor``) until it is given
another.  Whatever keeps an input keeps its gradient too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from primus_ext.project import interleaved
from primus_ext.project.programs import Shape
from primus_ext.trace import ChunkMemory

COUNTER = 4
"""Bytes of the int32 in which the schedule adds up tokens (``total_num_tokens``)."""

Work = tuple[int, int]
"""A chunk and a microbatch."""


@dataclasses.dataclass(slots=True)
class Retained:
    """Follows the program of one rank; sizes in bytes."""

    shape: Shape
    rank: int
    sizes: Sequence[int]
    """Bytes that cross each boundary between stages."""
    chunks: Sequence[ChunkMemory]
    """Memory of one microbatch, by chunk."""
    skipped: int = 0
    """Microbatches in the steady part of the schedule that are not walked through."""
    after_another: bool = False
    """Whether the forward that runs finds leftovers of a finished microbatch in its chunk."""
    after_backward: bool = False
    """Whether the work that runs finds those of the backward before it, others in flight then."""
    beside_output: bool = False
    """Whether the forward that runs finds the output of the last backward still referred to."""
    _logged: int = 0
    """Losses of the forwards so far."""
    _latest: dict[int, int] = dataclasses.field(default_factory=dict)
    """Microbatch of the last forward, by chunk."""
    _finished: set[int] = dataclasses.field(default_factory=set)
    """Chunks whose last input went through its backward already."""
    _turned: set[int] = dataclasses.field(default_factory=set)
    """Chunks whose last work was a backward, with later microbatches in flight."""
    _last_backward: Work | None = None
    _newest: Work | None = None
    """The last forward."""
    _after_forward: bool = False
    """Whether the work before this one was a forward."""
    _warm: Work | None = None
    """Whose input the last warm-up exchange received, once it went through its backward."""

    def __post_init__(self) -> None:
        # A step begins with what the chunks kept from the step before.
        self._finished = set(range(self.shape.vpp))
        self._latest = dict.fromkeys(range(self.shape.vpp), -1)

    def _input(self, chunk: int) -> int:
        stage = chunk * self.shape.pp + self.rank
        return self.sizes[stage - 1] if stage > 0 else 0

    def _output(self, chunk: int) -> int:
        stage = chunk * self.shape.pp + self.rank
        return self.sizes[stage] if stage < self.shape.stages - 1 else 0

    def during(self, forward: bool, chunk: int, microbatch: int) -> int:
        """Bytes kept while a forward or backward runs, beside what that work itself needs."""
        self.after_backward = chunk in self._turned
        self._turned.discard(chunk)
        self.beside_output = self.shape.vpp == 1 and self._last_backward is not None
        if forward:
            self._begin(chunk, microbatch)
        kept = COUNTER + self._logged
        kept += sum(self.chunks[i].leftover_bytes for i in self._finished)
        kept += sum(self._after_backward(i) for i in self._turned)
        if self.shape.vpp > 1:
            return kept + self._of_interleaved(forward)
        return kept + self._of_1f1b(forward)

    def _after_backward(self, chunk: int) -> int:
        found = self.chunks[chunk].after_backward
        return found.leftover_bytes if found else 0

    def _begin(self, chunk: int, microbatch: int) -> None:
        self.after_another = chunk in self._finished
        self._latest[chunk] = microbatch
        self._finished.discard(chunk)
        if chunk == 0 and microbatch == repeats_from(self.shape):
            self._logged += self.skipped * sum(memory.logged_bytes for memory in self.chunks)

    def _stub(self, chunk: int) -> int:
        """What is left of an output after its backward."""
        return self.chunks[chunk].stub_bytes + self.chunks[chunk].graph_bytes

    def _of_1f1b(self, forward: bool) -> int:
        tokens = self.chunks[0].counted_bytes if self._newest is not None else 0
        if self._last_backward is None:
            return tokens
        gradient = received = self._input(0)
        if not forward:
            return tokens + gradient
        return tokens + gradient + received + self._output(0) + self._stub(0)

    def _of_interleaved(self, forward: bool) -> int:
        """Each tensor once, whoever keeps it."""
        inputs = {(chunk, self._latest[chunk]) for chunk in self._finished}
        inputs |= {self._warm} if self._warm else set()
        gradients = inputs | ({self._last_backward} if self._last_backward else set())
        kept = sum(self._input(chunk) for chunk, _ in (*inputs, *gradients))
        if self._newest is None or not self._output(chunk := self._newest[0]):
            return kept
        stub = self.chunks[chunk].stub_bytes
        if not forward and self._after_forward and self._has_steady_part():
            return kept + self._output(chunk) - stub
        backward_has_passed = chunk in self._finished
        return kept + (self._stub(chunk) if backward_has_passed else 0)

    def _has_steady_part(self) -> bool:
        """Whether forwards and backwards alternate; what a warm-up makes is sent and freed."""
        forwards = self.shape.microbatches * self.shape.vpp
        return interleaved.warmup_forwards(self.shape, self.rank) < forwards

    def after(self, forward: bool, chunk: int, microbatch: int) -> None:
        """The work is done."""
        self._after_forward = forward
        if forward:
            self._newest = (chunk, microbatch)
            self._logged += self.chunks[chunk].logged_bytes
            return
        self._last_backward = (chunk, microbatch)
        if self._latest[chunk] == microbatch:
            self._finished.add(chunk)
        else:
            self._turned.add(chunk)
        if (chunk, microbatch) == last_of_warm_up(self.shape, self.rank):
            self._warm = (chunk, microbatch)

    def at_the_end(self) -> int:
        """Bytes kept when the optimizer steps: losses, every chunk's last input, its gradient."""
        losses = sum(memory.logged_bytes for memory in self.chunks)
        leftovers = sum(memory.leftover_bytes for memory in self.chunks)
        microbatches = self.shape.microbatches + self.skipped
        inputs = 2 * sum(self._input(chunk) for chunk in range(self.shape.vpp))
        return inputs + leftovers + microbatches * losses


def repeats_from(shape: Shape) -> int:
    """Microbatch from which on the schedule is in its steady part for certain."""
    return 2 * shape.group_size if shape.vpp > 1 else shape.pp


def last_of_warm_up(shape: Shape, rank: int) -> Work | None:
    """Whose input the last exchange of the warm-up receives and a local variable keeps."""
    if shape.vpp == 1 or not shape.overlap_p2p:
        return None
    warm = interleaved.warmup_forwards(shape, rank)
    if not 0 < warm < shape.microbatches * shape.vpp:
        return None
    return interleaved.received_after(shape, rank, warm - 1)

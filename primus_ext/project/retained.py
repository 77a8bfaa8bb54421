"""Tensors that outlive their use because Megatron's schedule still refers to them.

Megatron-core 0.19, ``pipeline_parallel/schedules.py``: the loops keep the gradients of the last
backward in local variables until the next one; the output of the last backward, whose graph holds
the stage's input, until the next forward is through.  A model chunk keeps the last input that it
was given (``set_input_tensor``), and with it that input's gradient, until it is given another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from primus_ext.project.programs import Shape
from primus_ext.trace import ChunkMemory

COUNTER = 4
"""Bytes of the int32 in which the schedule adds up tokens (``total_num_tokens``)."""


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
    _logged: int = 0
    """Losses of the forwards so far."""
    _latest: dict[int, int] = dataclasses.field(default_factory=dict)
    """Microbatch of the last forward, by chunk."""
    _finished: set[int] = dataclasses.field(default_factory=set)
    """Chunks whose last input went through its backward already."""
    _last_backward: int | None = None
    """Chunk of the last backward."""
    _output_kept: int = 0
    """The output just made: with overlapped exchanges it is freed before the next forward."""

    def __post_init__(self) -> None:
        # A step begins with what the chunks kept from the step before.
        self._finished = set(range(self.shape.vpp))

    def _input(self, chunk: int) -> int:
        stage = chunk * self.shape.pp + self.rank
        return self.sizes[stage - 1] if stage > 0 else 0

    def _output(self, chunk: int) -> int:
        stage = chunk * self.shape.pp + self.rank
        return self.sizes[stage] if stage < self.shape.stages - 1 else 0

    def during(self, forward: bool, chunk: int, microbatch: int) -> int:
        """Bytes kept while a forward or backward runs, beside what that work itself needs."""
        if forward:
            self._begin(chunk, microbatch)
        kept = COUNTER + self._logged + self._leftovers()
        kept += self._kept_by_chunks() if self.shape.vpp > 1 else 0
        if self.shape.overlap_p2p and not forward:
            kept += self._output_kept
        last = self._last_backward
        if last is not None:
            if last not in self._finished or self.shape.vpp == 1:
                kept += self._input(last)  # its gradient
            if forward and self.shape.vpp == 1:
                kept += self._input(last) + self._output(last) + self.chunks[last].counted_bytes
        return kept

    def _begin(self, chunk: int, microbatch: int) -> None:
        self.after_another = chunk in self._finished
        self._latest[chunk] = microbatch
        self._finished.discard(chunk)
        if chunk == 0 and microbatch == repeats_from(self.shape):
            self._logged += self.skipped * sum(memory.logged_bytes for memory in self.chunks)

    def after(self, forward: bool, chunk: int, microbatch: int) -> None:
        """The work is done."""
        self._output_kept = self._output(chunk) if forward else 0
        if forward:
            self._logged += self.chunks[chunk].logged_bytes
            return
        self._last_backward = chunk
        if self._latest[chunk] == microbatch:
            self._finished.add(chunk)

    def _leftovers(self) -> int:
        return sum(self.chunks[chunk].leftover_bytes for chunk in self._finished)

    def _kept_by_chunks(self) -> int:
        """Inputs, and their gradients, that chunks keep after their backward."""
        return sum(2 * self._input(chunk) for chunk in self._finished)

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

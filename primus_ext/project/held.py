"""Which tensors between pipeline stages are still referred to, and when they are freed.

:mod:`primus_ext.project.retained` says how many bytes that makes; here it is single allocations.
"""

from __future__ import annotations

from primus_ext.project.programs import Shape


class Held:
    """Counts references to allocations by number; -1 stands for none.

    Every method returns the frees that follow, as ``-n - 1`` for the ``n``-th allocation.
    """

    def __init__(self, shape: Shape) -> None:
        self._pipeline = shape.vpp == 1
        self._late = shape.overlap_p2p
        self._references: dict[int, int] = {}
        self._last: list[int] = []
        """Input and received gradient of the last backward (not interleaved)."""
        self._gradient = -1
        """Of the input, made by the last backward."""
        self._output = -1
        """Just made; an overlapped exchange frees it after the next backward."""
        self._latest: dict[int, int] = {}
        """Microbatch of the last forward, by chunk."""
        self._by_chunk: dict[int, list[int]] = {}
        """A chunk's last input, and its gradient."""

    def _hold(self, number: int) -> int:
        if number >= 0:
            self._references[number] = self._references.get(number, 0) + 1
        return number

    def drop(self, *numbers: int) -> list[int]:
        """One reference to each of some allocations is gone."""
        freed = []
        for number in numbers:
            left = self._references.get(number, 1) - 1
            if left > 0:
                self._references[number] = left
            elif number >= 0:
                self._references.pop(number, None)
                freed.append(-number - 1)
        return freed

    def forward_starts(self, chunk: int) -> list[int]:
        """A chunk is given another input."""
        freed = self.drop(*self._by_chunk.pop(chunk, ()), self._output)
        self._output = -1
        return freed

    def forward_ends(self, chunk: int, microbatch: int, output: int) -> list[int]:
        """The output, if any, waits to be sent."""
        self._latest[chunk] = microbatch
        self._hold(output)
        self._output = self._hold(output) if self._late else -1
        return self._forget_last()

    def backward_starts(self) -> list[int]:
        """What the last backward worked on is not needed any more."""
        return self._forget_last()

    def backward_ends(
        self, chunk: int, microbatch: int, arrived: int, gradient: int, sent: int
    ) -> list[int]:
        """The graph is gone.

        Args:
            chunk: Its model chunk.
            microbatch: Its microbatch.
            arrived: The input from the stage before.
            gradient: The gradient from the stage after.
            sent: The input's gradient, which waits to be sent.
        """
        self._hold(sent)
        for number in (arrived, gradient):
            self._hold(number)
        if self._latest[chunk] == microbatch:
            self._by_chunk[chunk] = [self._hold(arrived), self._hold(sent)]
        freed = self.drop(self._gradient, self._output)
        self._gradient, self._output = self._hold(sent), -1
        if self._pipeline:
            self._last = [arrived, gradient]
            return freed
        return freed + self.drop(arrived, gradient)

    def end_of_step(self) -> list[int]:
        """The schedule returns; the chunks keep what they were given last."""
        freed = self._forget_last() + self.drop(self._gradient, self._output)
        self._gradient = self._output = -1
        return freed

    def _forget_last(self) -> list[int]:
        last, self._last = self._last, []
        return self.drop(*last)

"""DualPipe-V: a V of two chunks, with a forward beside a backward whenever there are both.

DeepSeek's DualPipe (arXiv 2412.19437, section 3.2.1) with its two directions folded into one, as
in their library (github.com/deepseek-ai/DualPipe, ``dualpipev.py``): eight phases, the names of
which are kept here.
"""

from __future__ import annotations

from primus_ext.project.programs import (
    BACKWARD,
    FORWARD,
    INPUT,
    PAIR,
    WEIGHT,
    Item,
    Program,
    ScheduleError,
    Shape,
    asynchronous,
)


class _Work:
    """Work of one rank; put-off weight gradients are a queue."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._forwards, self._backwards = [0, 0], [0, 0]
        self._put_off: list[tuple[int, int]] = []

    def _forward(self, chunk: int) -> tuple[int, int]:
        self._forwards[chunk] += 1
        return chunk, self._forwards[chunk] - 1

    def _backward(self, chunk: int) -> tuple[int, int]:
        self._backwards[chunk] += 1
        return chunk, self._backwards[chunk] - 1

    def forward(self, chunk: int) -> None:
        self.items.append((FORWARD, *self._forward(chunk)))

    def backward(self, chunk: int, split: bool = False) -> None:
        where = self._backward(chunk)
        self.items.append((INPUT if split else BACKWARD, *where))
        if split:
            self._put_off.append(where)

    def both(self, ahead: int, back: int) -> None:
        """A forward of one chunk beside a backward of the other."""
        self.items.append((PAIR, self._forward(ahead), self._backward(back)))

    def weight(self) -> None:
        """The oldest weight gradients that were put off."""
        self.items.append((WEIGHT, *self._put_off.pop(0)))


def dualpipe_v(shape: Shape, rank: int) -> Program:
    """The program of one pipeline rank.

    Raises:
        ScheduleError: There are too few microbatches.
    """
    pp, total = shape.pp, shape.microbatches
    if total < 2 * pp:
        raise ScheduleError(
            f"{total} microbatches are not legal with the schedule dualpipe-v: it needs at least "
            f"2 * pp = {2 * pp}"
        )
    work, behind = _Work(), pp - rank - 1
    for _ in range(2 * behind):  # nF0
        work.forward(0)
    for _ in range(rank + 1):  # nF0F1
        work.forward(0)
        work.forward(1)
    for _ in range(behind):  # nB1W1F1
        work.backward(1, split=True)
        work.weight()
        work.forward(1)
    for i in range(total - 2 * pp + rank + 1):  # nF0B1F1B0
        if i == 0 and rank == pp - 1:
            work.forward(0)
            work.backward(1)
        else:
            work.both(0, 1)
        work.both(1, 0)
    for _ in range(behind):  # nB1F1B0
        work.backward(1)
        work.both(1, 0)
    for i in range(2 * (rank + 1)):  # nB1B0, the second half with weight gradients put off
        work.backward(1 - i % 2, split=i >= rank + 1)
    for _ in range(behind):  # nWB0
        work.weight()
        work.backward(0, split=True)
    for _ in range(rank + 1):  # nW
        work.weight()
    return asynchronous(shape, rank, work.items)

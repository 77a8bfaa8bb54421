"""ZBV by a fixed pattern: two chunks a rank, the second one running back through the ranks.

The V-shaped zero-bubble schedule of Qi et al. 2024 (arXiv 2401.10241, section 6) in the fixed
form that Primus (``pp_algorithm: zbv-formatted``) and PyTorch (``ScheduleZBVZeroBubble``) run: as
many forwards of chunk 0 as chunk 1 needs to come back, then one forward and one backward of each
chunk in turn, and weight gradients put off only while the pipeline drains.
"""

from __future__ import annotations

from primus_ext.project.programs import (
    FORWARD,
    INPUT,
    WEIGHT,
    Item,
    Program,
    ScheduleError,
    Shape,
    asynchronous,
)


class _Work:
    """Work of one rank, its microbatches counted by chunk."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.done = {kind: [0, 0] for kind in (FORWARD, INPUT, WEIGHT)}

    def add(self, kind: int, chunk: int) -> None:
        """The next microbatch."""
        self.items.append((kind, chunk, self.done[kind][chunk]))
        self.done[kind][chunk] += 1

    def whole(self, chunk: int) -> None:
        """A backward with its weight gradients."""
        self.add(INPUT, chunk)
        self.add(WEIGHT, chunk)


def zbv_formatted(shape: Shape, rank: int) -> Program:
    """The program of one pipeline rank.

    Raises:
        ScheduleError: There are too few microbatches to fill the V.
    """
    pp, total = shape.pp, shape.microbatches
    if total < 2 * pp - 1:
        raise ScheduleError(
            f"{total} microbatches are not legal with the schedule zbv: it starts with "
            f"2 * pp - 1 = {2 * pp - 1} forwards"
        )
    work = _Work()
    for _ in range(2 * (pp - rank) - 1):
        work.add(FORWARD, 0)
    for _ in range(rank):
        work.add(FORWARD, 1)
        work.add(FORWARD, 0)
    for _ in range(pp - rank):
        work.add(FORWARD, 1)
        work.whole(1)
    forwards, inputs, weights = (work.done[kind] for kind in (FORWARD, INPUT, WEIGHT))
    while forwards[1] < total:
        if forwards[0] < total:
            work.add(FORWARD, 0)
        work.whole(0)
        work.add(FORWARD, 1)
        work.whole(1)
    for _ in range(rank):
        work.add(INPUT, 0)
        work.add(INPUT, 1)
    while inputs[0] < total:
        work.add(INPUT, 0)
        work.add(WEIGHT, 0)
    for chunk in (1, 0):
        while weights[chunk] < total:
            work.add(WEIGHT, chunk)
    return asynchronous(shape, rank, work.items)

"""Zero bubble with one chunk a rank (Qi et al. 2024, arXiv 2401.10241, ZB-H1).

A backward computes the gradient of its input first, which is what the stage before waits for, and
leaves the weight gradients for when there is nothing else to do.  Rank ``r`` puts them off by
``r`` microbatches: so every rank holds as many microbatches as the first one of 1F1B does.
"""

from __future__ import annotations

from primus_ext.project.programs import FORWARD, INPUT, WEIGHT, Item, Program, Shape, asynchronous


def zero_bubble(shape: Shape, rank: int) -> Program:
    """The program of one pipeline rank."""
    total = shape.microbatches
    warmup = min(shape.pp - rank - 1, total)
    work: list[Item] = [(FORWARD, 0, i) for i in range(warmup)]
    for i in range(total):
        if warmup + i < total:
            work.append((FORWARD, 0, warmup + i))
        work.append((INPUT, 0, i))
        if i >= rank:
            work.append((WEIGHT, 0, i - rank))
    work += [(WEIGHT, 0, i) for i in range(max(0, total - rank), total)]
    return asynchronous(shape, rank, work)

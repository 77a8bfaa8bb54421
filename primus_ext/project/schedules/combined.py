"""Megatron's combined 1F1B (``overlap_moe_expert_parallel_comm``).

The forward of one microbatch runs layer by layer beside the backward of another, so that each
one's tokens travel while the other computes.  Interleaved, it has one more forward before the
first backward than the plain schedule, so that the two never depend on each other; without a
pipeline the microbatches follow each other with the backward one behind
(megatron-core 0.19, ``pipeline_parallel/combined_1f1b.py`` and ``schedules.py``).
"""

from __future__ import annotations

import dataclasses

from primus_ext.project.interleaved import InterleavedRank, warmup_forwards
from primus_ext.project.programs import (
    BACKWARD,
    FORWARD,
    PAIR,
    Item,
    Program,
    ScheduleError,
    Shape,
    asynchronous,
)


def combined(shape: Shape, rank: int) -> Program:
    """The program of one pipeline rank.

    Raises:
        ScheduleError: Megatron refuses the shape.
    """
    if shape.pp == 1:
        return _alone(shape.microbatches)
    if shape.vpp == 1:
        raise ScheduleError(
            "vpp=1 is not legal with the schedule combined-1f1b: with pp > 1 it needs several "
            "model chunks on each rank"
        )
    mine = InterleavedRank(shape, rank)
    warmup = warmup_forwards(dataclasses.replace(shape, early=1), rank)
    steady = mine.total - warmup
    work: list[Item] = [mine.forward(k) for k in range(warmup)]
    for k in range(steady):
        ahead, back = mine.forward(k + warmup), mine.backward(k)
        work.append((PAIR, ahead[1:], back[1:]))
    work += [mine.backward(k) for k in range(steady, mine.total)]
    return asynchronous(shape, rank, work)


def _alone(microbatches: int) -> Program:
    pairs: Program = [(PAIR, (0, i + 1), (0, i)) for i in range(microbatches - 1)]
    return [(FORWARD, 0, 0), *pairs, (BACKWARD, 0, microbatches - 1)]

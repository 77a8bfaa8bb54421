"""Memory of a schedule that the program does not run: by counting what is in flight.

The program's own schedule is answered to the byte (:mod:`primus_ext.project.inflight`).  Another
one deletes and keeps tensors as its framework does, which nobody has recorded; here a chunk holds
what was saved from its forward to its input gradient, and from there to its weight gradients the
operands of those.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from primus_ext.project import inflight
from primus_ext.project.parts import Part
from primus_ext.project.programs import (
    BACKWARD,
    FORWARD,
    INPUT,
    PAIR,
    TRANSFER,
    WEIGHT,
    Program,
    Shape,
)
from primus_ext.project.rescheduled import Rescheduled
from primus_ext.project.schedules import own
from primus_ext.trace import RankTrace

EVIDENCE = (
    "estimate: chunks in flight times saved bytes, operands of weight gradients that are put off, "
    "and the highest moment of a recorded chunk"
)


@dataclasses.dataclass(frozen=True, slots=True)
class _Chunk:
    """Bytes of one microbatch in one chunk."""

    saved: float
    put_off: float
    transient: float


def in_flight(program: Program, chunks: int) -> float:
    """Most microbatches that a rank holds between a forward and its weight gradients."""
    live = most = 0
    for kind, _, _ in program:
        live += kind in (FORWARD, PAIR)
        most = max(most, live)
        live -= kind in (BACKWARD, WEIGHT, PAIR)
    return most / chunks


def enough(shape: Shape) -> Shape:
    """A schedule with fewer microbatches that holds as much."""
    if own(shape).repeats_memory:
        return inflight.steady(shape)
    return shape.with_microbatches(min(shape.microbatches, 8 * shape.pp))


def peaks(
    job: Rescheduled, traces: Sequence[RankTrace], order: Sequence[Program]
) -> tuple[int, ...]:
    """Live tensor bytes of every pipeline rank at its highest moment.

    Args:
        job: Under the schedule.
        traces: Of every pipeline rank, for the workspaces.
        order: The program of every rank.
    """
    found = []
    for rank, program in enumerate(order):
        parts = job.chunks[rank]
        static = sum(part.static for chunk in parts for part in chunk)
        moving = _highest(program, [_chunk(chunk) for chunk in parts])
        found.append(round(static + traces[rank].static.workspaces + moving))
    return tuple(found)


def _chunk(parts: Sequence[Part]) -> _Chunk:
    return _Chunk(
        sum(part.saved for part in parts),
        sum(part.put_off for part in parts),
        max((part.transient for part in parts), default=0.0),
    )


def _highest(program: Program, chunks: Sequence[_Chunk]) -> float:
    live = best = 0.0
    for kind, first, second in program:
        if kind == TRANSFER:
            continue
        ahead = first[0] if kind == PAIR else first
        back = second[0] if kind == PAIR else first
        if kind in (FORWARD, PAIR):
            live += chunks[ahead].saved
        above = 0.0 if kind == WEIGHT else max(chunks[ahead].transient, chunks[back].transient)
        if kind == INPUT:
            above = max(above, chunks[back].put_off - chunks[back].saved)
        best = max(best, live + above)
        if kind in (BACKWARD, PAIR):
            live -= chunks[back].saved
        elif kind == INPUT:
            live += chunks[back].put_off - chunks[back].saved
        elif kind == WEIGHT:
            live -= chunks[back].put_off
    return best

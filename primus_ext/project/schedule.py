"""Event simulation of a pipeline schedule: who is busy when, and what waits for what."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from primus_ext.project.compiled import Code, Durations, compiled, run
from primus_ext.project.programs import Program, Shape
from primus_ext.project.schedules import LONG, programs

__all__ = ["LONG", "Timeline", "code_of", "programs", "simulate", "simulate_repeating", "timed"]

_SMALL, _KEPT = 1_000, 50_000
"""Pieces of work up to which many compiled schedules are kept (0.4 MB each), or a few (20 MB)."""


def _compiled(shape: Shape) -> Code:
    return compiled(shape, programs(shape))


_small = functools.lru_cache(maxsize=128)(_compiled)
_large = functools.lru_cache(maxsize=16)(_compiled)


def code_of(shape: Shape) -> Code:
    """The compiled schedule; that of a shape that was asked for before is still there.

    Raises:
        ScheduleError: The framework refuses the shape.
    """
    work = shape.stages * shape.microbatches
    if work > _KEPT:
        return _compiled(shape)
    return (_small if work <= _SMALL else _large)(shape)


@dataclasses.dataclass(frozen=True, slots=True)
class Timeline:
    """When the ranks of one pipeline work.  Seconds; lists are by pipeline rank."""

    makespan: float
    """Until the last rank has finished its last backward."""
    finish: list[float]
    busy: list[float]
    """In forwards and backwards."""
    p2p: list[float]
    """Waiting for a transfer that is on its way; waiting for a peer is idle time."""
    backward_ends: list[list[float]]
    """End of each backward, in the rank's own order; where it is split, of what computes the
    weight gradients."""

    def idle(self, rank: int) -> float:
        """Seconds of the makespan in which a rank neither works nor waits for a transfer."""
        return self.makespan - self.busy[rank] - self.p2p[rank]


def simulate(
    shape: Shape,
    programs: Sequence[Program],
    forward: Sequence[Sequence[float]],
    backward: Sequence[Sequence[float]],
    boundary: Sequence[float],
    first_forward: Sequence[Sequence[float]] | None = None,
) -> Timeline:
    """Run the programs of all pipeline ranks against each other.

    A transfer starts when both sides have reached it and takes the seconds of its boundary.

    Args:
        shape: The schedule.
        programs: Of every pipeline rank (:func:`programs`).
        forward: Seconds of a forward, by rank and chunk.
        backward: Seconds of a backward, by rank and chunk.
        boundary: Seconds of a transfer across each boundary between stages.
        first_forward: Extra seconds of the first microbatch's forward, by rank and chunk (it
            waits for gathered parameters).

    Raises:
        RuntimeError: The programs wait for each other for ever.
    """
    durations = Durations(
        forward=forward, backward=backward, boundary=boundary, first_forward=first_forward
    )
    return timed(compiled(shape, programs), durations)


def timed(code: Code, durations: Durations) -> Timeline:
    """When the ranks work, with these durations."""
    finish, p2p, ends = run(code, durations)
    busy = [0.0 for _ in finish]
    for work, count, seconds in zip(
        code.works, code.counts, code.seconds(durations), strict=True
    ):
        busy[work[0]] += count * seconds
    return Timeline(max(finish), finish, busy, p2p, ends)


def simulate_repeating(
    shape: Shape,
    forward: Sequence[Sequence[float]],
    backward: Sequence[Sequence[float]],
    boundary: Sequence[float],
    first_forward: Sequence[Sequence[float]] | None = None,
    weight: Sequence[Sequence[float]] | None = None,
    pair: Sequence[Sequence[Sequence[float]]] | None = None,
    long: int = LONG,
) -> tuple[Code, Timeline]:
    """As :func:`simulate`, for any number of microbatches in bounded time.

    Once the warm-up is over a schedule repeats with every group of microbatches.  Three shorter
    schedules, one span of groups apart, are simulated; if the two spans take the same time, what is
    left out takes as long for each of its groups, and the end is moved by that.  Otherwise all
    microbatches are simulated.

    Args:
        shape: The schedule.
        forward: Seconds of a forward, by rank and chunk.
        backward: Seconds of a backward, by rank and chunk.
        boundary: Seconds of a transfer across each boundary between stages.
        first_forward: Extra seconds of the first microbatch's forward.
        weight: Seconds of a backward that compute weight gradients.
        pair: As :attr:`primus_ext.project.compiled.Durations.pair`.
        long: Microbatches for each stage after which the schedule is taken to repeat itself.

    Returns:
        The schedule that was simulated (its shape may have fewer microbatches), and its timeline
        with the end where that of ``shape`` is.
    """
    durations = Durations(
        forward=forward, backward=backward, boundary=boundary, first_forward=first_forward,
        weight=weight, pair=pair,
    )  # fmt: skip
    group = shape.group_size if shape.vpp > 1 and not shape.folded else 1
    span = -(-long * shape.pp // 4 // group) * group
    left_out = (shape.microbatches - long * shape.pp - 2 * span) // group
    if left_out <= 0:
        code = code_of(shape)
        return code, timed(code, durations)
    most = shape.microbatches - left_out * group
    shapes = [dataclasses.replace(shape, microbatches=most - i * span) for i in (2, 1, 0)]
    codes = [code_of(s) for s in shapes]
    runs = [timed(code, durations) for code in codes]
    before, after = (b.makespan - a.makespan for a, b in zip(runs, runs[1:], strict=False))
    if abs(after - before) > 1e-9 * after:
        code = code_of(shape)
        return code, timed(code, durations)
    repeats = left_out * group / span
    return codes[2], _later(runs[1], runs[2], repeats)


def _later(earlier: Timeline, timeline: Timeline, repeats: float) -> Timeline:
    """``timeline`` with its end moved ``repeats`` times by what separates it from ``earlier``."""

    def moved(name: str) -> list[float]:
        pairs = zip(getattr(earlier, name), getattr(timeline, name), strict=True)
        return [b + repeats * (b - a) for a, b in pairs]

    shift = repeats * (timeline.makespan - earlier.makespan)
    return Timeline(
        makespan=timeline.makespan + shift,
        finish=moved("finish"),
        busy=moved("busy"),
        p2p=moved("p2p"),
        backward_ends=[[end + shift for end in ends] for ends in timeline.backward_ends],
    )

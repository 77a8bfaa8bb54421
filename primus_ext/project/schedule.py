"""Event simulation of a pipeline schedule: who is busy when, and what waits for what."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from primus_ext.project.interleaved import interleaved
from primus_ext.project.programs import (
    BACKWARD,
    FORWARD,
    Program,
    Shape,
    Transfers,
    one_f_one_b,
)


def programs(shape: Shape) -> list[Program]:
    """The program of every pipeline rank.

    Raises:
        ScheduleError: Megatron refuses the shape.
    """
    shape.check()
    build = one_f_one_b if shape.vpp == 1 else interleaved
    return [build(shape, rank) for rank in range(shape.pp)]


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
    """End of each backward, in the rank's own order."""

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
    run = _Run(shape, programs, forward, backward, boundary, first_forward)
    return run.all()


LONG = 32
"""Microbatches for each pipeline stage after which a schedule is taken to repeat itself."""


def simulate_repeating(
    shape: Shape,
    forward: Sequence[Sequence[float]],
    backward: Sequence[Sequence[float]],
    boundary: Sequence[float],
    first_forward: Sequence[Sequence[float]] | None = None,
) -> tuple[Shape, Timeline]:
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

    Returns:
        The schedule that was simulated, and its timeline with the end where that of ``shape`` is.
    """
    durations = (forward, backward, boundary, first_forward)
    group = shape.group_size if shape.vpp > 1 else 1
    span = -(-LONG * shape.pp // 4 // group) * group
    left_out = (shape.microbatches - LONG * shape.pp - 2 * span) // group
    if left_out <= 0:
        return shape, simulate(shape, programs(shape), *durations)
    most = shape.microbatches - left_out * group
    shapes = [dataclasses.replace(shape, microbatches=most - i * span) for i in (2, 1, 0)]
    runs = [simulate(s, programs(s), *durations) for s in shapes]
    before, after = (b.makespan - a.makespan for a, b in zip(runs, runs[1:], strict=False))
    if abs(after - before) > 1e-9 * after:
        return shape, simulate(shape, programs(shape), *durations)
    repeats = left_out * group / span
    return shapes[2], _later(runs[1], runs[2], repeats)


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


class _Run:
    """State of one simulation."""

    def __init__(
        self,
        shape: Shape,
        programs: Sequence[Program],
        forward: Sequence[Sequence[float]],
        backward: Sequence[Sequence[float]],
        boundary: Sequence[float],
        first_forward: Sequence[Sequence[float]] | None,
    ) -> None:
        ranks = range(shape.pp)
        self._programs, self._forward, self._backward = programs, forward, backward
        self._boundary, self._first = boundary, first_forward
        self._boundary_of = Transfers(shape).boundary
        self._clock = [0.0 for _ in ranks]
        self._position = [0 for _ in ranks]
        self._entered = [False for _ in ranks]
        self._busy = [0.0 for _ in ranks]
        self._p2p = [0.0 for _ in ranks]
        self._ends: list[list[float]] = [[] for _ in ranks]
        self._posted: dict[int, float] = {}
        self._done: dict[int, float] = {}
        self._waiting: dict[int, int] = {}
        self._ready = list(ranks)

    def all(self) -> Timeline:
        """Run until every program has ended."""
        while self._ready:
            self._advance(self._ready.pop())
        for rank, program in enumerate(self._programs):
            if self._position[rank] < len(program):
                raise RuntimeError(f"pipeline rank {rank} waits for ever in its schedule")
        return Timeline(max(self._clock), self._clock, self._busy, self._p2p, self._ends)

    def _advance(self, rank: int) -> None:
        """Go on with one rank until it ends or must wait for a peer."""
        program, time, i = self._programs[rank], self._clock[rank], self._position[rank]
        forward, backward, ends = self._forward[rank], self._backward[rank], self._ends[rank]
        busy = 0.0
        while i < len(program):
            kind, first, second = program[i]
            if kind == FORWARD:
                seconds = forward[first]
                if second == 0 and self._first is not None:
                    seconds += self._first[rank][first]
                time += seconds
                busy += seconds
            elif kind == BACKWARD:
                time += backward[first]
                busy += backward[first]
                ends.append(time)
            else:
                if not self._entered[rank]:
                    self._post(first, time)
                    self._entered[rank] = True
                arrived = self._arrival(rank, second, time)
                if arrived is None:
                    break
                self._entered[rank] = False
                time = arrived
            i += 1
        self._position[rank], self._clock[rank] = i, time
        self._busy[rank] += busy

    def _post(self, transfers: tuple[int, ...], time: float) -> None:
        """One side has reached these transfers."""
        for transfer in transfers:
            other = self._posted.pop(transfer, None)
            if other is None:
                self._posted[transfer] = time
                continue
            seconds = self._boundary[self._boundary_of(transfer)]
            self._done[transfer] = max(other, time) + seconds
            waiting = self._waiting.pop(transfer, None)
            if waiting is not None:
                self._ready.append(waiting)

    def _arrival(self, rank: int, transfers: tuple[int, ...], time: float) -> float | None:
        """When all transfers are complete; None if one has not been reached by the peer."""
        latest, slowest = time, -1
        for transfer in transfers:
            done = self._done.get(transfer)
            if done is None:
                self._waiting[transfer] = rank
                return None
            if done > latest:
                latest, slowest = done, transfer
        if slowest >= 0:
            seconds = self._boundary[self._boundary_of(slowest)]
            self._p2p[rank] += min(latest - time, seconds)
        return latest

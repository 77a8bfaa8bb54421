"""Zero bubble made for the job at hand: greedy, with its own durations and a memory limit.

As the automatic schedule of Qi et al. 2024 (arXiv 2401.10241, section 3.1), with one chunk a rank,
or two in a V (section 6): input gradients as soon as they can be, forwards while there is memory,
weight gradients where the rank would wait.  A few rules for what is not certain to pay are tried,
and the fixed schedule of the same kind besides; the one that ends first is taken.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections import deque
from collections.abc import Callable

from primus_ext.project.compiled import Durations, compiled, run
from primus_ext.project.programs import (
    FORWARD,
    INPUT,
    WEIGHT,
    Item,
    Program,
    ScheduleError,
    Shape,
    Transfers,
    asynchronous,
)

_NEVER = float("inf")
Build = Callable[[Shape, int], Program]


@dataclasses.dataclass(frozen=True, slots=True)
class Rules:
    """What a rank does where neither choice is sure to be better."""

    fills: bool
    """Computes weight gradients although what it waits for comes before they are done."""
    forward_first: bool
    """Of a forward and an input gradient that are both ready, takes the forward."""


def automatic(
    shape: Shape, durations: Durations, limit: int, fixed: Build | None = None
) -> list[Program]:
    """The programs of all ranks.

    Args:
        shape: One chunk a rank, or two in a V.
        durations: Of the job, with the weight gradients apart.
        limit: Chunks that a rank may hold between a forward and the weight gradients.
        fixed: A schedule that keeps the limit and is tried too.

    Raises:
        ScheduleError: The limit is too low for any schedule.
    """
    least = shape.vpp
    if limit < least:
        raise ScheduleError(f"a memory limit of {limit} chunks is not legal: at least {least}")
    found: list[list[Program]] = []
    if fixed is not None:
        with contextlib.suppress(ScheduleError):  # it needs more microbatches than there are
            found.append([fixed(shape, rank) for rank in range(shape.pp)])
    for fills, forward_first in itertools.product((True, False), repeat=2):
        work = _Greedy(shape, durations, limit, Rules(fills, forward_first)).all()
        found.append([asynchronous(shape, rank, work[rank]) for rank in range(shape.pp)])
    return min(found, key=lambda programs: max(run(compiled(shape, programs), durations)[0]))


class _Greedy:
    """All ranks, the one that is free first deciding next."""

    def __init__(self, shape: Shape, durations: Durations, limit: int, rules: Rules) -> None:
        assert durations.weight is not None
        self._shape, self._limit, self._rules = shape, limit, rules
        self._total, self._last = shape.microbatches, shape.stages - 1
        self._stage = Transfers(shape).stage
        ranks = range(shape.pp)
        self._seconds = {
            FORWARD: durations.forward,
            WEIGHT: durations.weight,
            INPUT: [
                [b - w for b, w in zip(*pair, strict=True)]
                for pair in zip(durations.backward, durations.weight, strict=True)
            ],
        }
        self._hops: list[float] = [
            0.0 if shape.folded and boundary == shape.pp - 1 else seconds
            for boundary, seconds in enumerate(durations.boundary)
        ]
        self._clock = [0.0 for _ in ranks]
        self._held = [0 for _ in ranks]
        self._put_off: list[deque[tuple[int, int]]] = [deque() for _ in ranks]
        self._next = {kind: [[0] * shape.vpp for _ in ranks] for kind in (FORWARD, INPUT)}
        self._ends: dict[tuple[int, int, int], float] = {}
        self.work: list[list[Item]] = [[] for _ in ranks]

    def all(self) -> list[list[Item]]:
        """Work of every rank in order."""
        left = 3 * self._shape.stages * self._total
        ranks = set(range(self._shape.pp))
        stuck: set[int] = set()
        while left:
            rank = min(ranks - stuck, key=lambda r: (self._clock[r], r))
            now, item = self._clock[rank], self._decide(rank)
            if item is not None:
                left -= 1
                self._do(rank, item)
                stuck = set()
                if len(self.work[rank]) == 3 * self._shape.vpp * self._total:
                    ranks.remove(rank)
            elif self._clock[rank] == now:
                stuck.add(rank)  # until another rank has made something
        return self.work

    def _arrival(self, rank: int, kind: int, chunk: int) -> float:
        """When the input of a rank's next work is there; never, where nobody has made it yet."""
        microbatch = self._next[kind][rank][chunk]
        if microbatch == self._total:
            return _NEVER
        stage = self._stage(rank, chunk)
        if kind == FORWARD:
            if not stage:
                return 0.0
            made = self._ends.get((FORWARD, stage - 1, microbatch), _NEVER)
            return made + self._hops[stage - 1]
        mine = self._ends.get((FORWARD, stage, microbatch), _NEVER)
        if stage == self._last:
            return mine
        made = self._ends.get((INPUT, stage + 1, microbatch), _NEVER)
        return max(mine, made + self._hops[stage])

    def _allowed(self, rank: int, chunk: int) -> bool:
        """Whether there is memory for a forward; the last chunk's own place is kept free."""
        kept = self._shape.vpp - 1 - chunk
        return self._held[rank] + kept < self._limit

    def _decide(self, rank: int) -> Item | None:
        """What a free rank does; None: it waits, and its clock has moved on."""
        now, chunks = self._clock[rank], range(self._shape.vpp - 1, -1, -1)
        kinds = (FORWARD, INPUT) if self._rules.forward_first else (INPUT, FORWARD)
        coming = _NEVER
        for kind in kinds:
            for chunk in chunks:
                if kind == FORWARD and not self._allowed(rank, chunk):
                    continue
                arrival = self._arrival(rank, kind, chunk)
                if arrival <= now:
                    return kind, chunk, self._next[kind][rank][chunk]
                coming = min(coming, arrival)
        put_off = self._put_off[rank]
        if put_off:
            chunk, microbatch = put_off[0]
            done = now + self._seconds[WEIGHT][rank][chunk]
            if done <= coming or self._rules.fills or coming == _NEVER:
                return WEIGHT, chunk, microbatch
        if coming < _NEVER:
            self._clock[rank] = coming
        return None

    def _do(self, rank: int, item: Item) -> None:
        kind, chunk, microbatch = item
        self._clock[rank] += self._seconds[kind][rank][chunk]
        self.work[rank].append(item)
        if kind == WEIGHT:
            self._put_off[rank].popleft()
            self._held[rank] -= 1
            return
        self._next[kind][rank][chunk] += 1
        self._ends[kind, self._stage(rank, chunk), microbatch] = self._clock[rank]
        if kind == FORWARD:
            self._held[rank] += 1
        else:
            self._put_off[rank].append((chunk, microbatch))

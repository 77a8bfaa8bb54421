"""A schedule as one list of instructions, so that durations alone are left to be put in.

Who waits for whom depends on the programs and not on how long anything takes.  Compiling finds an
order in which every wait comes after what it waits for; running it is a walk down one list.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from primus_ext.project.programs import (
    BACKWARD,
    FORWARD,
    INPUT,
    PAIR,
    TRANSFER,
    WEIGHT,
    Program,
    Shape,
    Transfers,
)

WORK, ENDS, POST, MEET, WAIT, WAIT_ALL = range(6)
"""``WORK`` takes time; ``ENDS`` too, and completes weight gradients; ``POST``: the first side has
reached a transfer; ``MEET``: the second one has, it starts; ``WAIT``: for one to be complete."""
Instruction = tuple[int, int, int, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Seconds by rank and chunk."""

    forward: Sequence[Sequence[float]]
    backward: Sequence[Sequence[float]]
    boundary: Sequence[float]
    """Of a transfer across each boundary between stages."""
    first_forward: Sequence[Sequence[float]] | None = None
    """Extra seconds of the first microbatch's forward, which waits for gathered parameters."""
    weight: Sequence[Sequence[float]] | None = None
    """The part of a backward that computes weight gradients; None where no schedule splits it."""
    pair: Sequence[Sequence[Sequence[float]]] | None = None
    """Of a forward beside a backward, by rank, chunk of the forward, chunk of the backward; None
    where no schedule has them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """A compiled schedule."""

    shape: Shape
    works: tuple[tuple[int, int, int, int, bool], ...]
    """Kinds of work: (rank, kind, chunk, chunk of a pair's backward, whether it is the forward of
    the first microbatch).  Instructions refer to them by index."""
    counts: tuple[int, ...]
    """How often each kind of work is done."""
    instructions: tuple[Instruction, ...]
    """(what, rank, index, boundary): the index is one of ``works``, of a transfer, or of
    ``waits``."""
    waits: tuple[tuple[tuple[int, int], ...], ...]
    """Transfers, with their boundaries, that are waited for together."""
    numbers: tuple[int, ...]
    """Of the transfers, as :class:`Transfers` counts them."""
    items: tuple[tuple[int, int], ...]
    """(rank, place in its program) of each piece of work, in the order of the instructions."""

    @property
    def transfers(self) -> int:
        """How many there are."""
        return len(self.numbers)

    def seconds(self, durations: Durations) -> list[float]:
        """How long each kind of work takes."""
        return [_seconds(work, durations) for work in self.works]


def _seconds(work: tuple[int, int, int, int, bool], durations: Durations) -> float:
    rank, kind, chunk, other, first = work
    extra = 0.0
    if first and durations.first_forward is not None:
        extra = durations.first_forward[rank][chunk]
    if kind == FORWARD:
        return durations.forward[rank][chunk] + extra
    if kind == BACKWARD:
        return durations.backward[rank][chunk]
    if kind == PAIR:
        if durations.pair is None:
            return durations.forward[rank][chunk] + durations.backward[rank][other] + extra
        return durations.pair[rank][chunk][other] + extra
    assert durations.weight is not None, "a split backward without its parts"
    weight = durations.weight[rank][chunk]
    return weight if kind == WEIGHT else durations.backward[rank][chunk] - weight


class _Compiler:
    """Walks the programs of all ranks against each other."""

    def __init__(self, shape: Shape, programs: Sequence[Program]) -> None:
        self._shape, self._programs = shape, programs
        self._boundary = Transfers(shape).boundary
        self._position = [0 for _ in programs]
        self._entered = [False for _ in programs]
        self._number: dict[int, int] = {}
        self._met: set[int] = set()
        self._waiting: dict[int, int] = {}
        self._ready = list(range(len(programs)))
        self._works: dict[tuple[int, int, int, int, bool], int] = {}
        self._counts: list[int] = []
        self._waits: list[tuple[tuple[int, int], ...]] = []
        self._code: list[Instruction] = []
        self._items: list[tuple[int, int]] = []

    def all(self) -> Code:
        """Compile until every program has ended."""
        while self._ready:
            self._advance(self._ready.pop())
        for rank, program in enumerate(self._programs):
            if self._position[rank] < len(program):
                raise RuntimeError(f"pipeline rank {rank} waits for ever in its schedule")
        return Code(
            shape=self._shape, works=tuple(self._works), counts=tuple(self._counts),
            instructions=tuple(self._code), waits=tuple(self._waits),
            numbers=tuple(self._number), items=tuple(self._items),
        )  # fmt: skip

    def _advance(self, rank: int) -> None:
        """Go on with one rank until it ends or must wait for a peer."""
        program, i = self._programs[rank], self._position[rank]
        while i < len(program):
            kind, first, second = program[i]
            if kind == TRANSFER:
                if not self._entered[rank]:
                    self._post(rank, first)
                    self._entered[rank] = True
                missing = next((t for t in second if t not in self._met), None)
                if missing is not None:
                    self._waiting[missing] = rank
                    break
                self._entered[rank] = False
                self._wait(rank, second)
            else:
                self._work(rank, kind, first, second, i)
            i += 1
        self._position[rank] = i

    def _work(self, rank: int, kind: int, first: int, second: int, place: int) -> None:
        if kind == PAIR:
            (chunk, microbatch), (other, _) = first, second  # type: ignore[misc]
        else:
            chunk, microbatch, other = first, second, 0
        key = (rank, kind, chunk, other, kind in (FORWARD, PAIR) and microbatch == 0)
        index = self._works.setdefault(key, len(self._works))
        if index == len(self._counts):
            self._counts.append(0)
        self._counts[index] += 1
        what = WORK if kind in (FORWARD, INPUT) else ENDS
        self._code.append((what, rank, index, 0))
        self._items.append((rank, place))

    def _post(self, rank: int, transfers: Sequence[int]) -> None:
        """One side has reached these transfers."""
        for transfer in transfers:
            number = self._number.get(transfer)
            if number is None:
                number = self._number[transfer] = len(self._number)
                self._code.append((POST, rank, number, 0))
                continue
            self._code.append((MEET, rank, number, self._boundary(transfer)))
            self._met.add(transfer)
            waiting = self._waiting.pop(transfer, None)
            if waiting is not None:
                self._ready.append(waiting)

    def _wait(self, rank: int, transfers: Sequence[int]) -> None:
        if len(transfers) == 1:
            number = self._number[transfers[0]]
            self._code.append((WAIT, rank, number, self._boundary(transfers[0])))
        elif transfers:
            self._code.append((WAIT_ALL, rank, len(self._waits), 0))
            self._waits.append(tuple((self._number[t], self._boundary(t)) for t in transfers))


def compiled(shape: Shape, programs: Sequence[Program]) -> Code:
    """Compile the programs of all pipeline ranks.

    Raises:
        RuntimeError: They wait for each other for ever.
    """
    return _Compiler(shape, programs).all()


def run(code: Code, durations: Durations) -> tuple[list[float], list[float], list[list[float]]]:
    """Walk down a schedule.

    A transfer starts when both sides have reached it and takes the seconds of its boundary.

    Returns:
        By rank: when its program ends, seconds that it waits for transfers that are on their way,
        and the ends of what completes weight gradients.
    """
    ranks = range(code.shape.pp)
    clock, p2p = [0.0 for _ in ranks], [0.0 for _ in ranks]
    ends: list[list[float]] = [[] for _ in ranks]
    seconds, boundary, waits = code.seconds(durations), durations.boundary, code.waits
    times = [0.0] * code.transfers
    for what, rank, index, crossed in code.instructions:
        if what == WORK:
            clock[rank] += seconds[index]
        elif what == ENDS:
            time = clock[rank] = clock[rank] + seconds[index]
            ends[rank].append(time)
        elif what == POST:
            times[index] = clock[rank]
        elif what == MEET:
            time, other = clock[rank], times[index]
            times[index] = (time if time > other else other) + boundary[crossed]
        elif what == WAIT:
            late = times[index] - clock[rank]
            if late > 0:
                on_its_way = boundary[crossed]
                p2p[rank] += late if late < on_its_way else on_its_way
                clock[rank] = times[index]
        else:
            time, slowest = clock[rank], 0.0
            for number, crossed in waits[index]:
                if times[number] > time:
                    time, slowest = times[number], boundary[crossed]
            p2p[rank] += min(time - clock[rank], slowest)
            clock[rank] = time
    return clock, p2p, ends


def spans(
    code: Code, durations: Durations
) -> Iterator[tuple[int, int, float, float]]:
    """When each piece of work runs, and each transfer.

    Yields:
        Rank, place in its program, start and end in seconds, in no particular order of ranks.  Of a
        transfer the rank is -1 and the place its number (:class:`Transfers`).
    """
    clock = [0.0 for _ in range(code.shape.pp)]
    seconds, boundary, waits = code.seconds(durations), durations.boundary, code.waits
    times, items = [0.0] * code.transfers, iter(code.items)
    for what, rank, index, crossed in code.instructions:
        if what in (WORK, ENDS):
            start = clock[rank]
            clock[rank] = start + seconds[index]
            yield (*next(items), start, clock[rank])
        elif what == POST:
            times[index] = clock[rank]
        elif what == MEET:
            start = max(clock[rank], times[index])
            times[index] = start + boundary[crossed]
            yield -1, code.numbers[index], start, times[index]
        elif what == WAIT:
            clock[rank] = max(clock[rank], times[index])
        else:
            clock[rank] = max(clock[rank], max(times[number] for number, _ in waits[index]))

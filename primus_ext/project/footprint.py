"""What one rank takes from its device: its allocations replayed through the caching allocator."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from primus_ext.project.allocator import Allocator
from primus_ext.project.allocator_config import AllocatorConfig
from primus_ext.project.blocks import Block
from primus_ext.project.programs import Shape
from primus_ext.project.recorded import Recorded
from primus_ext.project.replay import COMMUNICATION, Piece, Replay, Source
from primus_ext.project.result import Footprint, LiveAllocations, Timeline
from primus_ext.project.schedule import programs
from primus_ext.trace import RankTrace

STEPS = 4
"""Steps that are replayed: what is reserved grows in the first ones."""
MOST_POINTS = 250
MOST_ALLOCATIONS = 20
_STATIC = frozenset({"parameters", "gradients", "optimizer", "workspaces"})


@dataclasses.dataclass(frozen=True, slots=True)
class Replayed:
    """What one rank allocates and frees, and the settings of the allocator that serves it."""

    trace: RankTrace
    """Of the rank, with its events."""
    rank: int
    """Pipeline rank."""
    shape: Shape
    """The schedule, shortened."""
    sizes: Sequence[int]
    """Bytes that cross each boundary between stages."""
    config: AllocatorConfig
    """Settings of the allocator."""
    workspaces: tuple[int, int] = (0, 0)
    """Bytes that the BLAS library takes from the allocator in the first forward and in the first
    backward."""

    @property
    def steps(self) -> int:
        """How many steps to replay."""
        recorded = self.trace.recorded_events
        return len(recorded) - 1 if recorded else STEPS

    def replay(self) -> Source:
        """A new replay, at its beginning; of the steps as they were recorded, where they were.

        Raises:
            ValueError: The trace has no events.
        """
        if self.trace.recorded_events:
            return Recorded(self.trace, self.workspaces)
        short = enough(self.shape, self.rank)
        program = programs(short)[self.rank]
        return Replay(self.trace, self.rank, short, program, self.sizes, self.workspaces)


def footprint(of: Replayed) -> Footprint:
    """Allocate and free as the rank does, from its setup through a few steps.

    Raises:
        ValueError: The trace has no events.
    """
    replay = of.replay()
    device = Device(replay, of.config)
    device.run([replay.setup()])
    built = device.allocator.peak_allocated
    for number in range(of.steps):
        live = device.live()
        pieces = list(replay.step(first=number == 0))
        device.run(pieces)
    timeline, top = _last_step(replay, live, device.made, pieces)
    return Footprint(
        tensor_bytes=int(max(sum(point[1:]) for point in timeline.points)),
        setup_bytes=built,
        allocated_bytes=device.allocator.peak_allocated,
        reserved_bytes=device.allocator.peak_reserved,
        timeline=timeline,
        top_allocations=top,
    )


def replayable(trace: RankTrace) -> bool:
    """Whether a trace says what is allocated, in all microbatches."""
    if trace.recorded_events:
        return True
    return trace.static_events is not None and all(
        chunk.events is not None and not getattr(chunk, "microbatches", ())
        for chunk in trace.chunks
    )


def enough(shape: Shape, rank: int) -> Shape:
    """A schedule with fewer microbatches in which one rank comes to the same.

    Without interleaving a rank warms up with ``pp - rank - 1`` forwards; two forwards and
    backwards later what is live repeats.
    """
    if shape.vpp > 1:
        return shape
    return shape.with_microbatches(min(shape.microbatches, shape.pp - rank + 2))


class Device:
    """An allocator, and what is allocated in it."""

    def __init__(
        self, replay: Source, config: AllocatorConfig, capacity: int | None = None
    ) -> None:
        """Nothing is allocated; ``capacity`` in bytes, None for any."""
        self.allocator = Allocator(config, capacity=capacity)
        self._requests = [(kind.bytes, kind.stream) for kind in replay.kinds]
        self._blocks: list[Block | None] = []
        self.made: list[int] = []
        """Kind of every allocation so far."""

    def run(self, pieces: Sequence[Piece]) -> None:
        """Allocate and free.

        Raises:
            OutOfMemoryError: There is no room within the capacity.
        """
        malloc, release = self.allocator.malloc, self.allocator.release
        requests, blocks, made = self._requests, self._blocks, self.made
        for piece in pieces:
            for event in piece.events:
                if event >= 0:
                    blocks.append(malloc(*requests[event]))
                    made.append(event)
                else:
                    block = blocks[-event - 1]
                    assert block is not None
                    release(block)
                    blocks[-event - 1] = None

    def live(self) -> list[int]:
        """Numbers of what is allocated."""
        return [number for number, block in enumerate(self._blocks) if block is not None]


def _last_step(
    replay: Source, live: Sequence[int], made: Sequence[int], pieces: Sequence[Piece]
) -> tuple[Timeline, tuple[LiveAllocations, ...]]:
    """Bytes over a step by part, and what is live at its highest moment.

    Args:
        replay: It has produced the step.
        live: Numbers of what was allocated before the step.
        made: Kind of every allocation by number.
        pieces: The step.
    """
    count = len(made) - sum(event >= 0 for piece in pieces for event in piece.events)
    walk = _Walk(replay, live, made, count)
    events = sum(len(piece.events) for piece in pieces)
    every = -(-events // MOST_POINTS) or 1
    points: list[tuple[float, ...]] = []
    best, at, done = -1, 0, 0
    for index, piece in enumerate(pieces):
        for share, total in walk.through(piece):
            bucket = done // every
            point = (round(index + share, 3), *walk.parts)
            if bucket == len(points):
                points.append(point)
            elif total > sum(points[bucket][1:]):
                points[bucket] = point
            if total > best:
                best, at = total, done
            done += 1
    timeline = Timeline(
        columns=("position", *walk.names),
        points=tuple(points),
        pieces=tuple(piece.name for piece in pieces),
    )
    return timeline, _live_at(replay, live, made, count, pieces, at)


class _Walk:
    """Counts bytes by part along events."""

    names = ("static", "activations", "temporaries", "communication")

    def __init__(
        self, replay: Source, live: Sequence[int], made: Sequence[int], count: int
    ) -> None:
        self._kinds, self._made, self._number = replay.kinds, made, count
        self.parts = [0, 0, 0, 0]
        self._part: dict[int, int] = {}
        for number in live:
            self._enter(number, 1)

    def _enter(self, number: int, part: int) -> None:
        kind = self._kinds[self._made[number]]
        if kind.phase in _STATIC:
            part = 0
        elif kind.phase == COMMUNICATION:
            part = 3
        self._part[number] = part
        self.parts[part] += kind.bytes

    def through(self, piece: Piece):  # noqa: ANN201
        """Yield the share of the piece that is done, and the bytes, after every event."""
        freed = set(piece.events)
        forward = piece.name.startswith("forward")
        size = len(piece.events)
        total = sum(self.parts)
        for index, event in enumerate(piece.events):
            if event >= 0:
                kept = forward and -self._number - 1 not in freed
                self._enter(self._number, 1 if kept else 2)
                total += self._kinds[event].bytes
                self._number += 1
            else:
                number = -event - 1
                bytes_ = self._kinds[self._made[number]].bytes
                self.parts[self._part.pop(number)] -= bytes_
                total -= bytes_
            yield (index + 1) / size, total


def _live_at(
    replay: Source, live: Sequence[int], made: Sequence[int], count: int,
    pieces: Sequence[Piece], last: int,
) -> tuple[LiveAllocations, ...]:
    """What is live after event ``last`` of a step, the most bytes first."""
    numbers, done = set(live), -1
    for piece in pieces:
        for event in piece.events:
            if done == last:
                break
            if event >= 0:
                numbers.add(count)
                count += 1
            else:
                numbers.discard(-event - 1)
            done += 1
    counts = Counter(made[number] for number in numbers)
    ordered = sorted(counts, key=lambda kind: (-replay.kinds[kind].bytes * counts[kind], kind))
    return tuple(
        LiveAllocations(
            module=kind.module, op=kind.op, phase=kind.phase, bytes=kind.bytes, count=counts[index]
        )
        for index in ordered[:MOST_ALLOCATIONS]
        for kind in (replay.kinds[index],)
    )

"""When calls run that are issued in one order on several streams.

The device computes one kernel at a time.  Kernels of one stream run in order; of several streams
that are ready, the one that was ready first goes first.  The collectives of one group run in the
order of their calls, beside the kernels; those of different groups beside each other.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence

_FUTURE = "a call waits for one that is issued later"
DEVICE = ""
"""Lane of kernels; the lane of a collective is the name of its group."""


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """One call."""

    seconds: float
    stream: str
    lane: str
    asynchronous: bool
    """Its stream goes on without it."""
    after: tuple[int, ...]
    """Places of the tasks that must be over before it, beside those before it on its stream."""


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """When a task runs, seconds from the start of the list."""

    task: int
    start: float
    end: float


class _Run:
    """The tasks of one list, run in any order that respects streams, lanes and waits."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tasks
        self._ends: list[float] = [0.0 for _ in tasks]
        self._over = [False for _ in tasks]
        self._free: dict[str, float] = {}
        self._before: list[int] = []
        last: dict[str, int] = {}
        for place, task in enumerate(tasks):
            self._before.append(last.get(task.stream, -1))
            if not task.asynchronous:
                last[task.stream] = place

    def start(self, place: int) -> float | None:
        """When a task can start; None if something before it is not over."""
        task, before = self._tasks[place], self._before[place]
        ready = 0.0
        for other in (before, *task.after) if before >= 0 else task.after:
            if not self._over[other]:
                return None
            ready = max(ready, self._ends[other])
        return max(ready, self._free.get(task.lane, 0.0))

    def do(self, place: int, start: float) -> Span:
        """Run a task."""
        task = self._tasks[place]
        end = start + task.seconds
        self._ends[place], self._over[place] = end, True
        self._free[task.lane] = end
        return Span(place, start, end)


def spans(tasks: Sequence[Task]) -> Iterator[Span]:
    """When each task runs, by their starts.

    Args:
        tasks: In the order in which the host issues them; each waits for earlier ones only.

    Raises:
        ValueError: A task waits for itself or for a later one.
    """
    run = _Run(tasks)
    if len({task.stream for task in tasks}) <= 1:
        yield from _one_stream(run, len(tasks))
        return
    queues = _queues(tasks)
    for _ in tasks:
        chosen, at = -1, 0.0
        for queue in queues.values():
            if not queue:
                continue
            place = queue[0]
            if any(queues[key][0] != place for key in _keys(tasks[place])):
                continue
            start = run.start(place)
            if start is not None and (chosen < 0 or (start, place) < (at, chosen)):
                chosen, at = place, start
        if chosen < 0:
            raise ValueError(_FUTURE)
        for key in _keys(tasks[chosen]):
            queues[key].popleft()
        yield run.do(chosen, at)


def _one_stream(run: _Run, count: int) -> list[Span]:
    """With a single stream nobody else takes the device: the order of issue is the order."""
    found = []
    for place in range(count):
        start = run.start(place)
        if start is None:
            raise ValueError(_FUTURE)
        found.append(run.do(place, start))
    return sorted(found, key=lambda span: span.start)


def _keys(task: Task) -> list[tuple[str, str]]:
    """Queues that a task stands in: its stream's, and its group's."""
    keys = [] if task.asynchronous else [("stream", task.stream)]
    return keys if task.lane == DEVICE else [*keys, ("group", task.lane)]


def _queues(tasks: Sequence[Task]) -> dict[tuple[str, str], deque[int]]:
    queues: dict[tuple[str, str], deque[int]] = {}
    for place, task in enumerate(tasks):
        for key in _keys(task):
            queues.setdefault(key, deque()).append(place)
    return queues


def shares(tasks: Sequence[Task]) -> Iterator[tuple[int, float]]:
    """Who takes how much of the duration of a list: every instant is given to one task.

    An instant in which a kernel runs is the kernel's; what runs beside it is hidden.  Without one
    it is that of the collective that was called first.  There is no instant without a task.

    Args:
        tasks: As for :func:`spans`.

    Yields:
        Place of a task, and seconds.
    """
    together: list[Span] = []
    horizon = 0.0
    for span in spans(tasks):
        if span.start >= horizon:
            yield from _shared(tasks, together)
            together = []
        together.append(span)
        horizon = max(horizon, span.end)
    yield from _shared(tasks, together)


def _shared(tasks: Sequence[Task], together: list[Span]) -> Iterator[tuple[int, float]]:
    """Shares of tasks that overlap."""
    if len(together) == 1:
        yield together[0].task, together[0].end - together[0].start
        return
    borders = sorted({edge for span in together for edge in (span.start, span.end)})
    ranked = sorted(together, key=lambda span: (tasks[span.task].lane != DEVICE, span.task))
    for low, high in zip(borders, borders[1:], strict=False):
        owner = next(span for span in ranked if span.start <= low and span.end >= high)
        yield owner.task, high - low

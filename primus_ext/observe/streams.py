"""Which stream each call runs on, and what it waits for, as the program said it.

Work on one stream runs in order.  Beyond that a call waits for what the program made its stream
wait for before it was issued: ``Work.wait()`` of an asynchronous collective,
``Stream.wait_stream``, ``Stream.wait_event`` and the like.  An asynchronous collective does not
hold up the stream that it is issued from: it runs on its communicator's own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

MAIN = 0
"""Number of the compute stream, on which a program starts."""


@dataclasses.dataclass(frozen=True, slots=True)
class Mark:
    """What had been issued on a stream when an event was recorded."""

    record: Streams
    calls: frozenset[int]


class Streams:
    """Dependencies of one list of calls."""

    def __init__(self) -> None:
        """Start at an empty list, on the compute stream."""
        self._numbers: dict[Any, int] = {None: MAIN}
        self._last: dict[int, int] = {}
        self._runs_on: dict[int, int] = {}
        self._waits: dict[int, set[int]] = {MAIN: set()}
        self._everybody: set[int] = set()
        self._works: dict[int, tuple[Any, frozenset[int]]] = {}
        self._asynchronous: list[int] = []

    def number(self, stream: Any) -> int:
        """Number of a stream (``None``: the compute stream), given at its first use."""
        if stream not in self._numbers:
            self._numbers[stream] = len(self._numbers)
            self._waits[self._numbers[stream]] = set(self._everybody)
        return self._numbers[stream]

    def issue(self, index: int, stream: Any, asynchronous: bool) -> tuple[int, tuple[int, ...]]:
        """A call is issued.

        Args:
            index: Its place in the list.
            stream: Current stream, ``None`` for the compute stream.
            asynchronous: It does not run on that stream.

        Returns:
            The number of the stream, and how many places before ``index`` the calls stand that
            must be over before it starts (beside earlier ones of its stream).
        """
        number = self.number(stream)
        waits = self._waits[number]
        after = tuple(sorted(index - other for other in waits))
        if asynchronous:
            self._asynchronous.append(index)
        else:
            self._last[number], self._runs_on[index] = index, number
            waits.clear()
        return number, after

    def _so_far(self, stream: Any) -> set[int]:
        """Calls whose end is the end of everything on a stream so far."""
        number = self.number(stream)
        last = self._last.get(number)
        return self._waits[number] | (set() if last is None else {last})

    def _add(self, stream: Any, calls: set[int] | frozenset[int]) -> None:
        self._let_wait(self.number(stream), calls)

    def _let_wait(self, number: int, calls: set[int] | frozenset[int]) -> None:
        self._waits[number] |= {c for c in calls if self._runs_on.get(c) != number}

    def mark(self, stream: Any) -> Mark:
        """``Event.record`` on a stream."""
        return Mark(self, frozenset(self._so_far(stream)))

    def wait_mark(self, stream: Any, mark: Mark) -> None:
        """``Stream.wait_event``; marks of another list are over."""
        if mark.record is self:
            self._add(stream, mark.calls)

    def wait_stream(self, stream: Any, other: Any) -> None:
        """``stream.wait_stream(other)``."""
        if self.number(stream) != self.number(other):
            self._add(stream, self._so_far(other))

    def host_waits(self, calls: set[int] | frozenset[int]) -> None:
        """The host waits for calls: whatever it issues later starts after them."""
        self._everybody |= calls
        for number in self._waits:
            self._let_wait(number, calls)

    def host_waits_for_stream(self, stream: Any) -> None:
        """``Stream.synchronize``."""
        self.host_waits(self._so_far(stream))

    def host_waits_for_mark(self, mark: Mark) -> None:
        """``Event.synchronize``."""
        if mark.record is self:
            self.host_waits(mark.calls)

    def works(self, index: int, work: Any) -> None:
        """``work`` is the handle of the asynchronous call ``index``."""
        self._works[id(work)] = (work, frozenset([index]))  # kept alive, so that its id is

    def coalesced(self, since: int, work: Any) -> None:
        """``work`` is the handle of all asynchronous calls from index ``since`` on."""
        calls = frozenset(i for i in self._asynchronous if i >= since)
        self._works[id(work)] = (work, calls)

    def wait_work(self, stream: Any, work: Any) -> None:
        """``work.wait()`` while ``stream`` is the current one."""
        known = self._works.get(id(work))
        if known is not None:
            self._add(stream, known[1])


_current: list[Any] = [None]


def current() -> Any:
    """The current stream of this process; ``None`` is the compute stream."""
    return _current[-1]


def enter(stream: Any) -> None:
    """``stream`` (``None``: the compute stream) becomes the current one."""
    _current.append(stream)


def leave() -> None:
    """The stream before the last :func:`enter` is the current one again."""
    _current.pop()


def replace(stream: Any) -> None:
    """``torch.cuda.set_stream``."""
    _current[-1] = stream

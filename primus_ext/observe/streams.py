"""Which stream each call is issued on, and what it waits for, as the program said it.

Work on one stream runs in order.  Beyond that a call waits for what the program made its stream
wait for before it was issued: ``Work.wait()`` of an asynchronous collective,
``Stream.wait_stream``, ``Stream.wait_event`` and the like.  An asynchronous collective does not
hold up the stream that it is issued on: it runs on that of its group's communicator.

A *queue* is a stream or the asynchronous collectives of one group; both run in order, so that all
there is to wait for is a position in a queue.
"""

from __future__ import annotations

import dataclasses
from typing import Any

MAIN = ""
"""Name of the compute stream, on which a program starts."""

Positions = dict[str, int]
"""How many calls of each queue, by its name."""


@dataclasses.dataclass(frozen=True, slots=True)
class Mark:
    """What had been issued on a stream when an event was recorded."""

    record: Streams
    positions: Positions


class Streams:
    """Dependencies between the calls of one recorder."""

    def __init__(self) -> None:
        """Start on the compute stream, with nothing issued."""
        self._names: dict[Any, str] = {None: MAIN}
        self._numbers = {MAIN: 0}
        self._issued: Positions = {MAIN: 0}
        self._waits: dict[str, Positions] = {MAIN: {}}
        self._everybody: Positions = {}
        self._works: dict[int, tuple[Any, Positions]] = {}

    def name(self, stream: Any) -> str:
        """Name of a stream (``None``: the compute stream), given at its first use."""
        if stream not in self._names:
            number = len(self._names)
            name = self._names[stream] = f"side{number}"
            self._numbers[name] = number
            self._issued[name], self._waits[name] = 0, dict(self._everybody)
        return self._names[stream]

    def number(self, stream: Any) -> int:
        """Number of a stream, by which its allocations are told apart; 0: the compute stream."""
        return self._numbers[self.name(stream)]

    def issue(self, stream: Any, group: str | None) -> tuple[str, tuple[tuple[str, int], ...]]:
        """A call is issued.

        Args:
            stream: Current stream, ``None`` for the compute stream.
            group: Of an asynchronous collective; ``None`` for what runs on the stream.

        Returns:
            Name of the stream, and what must be over before the call starts beside what is before
            it in its queue: the name of a queue, and how many of the calls that were last issued
            there need *not* be over.  (So equal layers wait for the same.)
        """
        name = self.name(stream)
        waits = self._waits[name]
        found = tuple(sorted((queue, self._issued[queue] - at) for queue, at in waits.items()))
        if group is None:
            self._issued[name] += 1
            waits.clear()
        else:  # what is issued on the stream next waits as well
            self._issued[group] = self._issued.get(group, 0) + 1
        return name, found

    def _so_far(self, stream: Any) -> Positions:
        """Everything on a stream so far."""
        name = self.name(stream)
        return {**self._waits[name], name: self._issued[name]}

    def _let_wait(self, name: str, positions: Positions) -> None:
        waits = self._waits[name]
        for queue, at in positions.items():
            if queue != name and at:
                waits[queue] = max(at, waits.get(queue, 0))

    def mark(self, stream: Any) -> Mark:
        """``Event.record`` on a stream."""
        return Mark(self, self._so_far(stream))

    def wait_mark(self, stream: Any, mark: Mark) -> None:
        """``Stream.wait_event``; marks of another recorder don't matter."""
        if mark.record is self:
            self._let_wait(self.name(stream), mark.positions)

    def wait_stream(self, stream: Any, other: Any) -> None:
        """``stream.wait_stream(other)``."""
        self._let_wait(self.name(stream), self._so_far(other))

    def _host_waits(self, positions: Positions) -> None:
        """The host waits: whatever it issues later starts afterwards."""
        for queue, at in positions.items():
            self._everybody[queue] = max(at, self._everybody.get(queue, 0))
        for name in self._waits:
            self._let_wait(name, positions)

    def host_waits_for_stream(self, stream: Any) -> None:
        """``Stream.synchronize``."""
        self._host_waits(self._so_far(stream))

    def host_waits_for_mark(self, mark: Mark) -> None:
        """``Event.synchronize``."""
        if mark.record is self:
            self._host_waits(mark.positions)

    def issued(self) -> Positions:
        """How much has been issued so far."""
        return dict(self._issued)

    def works(self, work: Any, group: str) -> None:
        """``work`` is the handle of the last asynchronous collective of ``group``."""
        self._works[id(work)] = (work, {group: self._issued[group]})  # alive, so is its id

    def coalesced(self, work: Any, before: Positions) -> None:
        """``work`` is the handle of all that was issued since :meth:`issued` gave ``before``."""
        new = {queue: at for queue, at in self._issued.items() if at > before.get(queue, 0)}
        self._works[id(work)] = (work, new)

    def wait_work(self, stream: Any, work: Any) -> None:
        """``work.wait()`` while ``stream`` is the current one."""
        known = self._works.get(id(work))
        if known is not None:
            self._let_wait(self.name(stream), known[1])

    def settle(self) -> None:
        """What a stream has been made to wait for, and has nothing after it yet, is over."""
        for waits in self._waits.values():
            waits.clear()

    def forget_works(self) -> None:
        """Handles of the past are not waited for any more."""
        self._works.clear()


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

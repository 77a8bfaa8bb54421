"""Every allocation and free of a recording, in order, as compact numbers.

An event is an integer: ``n >= 0`` allocates a tensor of kind ``n`` (an index into the table of
:class:`Kinds`); ``n < 0`` frees the ``-n - 1``-th allocation of the log.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from primus_ext.trace import AllocationKind


class Kinds:
    """Kinds of allocations, each stored once."""

    def __init__(self) -> None:
        self.table: list[AllocationKind] = []
        self._index: dict[tuple[int, str, str, str, int], int] = {}

    def of(self, size: int, op: str, module: str, phase: str, stream: int = 0) -> int:
        """The index of a kind; ``size`` in bytes."""
        key = (size, op, module, phase, stream)
        index = self._index.get(key)
        if index is None:
            index = self._index[key] = len(self.table)
            self.table.append(AllocationKind(size, op, module, phase, stream))
        return index

    def in_phase(self, kind: int, phase: str) -> int:
        """The index of the same kind in another phase."""
        same = self.table[kind]
        return self.of(same.bytes, same.op, same.module, phase, same.stream)


class Log:
    """Allocations and frees while it is open."""

    def __init__(self) -> None:
        self.events: list[int] = []
        self.passing = False
        """Whether what is left at its end is not there for good."""
        self._numbers: dict[int, int] = {}
        self._kinds: list[int] = []

    def __len__(self) -> int:
        """How many allocations there were."""
        return len(self._kinds)

    def allocated(self, key: int, kind: int) -> None:
        """A storage with address ``key`` came into being."""
        self._numbers[key] = len(self._kinds)
        self._kinds.append(kind)
        self.events.append(kind)

    def freed(self, key: int) -> bool:
        """A storage is gone; False if it was not allocated in this log."""
        number = self._numbers.pop(key, None)
        if number is None:
            return False
        self.events.append(-number - 1)
        return True

    def number(self, key: int) -> int:
        """The number of a live storage's allocation; -1 if it was not allocated in this log."""
        return self._numbers.get(key, -1)

    def live(self) -> dict[int, int]:
        """Numbers of the allocations whose storages are still there, and their kinds."""
        return {number: self._kinds[number] for number in sorted(self._numbers.values())}


class Logs:
    """The logs of a recording; an event goes to the innermost open log that it concerns."""

    def __init__(self) -> None:
        self.setup = Log()
        """Everything that no inner log saw."""
        self._open = [self.setup]
        self._closed: list[Log] = []

    def allocated(self, key: int, kind: int) -> None:
        """Note an allocation."""
        self._open[-1].allocated(key, kind)

    def freed(self, key: int) -> None:
        """Note a free; a log that is closed by now only forgets the allocation."""
        for log in reversed(self._open):
            if log.freed(key):
                return
        for log in self._closed:
            if log.freed(key):
                log.events.pop()
                return

    def live(self) -> list[int]:
        """Kinds of what was allocated in inner logs, closed by now, and is there for good."""
        return [kind for log in self._closed if not log.passing for kind in log.live().values()]

    @property
    def innermost(self) -> Log:
        """The log that the next allocation goes to."""
        return self._open[-1]

    @contextlib.contextmanager
    def inner(self, *, passing: bool = False) -> Iterator[Log]:
        """A log of what happens inside.

        Args:
            passing: What is left at its end will go: it is not :meth:`live`.
        """
        log = Log()
        log.passing = passing
        self._open.append(log)
        try:
            yield log
        finally:
            self._open.remove(log)
            self._closed.append(log)

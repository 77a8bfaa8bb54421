"""In which order the streams of a device run what is issued on them, for one recording.

The host of a virtual device does all work at once; what the program said about streams (which one
an op was issued on, which events it waits for) is kept here, for the recorder to note with the op.
"""

from __future__ import annotations

MAIN = ""
"""Name of the stream that a program starts on."""


class Stream:
    """One stream: how many recorded ops were issued on it, and what its next one waits for."""

    _numbers = 0

    def __init__(self) -> None:
        Stream._numbers += 1
        self.name = f"side{Stream._numbers}"
        self.issued = 0
        self._waits: dict[Stream, int] = {}

    def wait_for(self, other: Stream, position: int) -> None:
        """What is issued from now on starts after the first ``position`` ops of ``other``."""
        if other is not self and position > 0:
            self._waits[other] = max(position, self._waits.get(other, 0))

    def issue(self) -> tuple[tuple[str, int], ...]:
        """Count one op, and say what it waits for.

        Returns:
            Name of a stream, and how many of the ops that were last issued on it need *not* be
            complete: so that equal layers wait for the same.
        """
        self.issued += 1
        waits = tuple(sorted((s.name, s.issued - at) for s, at in self._waits.items()))
        self._waits.clear()
        return waits


class Event:
    """A position in a stream."""

    def __init__(self) -> None:
        self.stream: Stream | None = None
        self.position = 0

    def mark(self, stream: Stream) -> None:
        """Remember what has been issued on ``stream`` so far."""
        self.stream, self.position = stream, stream.issued


_entered: list[Stream] = []


def start(stream: Stream) -> Stream:
    """Make ``stream`` the one that the program starts on."""
    stream.name = MAIN
    _entered[:] = [stream]
    return stream


def current() -> Stream:
    """The stream that the program issues on now."""
    return _entered[-1] if _entered else start(Stream())


def enter(stream: Stream) -> None:
    """Issue on ``stream`` until :func:`leave`."""
    _entered.append(stream)


def leave() -> None:
    """Go back to the stream before."""
    if len(_entered) > 1:
        _entered.pop()

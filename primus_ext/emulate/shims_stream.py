"""Streams and events of a device whose work the host does, in program order.

The order that the program asks for is told to the active recorder: which stream is current, and
which stream waits for which.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from primus_ext.observe import recorder, streams


def _record() -> streams.Streams | None:
    """Where dependencies are noted, if somebody records."""
    active = recorder.current()
    return active.streams if active is not None and active.recording else None


class HostEvent:
    """``torch.cuda.Event``; time is the host's."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self._time = 0.0
        self._mark: streams.Mark | None = None

    def record(self, stream: Any = None) -> None:
        """Take the time."""
        self._time = time.perf_counter()
        record = _record()
        self._mark = None if record is None else record.mark(_key(stream))

    def elapsed_time(self, end_event: HostEvent) -> float:
        """Milliseconds from this event to ``end_event``."""
        return (end_event._time - self._time) * 1e3

    def query(self) -> bool:
        """All work before it is done."""
        return True

    def wait(self, stream: Any = None) -> None:
        """What comes on the stream (default: the current one) comes after it."""
        record = _record()
        if record is not None and self._mark is not None:
            record.wait_mark(_key(stream), self._mark)

    def synchronize(self) -> None:
        """The host waits for it."""
        record = _record()
        if record is not None and self._mark is not None:
            record.host_waits_for_mark(self._mark)


class HostStream:
    """``torch.cuda.Stream``; also usable as ``with stream:``."""

    cuda_stream = 0
    stream_id = 0
    device_index = 0

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    @classmethod
    def priority_range(cls) -> tuple[int, int]:
        """Least and greatest priority, as on NVIDIA devices."""
        return (0, -5)

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        """Record ``event``, or a new one."""
        event = event or HostEvent()
        event.record(self)
        return event

    def wait_event(self, event: HostEvent) -> None:
        """What comes on this stream comes after ``event``."""
        event.wait(self)

    def wait_stream(self, stream: HostStream) -> None:
        """What comes on this stream comes after all that is on ``stream``."""
        record = _record()
        if record is not None:
            record.wait_stream(_key(self), _key(stream))

    def synchronize(self) -> None:
        """The host waits for all that is on this stream."""
        record = _record()
        if record is not None:
            record.host_waits_for_stream(_key(self))

    def query(self) -> bool:
        """All work is done."""
        return True

    def __enter__(self) -> HostStream:
        streams.enter(_key(self))
        return self

    def __exit__(self, *_exc: Any) -> None:
        streams.leave()


class ExternalHostStream(HostStream):
    """``torch.cuda.ExternalStream``."""


COMPUTE = HostStream()
"""The stream on which a program starts."""


def _key(stream: Any) -> Any:
    """What the record knows a stream by; no stream means the current one."""
    if stream is None:
        return streams.current()
    return None if stream is COMPUTE else stream


def current_stream(_device: Any = None) -> HostStream:
    """``torch.cuda.current_stream``."""
    return streams.current() or COMPUTE


def set_stream(stream: HostStream | None) -> None:
    """``torch.cuda.set_stream``; None changes nothing."""
    if stream is not None:
        streams.replace(_key(stream))


@contextlib.contextmanager
def stream_context(stream: HostStream | None) -> Iterator[Any]:
    """``torch.cuda.stream``; None changes nothing."""
    streams.enter(_key(stream))
    try:
        yield stream
    finally:
        streams.leave()

"""Streams and events of a device whose work the host does, in program order."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from primus_ext.observe import streams


class HostEvent(streams.Event):
    """``torch.cuda.Event``; time is the host's."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        super().__init__()
        self._time = 0.0

    def record(self, stream: Any = None) -> None:
        """Take the time, and the position in the stream."""
        self._time = time.perf_counter()
        self.mark(stream if isinstance(stream, streams.Stream) else streams.current())

    def elapsed_time(self, end_event: HostEvent) -> float:
        """Milliseconds from this event to ``end_event``."""
        return (end_event._time - self._time) * 1e3

    def query(self) -> bool:
        """All work before it is done."""
        return True

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for here; on the device ``stream`` waits."""
        waiting = stream if isinstance(stream, streams.Stream) else streams.current()
        if self.stream is not None:
            waiting.wait_for(self.stream, self.position)

    def synchronize(self) -> None:
        """Nothing to wait for."""


class HostStream(streams.Stream):
    """``torch.cuda.Stream``; also usable as ``with stream:``."""

    cuda_stream = 0
    stream_id = 0
    device_index = 0

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        super().__init__()

    @classmethod
    def priority_range(cls) -> tuple[int, int]:
        """Least and greatest priority, as on NVIDIA devices."""
        return (0, -5)

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        """Record ``event``, or a new one."""
        event = event or HostEvent()
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for here; on the device what follows waits."""
        if isinstance(event, HostEvent):
            event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for here; on the device what follows waits."""
        if isinstance(stream, streams.Stream):
            self.wait_for(stream, stream.issued)

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """All work is done."""
        return True

    def __enter__(self) -> HostStream:
        streams.enter(self)
        return self

    def __exit__(self, *_exc: Any) -> None:
        streams.leave()


class ExternalHostStream(HostStream):
    """``torch.cuda.ExternalStream``."""


@contextlib.contextmanager
def stream_context(stream: Any) -> Iterator[Any]:
    """``torch.cuda.stream``."""
    if not isinstance(stream, streams.Stream):  # None: nothing changes
        yield stream
        return
    streams.enter(stream)
    try:
        yield stream
    finally:
        streams.leave()

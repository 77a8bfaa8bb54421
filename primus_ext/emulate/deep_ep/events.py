"""Events of DeepEP: nothing runs beside anything else on the virtual accelerator."""

from __future__ import annotations

from typing import Any


class EventHandle:
    """A point on a stream."""

    def current_stream_wait(self) -> None:
        """The current stream is there already."""


class EventOverlap:
    """What dispatch and combine return to be waited for."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: Any = None) -> None:
        """Wrap an event.

        Args:
            event: The event, or None where the caller did not ask for one.
            extra_tensors: Tensors to keep until then.
        """
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """Make the current stream wait for the event."""
        if self.event is None:
            raise AssertionError("there is no event to wait for: async_finish was off")
        self.event.current_stream_wait()

"""Where the time of a step goes, on a real device: every instant belongs to exactly one key.

Nothing waits for the device while a step runs.  A mark is a clock reading on the CPU, and an event
in the current stream on a GPU; marks become durations when the step is over.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

OUTSIDE = ""
"""Key of what is not asked about."""


class Stopwatch:
    """A timeline of marks, each of which begins what its key names."""

    def __init__(self, on_gpu: bool) -> None:
        """Nothing is timed yet.

        Args:
            on_gpu: Whether the work is that of a CUDA or ROCm device.
        """
        self._stamp: Callable[[], Any] = _event if on_gpu else time.perf_counter
        self.on_gpu = on_gpu
        self._marks: list[tuple[Hashable, Any]] = []
        self.key: Hashable = OUTSIDE
        """What is running."""
        self.running = False

    def start(self, key: Hashable) -> None:
        """Begin a timeline with ``key``."""
        self._marks.clear()
        self.running = True
        self.switch(key)

    def switch(self, key: Hashable) -> None:
        """What runs from now on."""
        self.key = key
        if self.running:
            self._marks.append((key, self._stamp()))

    @contextlib.contextmanager
    def inside(self, key: Hashable) -> Iterator[None]:
        """``key`` runs inside, and afterwards what ran before."""
        before = self.key
        self.switch(key)
        try:
            yield
        finally:
            self.switch(before)

    def stop(self) -> dict[Hashable, float]:
        """End the timeline: seconds of each key."""
        self.switch(OUTSIDE)
        self.running = False
        if self.on_gpu:
            torch.cuda.synchronize()
        durations: dict[Hashable, float] = defaultdict(float)
        for (key, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            durations[key] += begin.elapsed_time(end) * 1e-3 if self.on_gpu else end - begin
        return dict(durations)


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event

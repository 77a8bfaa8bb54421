"""The memory of a microbatch beside others: what ran before it in its chunk, what is in flight."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

from primus_ext.frameworks.megatron.microbatch import Microbatch, tensors
from primus_ext.observe.recorder import LiveBytes
from primus_ext.trace import AfterBackward, ChunkMemory, FirstMicrobatch

Maker = Callable[[list[Any]], Microbatch]
"""A microbatch that reports its losses to the list."""


class _Several:
    """Runs microbatches of one chunk and tells highest points above the state without any.

    What is kept of finished ones is no part of that state; losses and numbers of tokens of other
    microbatches are accounted for apart.
    """

    def __init__(self, make: Maker, memory: LiveBytes, alone: ChunkMemory) -> None:
        gc.collect()
        self._make, self._memory = make, memory
        self._losses: list[Any] = []
        self._running: list[Microbatch] = []
        self._finished: Microbatch | None = None
        self._base = memory.live - alone.leftover_bytes

    def _apart(self) -> int:
        counted = sum(one.counted() for one in self._running)
        return self._memory.size_of(tensors(self._losses)) + counted

    @property
    def held(self) -> int:
        """Bytes that are there now."""
        return self._memory.live - self._base - self._apart()

    def forward(self, *, first: bool = False) -> int:
        """Forward of one more; its highest point."""
        one, before = self._make(self._losses), self._base + self._apart()
        self._memory.mark()
        one.forward(first)
        self._running.append(one)
        if self._finished is not None:
            self._finished.forget_output()
            self._finished = None
        return one.forward_peaks[1] - before

    def backward(self, *, forget: bool = True) -> int:
        """Backward of the oldest; its highest point.

        Args:
            forget: Whether its output is; else the next forward forgets it at its end.
        """
        before = self._base + self._apart()
        one = self._running.pop(0)
        one.backward(forget=forget)
        self._finished = None if forget else one
        return one.backward_peak - before


def in_flight(make: Maker, memory: LiveBytes, alone: ChunkMemory, beside: bool) -> ChunkMemory:
    """Add what differs while a second microbatch is in flight: modules keep the latest one's.

    Args:
        make: A microbatch that reports its losses to the list.
        memory: The recorder's.
        alone: The memory of a microbatch that nothing else is in flight with.
        beside: Whether the schedule refers to the output of a finished microbatch until its next
            forward is through.
    """
    if not alone.leftover_bytes:  # modules keep nothing: microbatches don't touch each other
        return alone
    several, own = _Several(make, memory, alone), alone.saved_bytes
    several.forward()
    second = several.forward()
    older = several.held - own
    sizes = dataclasses.replace(
        alone,
        inflight_saved_bytes=older,
        inflight_forward_peak_bytes=second - older,
        inflight_backward_peak_bytes=several.backward() - own,
    )
    kept = several.held - own
    beside = beside and alone.graph_bytes > 0
    if not kept and not beside:
        several.backward()
        return sizes
    referred = alone.stub_bytes + alone.graph_bytes if beside else 0
    several.forward()
    several.backward(forget=not beside)
    ahead = several.forward() - older - referred
    several.forward()
    several.backward()
    after = AfterBackward(kept, ahead, several.backward() - own, several.backward())
    if beside:
        several.forward()
        several.backward(forget=False)
        peak = several.forward() - referred
        several.backward()
        sizes = dataclasses.replace(sizes, forward_peak_beside_bytes=peak)
    return dataclasses.replace(sizes, after_backward=after)


def first_of_step(
    make: Maker, memory: LiveBytes, alone: ChunkMemory, pipeline: bool
) -> ChunkMemory:
    """Add what differs in the first microbatch of a step, where weights are quantized.

    Args:
        make: A microbatch that reports its losses to the list.
        memory: The recorder's.
        alone: The memory of a later microbatch.
        pipeline: Whether several microbatches can be in flight.
    """
    several = _Several(make, memory, alone)
    ahead = several.forward(first=True)
    absent = alone.saved_bytes - several.held
    back = several.backward()
    if not absent:
        usual = alone.forward_peak_after_bytes or alone.forward_peak_bytes
        first = FirstMicrobatch(0, ahead) if ahead != usual else None
        return dataclasses.replace(alone, first=first)
    among = None
    if pipeline:
        several = _Several(make, memory, alone)
        several.forward(first=True)
        several.forward()
        among = several.backward() - alone.saved_bytes
        several.backward()
    return dataclasses.replace(alone, first=FirstMicrobatch(absent, ahead, back, among))
